"""The token-wise parts of a layer: q, k, v of a chunk's heads, and what follows attention."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from typing_extensions import override

from megatron_untied.context_parallel.exchange import HeadBlocks
from megatron_untied.context_parallel.sequence import SequenceInfo
from megatron_untied.context_parallel.ulysses import Projections
from megatron_untied.lora import add_low_rank_
from megatron_untied.residual import Rows
from megatron_untied.rope import rotate_
from megatron_untied.tiling import Tile, split_rows


class LowRank(NamedTuple):
    """An adapter with the rows of some heads: ``scale * x a^T b^T`` is added to a projection."""

    a: Tensor  # [r, m]
    b: Tensor  # [heads * d, r]
    scale: float


class StreamedProjections(Projections):
    """Norm, projection to some heads, rotation: from the layer's input to the send buffers.

    A projection costs little beside attention, so each chunk projects its own heads anew, and no
    more than a tile of q, k or v exists outside the exchange.
    """

    def __init__(
        self,
        layer: TransformerLayer,
        x: Rows,
        tiles: Sequence[Tile],
        sequence: SequenceInfo,
    ):
        """``x``: [n, b, m] or [n/t, b, m]; ``sequence``: what gives its tokens their positions."""
        self.layer, self.x, self.tiles = layer, x, tiles
        self.n = sum(run.stop - run.start for tile in tiles for run in tile.seen)
        self.b, self.dtype, self.device = x.shape[1], x.dtype, x.device
        self.attention = layer.self_attention
        # cos and sin, fp32 [n, b or 1, 1, rot/2] each.
        self.rotary = self.attention.context.cos_sin(sequence, x.device, self.n)
        self.tile_rows = tiles[0].local.stop - tiles[0].local.start  # no tile has more

    @override
    def write(self, kind: Literal["q", "k", "v"], heads: Sequence[range], send: Tensor) -> None:
        # A key-value head that several ranks use is projected once.
        projected = sorted({head for rank_heads in heads for head in rank_heads})
        if not projected:
            return
        weight, bias, low_rank = self._matrices(kind, projected)
        d = self.attention.hidden_size_per_attention_head
        # The projection holds only ``projected``: heads are renumbered to its columns.
        column = {head: i for i, head in enumerate(projected)}
        columns = [range(column[x[0]], column[x[0]] + len(x)) if x else x for x in heads]
        blocks = HeadBlocks(send, columns, self.n, self.b, d)
        norms = {"q": self.attention.q_layernorm, "k": self.attention.k_layernorm, "v": None}
        for tile, x in zip(self.tiles, self.x.tiles(self.tiles), strict=True):
            y = self._project(x, weight, bias, low_rank)  # [t, b, m] -> [t, b, heads * d]
            y = y.unflatten(-1, (len(projected), d))
            if norms[kind] is not None:
                y = norms[kind](y)
            for rows, part in split_rows(y, tile.seen):  # [rows, b, heads, d]
                if kind != "v":
                    rotate_(part, *(table[rows] for table in self.rotary))
                for block, of_ranks in blocks.pairs(rows, part):
                    block.copy_(of_ranks)  # [ranks, rows, b, heads per rank, d]

    def _project(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, low_rank: LowRank | None
    ) -> Tensor:
        """One tile. In a function, whose return frees the normalized input."""
        x = self.layer.input_layernorm(x)
        if self.layer.config.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, group=self.layer.tp_group)
        y = F.linear(x, weight, bias)
        if low_rank is not None:
            add_low_rank_(y, F.linear(x, low_rank.a), low_rank.b, low_rank.scale)
        return y

    def _matrices(
        self, kind: Literal["q", "k", "v"], heads: Sequence[int]
    ) -> tuple[Tensor, Tensor | None, LowRank | None]:
        """Weight [heads * d, m], bias [heads * d] and adapter of ``heads``.

        They are picked from Megatron's order, which keeps the rows of one key-value head together:
        its query heads, its k, its v. Adapters have the rows of one kind alone.
        """
        attention, d = self.attention, self.attention.hidden_size_per_attention_head
        ratio = (
            attention.num_attention_heads_per_partition // attention.num_query_groups_per_partition
        )
        if kind == "q":
            blocks = [head // ratio * (ratio + 2) + head % ratio for head in heads]
        else:
            blocks = [head * (ratio + 2) + ratio + (kind == "v") for head in heads]

        def pick(parameter: Tensor | None, blocks: Sequence[int]) -> Tensor | None:
            rows = None if parameter is None else parameter.unflatten(0, (-1, d))  # [blocks, d, m]
            # Not rows[blocks]: a list of numbers would be copied to the device, and waited for.
            return None if rows is None else torch.cat([rows[i] for i in blocks])

        linear, low_rank = attention.linear_qkv, None
        if f"{kind}_proj" in (adapters := getattr(linear, "adapters", ())):
            adapter = adapters[f"{kind}_proj"]
            low_rank = LowRank(adapter.lora_A, pick(adapter.lora_B, heads), adapter.scale)
        return pick(linear.weight, blocks), pick(linear.bias, blocks), low_rank


def queries_keys_values(layer: TransformerLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All heads of a tile, not yet rotated: [t, b, m] -> q [t, b, h, d], k, v [t, b, g, d]."""
    return layer.self_attention.get_query_key_value_tensors(layer.input_layernorm(x))


