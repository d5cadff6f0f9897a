"""What the chunked loss takes; see ``loss/chunked_cross_entropy.py``."""

from megatron_untied.planner.causes import Bytes, Cause
from megatron_untied.planner.geometry import Geometry


def loss_bytes(geometry: Geometry) -> Bytes:
    """At the highest moment of a chunk of tokens: logits, their gradient, the weight's gradient.

    Logits are fp32 and their gradient is written over them; beside them is its narrow copy for the
    matrix products. The final norm has its output and two gradients of a chunk.
    """
    geo = geometry
    rows = _rows_per_chunk(geo)
    tokens = rows * geo.num_token_parts  # gathered over tensor-parallel ranks
    narrow = geo.itemsize if geo.itemsize < 4 else 0
    logits = tokens * _num_columns(geo) * (4 + narrow)
    norm = 3 * rows * geo.m * geo.itemsize
    gathered = 2 * tokens * geo.m * geo.itemsize if geo.num_token_parts > 1 else 0
    losses = geo.n * geo.b * 4
    return Bytes(
        {
            Cause.LOGITS: logits + norm + gathered + losses,
            Cause.WEIGHT_GRADIENTS: 4 * geo.v * geo.m,
        }
    )


def _rows_per_chunk(geo: Geometry) -> int:
    here = geo.n * geo.b // geo.num_token_parts
    chunk = geo.config.memory.loss_chunk_size
    return here if chunk is None else min(here, max(chunk // geo.num_token_parts, 1))


def _num_columns(geo: Geometry) -> int:
    """Of the logits on the first rank, whose rows of the vocabulary are all real."""
    return min(geo.v, geo.config.model.vocab_size)
