"""What a streamed layer's token-wise parts take on one tile, at their highest moments.

Counted from megatron-core's MLP and linear layers and from what autograd saves of them. Letters in
the sums: t tokens of a tile, m hidden size, f MLP width, w width of all query heads, k width of
all keys and values. Each moment is a sum of tensors; the highest counts.
"""

from dataclasses import dataclass

from megatron_untied.planner.causes import Bytes, Cause
from megatron_untied.planner.geometry import Geometry
from megatron_untied.planner.weights import Unit

_ROTATED_AT_ONCE = 1 << 23
"""Elements that a rotation has in fp32 at a time; see ``rope.py``."""


@dataclass(frozen=True)
class Tiles:
    """Temporaries of tiles on one rank."""

    geometry: Geometry

    def projecting(self) -> Bytes:
        """One chunk's queries: the normed tile, two tiles of queries, the rows of the weight."""
        geo = self.geometry
        heads = max(sum(len(turn.query_heads) for turn in chunk) for chunk in geo.schedule.chunks)
        queries = geo.tile * heads * geo.d
        normed = self._whole + (self._own if geo.num_token_parts > 1 else 0)
        rotated = min(queries, _ROTATED_AT_ONCE) * 4 // geo.itemsize
        tiles = max(normed + 2 * queries, queries + rotated)
        return self._tiles(tiles + heads * geo.d * geo.m)

    def after_forward(self) -> Bytes:
        """Output projection and MLP, when the gate and what it multiplies are there."""
        inside = (5 if self._is_gated else 2) * self._inner
        return self._tiles(self._attended + 2 * self._own + inside)

    def after_backward(self) -> Bytes:
        """MLP backwards: when the gate's or the first matrix' gradients are there."""
        matrix = self.geometry.m * self.geometry.f
        gate = (7 if self._is_gated else 3) * self._inner + self._own + matrix
        up = (2 if self._is_gated else 1) * self._inner + self._own + self._whole
        up += (3 if self._is_gated else 2) * matrix
        return self._tiles(self._around + max(gate, up))

    def after_backward_end(self, weights: Unit) -> Bytes:
        """MLP and output projection backwards, when all gradients of the tile are there."""
        return self._tiles(self._around + self._attended + weights.numel)

    def before_backward(self, weights: Unit) -> Bytes:
        """QKV projection and norm backwards."""
        geo = self.geometry
        qkv, key_value = (geo.tile * heads * geo.d for heads in (geo.h + 2 * geo.g, 2 * geo.g))
        copied = self._attended if 1 < geo.g < geo.h else 0  # queries, to be contiguous
        converted = key_value if geo.schedule.shares_kv_heads and geo.itemsize < 4 else 0
        before = self._own if geo.num_tiles > 1 else 0
        gradients = self._attended + converted
        alive = 2 * qkv + copied + gradients + before + 2 * self._own + weights.numel
        if geo.num_token_parts > 1:
            rotary = geo.tile * geo.d * 4 // geo.itemsize
            alive += self._whole + key_value * (not converted) + rotary
        return self._tiles(alive)

    @property
    def _around(self) -> int:
        """Attention's output, y, the layer's output; from the second tile on the last gradients."""
        last = self._own + self._attended if self.geometry.num_tiles > 1 else 0
        return self._attended + 2 * self._own + last

    @property
    def _is_gated(self) -> bool:
        return self.geometry.config.model.swiglu

    @property
    def _inner(self) -> int:
        """T x f."""
        return self.geometry.tile * self.geometry.f

    @property
    def _whole(self) -> int:
        """T x m."""
        return self.geometry.tile * self.geometry.m

    @property
    def _own(self) -> int:
        """T x m of this rank's tokens, which sequence parallelism gathers."""
        return self._whole // self.geometry.num_token_parts

    @property
    def _attended(self) -> int:
        """T x w."""
        return self.geometry.tile * self.geometry.h * self.geometry.d

    def _tiles(self, numel: int) -> Bytes:
        return Bytes({Cause.TILES: numel * self.geometry.itemsize})


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