def attention_and_mlp(layer: TransformerLayer, x: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
    """The addends of the layer's output: [t, b, m], [t, b, h, d] -> twice [t, b, m].

    They are the residual after attention and the MLP's output.
    """
    # The output projection has no name here, so that it is freed before the MLP allocates.
    y = x + _with_bias(*layer.self_attention.linear_proj(o.flatten(2)))
    return y, _with_bias(*layer.mlp(layer.pre_mlp_layernorm(y)))


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias


class UnreadColumnParallelLinear(ColumnParallelLinear):
    """Megatron-core's, but where gradients are recorded the output is a stand-in of NaN.

    For the slots of a streamed layer. Gradients are recorded there only to recompute a tile, and
    what the tile's last product returns is not read then: its backward needs the input alone.
    """

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[t, b, m] or with sequence parallelism [t/p, b, m] -> [t, b, columns of this rank]."""
        if not torch.is_grad_enabled():
            return super().forward(x)
        enter = copy_to_tensor_model_parallel_region
        if self.sequence_parallel:
            enter = gather_from_sequence_parallel_region
        return _Unread.apply(enter(x, group=self.tp_group), self.weight, self.bias, None), None


class UnreadRowParallelLinear(RowParallelLinear):
    """The same for a product that is summed over tensor-parallel ranks: its sum is left out too."""

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """[t, b, rows of this rank] -> [t, b, m], or with sequence parallelism [t/p, b, m]."""
        if not torch.is_grad_enabled():
            return super().forward(x)
        group = self.tp_group if self.sequence_parallel else None
        return _Unread.apply(x, self.weight, None, group), self.bias


UNREAD = {
    ColumnParallelLinear: UnreadColumnParallelLinear,
    RowParallelLinear: UnreadRowParallelLinear,
}


class _Unread(torch.autograd.Function):
    """``x @ weight.T + bias`` that is not computed, with its gradients."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, scattered_over: ProcessGroup | None
    ) -> Tensor:
        """[t, b, k], [m, k], [m] -> [t, b, m], or [t/p, b, m] if its rows would be scattered."""
        ctx.save_for_backward(x, weight)
        ctx.scattered_over = scattered_over
        rows = len(x) // (scattered_over.size() if scattered_over else 1)
        # One element of memory, as in :func:`megatron_untied.residual.stand_in`.
        return x.new_full((1,), torch.nan).expand(rows, *x.shape[1:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        """The products that megatron-core computes, in its order."""
        x, weight = ctx.saved_tensors
        if ctx.scattered_over:
            gradient = gather_from_sequence_parallel_region(gradient, group=ctx.scattered_over)
        _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)  # [t * b, m]
        dx = (rows @ weight).view_as(x)
        d_weight = rows.t() @ x.flatten(0, -2) if needs_weight else None
        return dx, d_weight, rows.sum(0) if needs_bias else None, None
