"""Temporaries of one tile of a streamed layer, and of one chunk of the loss, at their peaks.

Counted from megatron-core's MLP and linear layers and from what autograd saves of them: each peak
is a sum of tensors that are alive at the same moment, and the largest such sum counts.
"""

import math
from dataclasses import dataclass

from megatron_untied.phases import MemoryCategory
from megatron_untied.planner.geometry import Bytes, Geometry
from megatron_untied.planner.weights import ParameterUnits, full_gradients

_ROTATED_AT_ONCE = 1 << 23
"""Elements that a rotation has in fp32 at a time; see ``rope.py``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Peaks of a streamed layer's token-wise parts on one rank, a tile at a time."""

    projection: Bytes
    """Norm, projection and rotation of one chunk's queries."""
    mlp_forward: Bytes
    """Output projection, norm and MLP."""
    mlp_backward: Bytes
    """The MLP's backward."""
    mlp_backward_end: Bytes
    """The output projection's backward, when all gradients of the tile are there."""
    qkv_backward: Bytes
    """The backward of QKV projection and norm."""

    @classmethod
    def of(cls, geometry: Geometry, units: ParameterUnits) -> "Tiles":
        """Of one rank, which holds ``units``.

        Shapes in comments: t tokens of a tile, m, f, h, g, d of the geometry.
        """
        geo, model = geometry, geometry.config.model
        gathers = geo.num_token_parts > 1
        hidden = geo.tile_tokens * geo.m  # [t, m], gathered over tensor-parallel ranks
        own = hidden // geo.num_token_parts  # [t / parts, m]
        inner = geo.tile_tokens * geo.f  # [t, f]
        attended = geo.tile_tokens * geo.h * geo.d  # [t, h, d]

        # Projection: the normed tile, two copies of the queries, the rows of the weight.
        heads = max(sum(len(turn.query_heads) for turn in chunk) for chunk in geo.schedule.chunks)
        queries = geo.tile_tokens * heads * geo.d
        normed = hidden + (own if gathers else 0)
        rotated = min(queries, _ROTATED_AT_ONCE) * 4 // geo.itemsize  # fp32, counted in elements
        projection = max(normed + 2 * queries, queries + rotated) + heads * geo.d * geo.m

        # MLP forward: the peak is where the gate and what it multiplies are there.
        mlp_forward = attended + 2 * own + (5 if model.swiglu else 2) * inner

        # A tile's last product is left out in backward, by megatron-core's own linear layers only,
        # and not where adapters add to it.
        is_local, targets = geo.config.transformer_impl == "local", geo.config.adaptation.targets
        # MLP backward: attention's output and y are alive all along, and from the second tile on
        # the gradients of the tile before.
        outside = attended + own + (own + attended if geo.num_tiles > 1 else 0)
        outside += 0 if is_local and not targets("down_proj") else own
        # Of weights: those of the layer that trains the most.
        after_attention = [layer.output_and_mlp for layer in units.layers]
        trained = {shape for unit in after_attention for shape in unit.trained}
        up, down = ((2 if model.swiglu else 1) * geo.f, geo.m), (geo.m, geo.f)
        up_matrix, down_matrix = (math.prod(shape) * (shape in trained) for shape in (up, down))
        gate_gradients = (7 if model.swiglu else 3) * inner + own + down_matrix
        up_gradients = (2 if model.swiglu else 1) * inner + own + hidden
        up_gradients += up_matrix + down_matrix
        mlp_backward = outside + max(gate_gradients, up_gradients)
        # A tile's weight gradients, in the model's dtype until they join the fp32 sums.
        mlp_backward_end = outside + attended
        mlp_backward_end += max(unit.trained_numel for unit in after_attention)

        # QKV backward: the gradients of q, k, v beside all that these are made from.
        qkv, kv = (geo.tile_tokens * heads * geo.d for heads in (geo.h + 2 * geo.g, 2 * geo.g))
        copied = attended if 1 < geo.g < geo.h else 0  # grouped queries are made contiguous
        # Several ranks' parts of dK and dV meet in fp32 and are converted here.
        converted = kv if geo.schedule.shares_kv_heads and geo.itemsize < 4 else 0
        last_tile = own if geo.num_tiles > 1 else 0
        qkv_backward = qkv + attended + converted + last_tile + 2 * own
        is_adapted = bool(targets("q_proj", "k_proj", "v_proj"))
        # The norms' backward reads q and k, and adapters add to them.
        if model.qk_layernorm or is_adapted or not is_local:
            qkv_backward += qkv + copied
        qkv_backward += max(layer.qkv.trained_numel for layer in units.layers)
        on_host = geo.config.memory.park_during_attention  # dK and dV: a tile of them is fetched
        if gathers:
            rotary = geo.tile_tokens * geo.d * 4 // geo.itemsize
            qkv_backward += hidden + rotary
        if gathers or on_host:
            qkv_backward += 0 if converted else kv

        peaks = {
            "projection": projection,
            "mlp_forward": mlp_forward,
            "mlp_backward": mlp_backward,
            "mlp_backward_end": mlp_backward_end,
            "qkv_backward": qkv_backward,
        }
        return cls(
            **{
                name: Bytes({MemoryCategory.TILES: numel * geo.itemsize})
                for name, numel in peaks.items()
            }
        )


def loss_bytes(geometry: Geometry, units: ParameterUnits, *, evaluates: bool = False) -> Bytes:
    """The peak of the loss, in one chunk of tokens: logits, their gradient, the weight's gradient.

    Logits are fp32 and their gradient is written over them; the matrix products read a copy of it
    in the dtype of the model. If it ``evaluates`` there are no gradients, but losses and
    predictions of all tokens.
    """
    geo = geometry
    rows = geo.loss_tokens
    tokens = rows * geo.num_token_parts  # gathered over tensor-parallel ranks
    columns = min(geo.v, geo.config.model.vocab_size)  # the first rank has no padding
    if evaluates:
        one_chunk = tokens * columns * 4 + (rows + tokens) * geo.m * geo.itemsize
        # Loss and prediction of every token, and ones with which all labels are checked.
        return Bytes({MemoryCategory.LOGITS: one_chunk + geo.tokens * (4 + 8 + 4)})
    logits = tokens * columns * (4 + (geo.itemsize if geo.itemsize < 4 else 0))
    norm = 3 * rows * geo.m * geo.itemsize  # the final norm's output and two gradients
    gathered = 2 * tokens * geo.m * geo.itemsize if geo.num_token_parts > 1 else 0
    losses = geo.tokens * 4  # one fp32 value per token of the sequence
    matrix = units.embedding if units.is_tied else units.output
    made = Bytes({MemoryCategory.LOGITS: logits + norm + gathered + losses})
    return made + full_gradients(matrix)
