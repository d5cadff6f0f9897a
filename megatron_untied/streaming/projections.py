"""Queries, keys and values made when a chunk needs them, tile by tile."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from typing_extensions import override

from megatron_untied.context_parallel.exchange import HeadBlocks
from megatron_untied.context_parallel.ulysses import Projections
from megatron_untied.rope import rotate_
from megatron_untied.streaming.rows import Rows
from megatron_untied.tiling import Tile, split_rows


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
        rotary: tuple[Tensor, Tensor],
    ):
        self.layer, self.x, self.tiles, self.rotary = layer, x, tiles, rotary
        self.n = sum(run.stop - run.start for tile in tiles for run in tile.seen)
        self.b, self.dtype, self.device = x.shape[1], x.dtype, x.device
        self.attention = layer.self_attention

    @override
    def write(self, kind: Literal["q", "k", "v"], heads: Sequence[range], send: Tensor) -> None:
        # A key-value head that several ranks need is projected once.
        projected = sorted({head for rank_heads in heads for head in rank_heads})
        if not projected:
            return
        weight, bias = self._rows(kind, projected)
        d = self.attention.hidden_size_per_attention_head
        column = {head: place for place, head in enumerate(projected)}
        columns = [range(column[x[0]], column[x[0]] + len(x)) if x else x for x in heads]
        blocks = HeadBlocks(send, columns, self.n, self.b, d)
        for tile, x in zip(self.tiles, self.x.tiles(self.tiles), strict=True):
            y = F.linear(self._normed(x), weight, bias)  # [t, b, m] -> [t, b, heads * d]
            y = self._head_norm(kind, y.unflatten(-1, (len(projected), d)))
            for rows, part in split_rows(y, tile.seen):
                if kind != "v":
                    rotate_(part, *(table[rows] for table in self.rotary))
                blocks.write(rows, part)

    def _normed(self, x: Tensor) -> Tensor:
        y = self.layer.input_layernorm(x)
        if self.layer.config.sequence_parallel:
            y = gather_from_sequence_parallel_region(y, group=self.layer.tp_group)
        return y

    def _rows(self, kind: str, heads: list[int]) -> tuple[Tensor, Tensor | None]:
        """Weight [heads * d, m] and bias of some heads, out of Megatron's interleaved order.

        The rows of one key-value head stand together: its query heads, its k, its v.
        """
        share = (
            self.attention.num_attention_heads_per_partition
            // self.attention.num_query_groups_per_partition
        )
        group_size = share + 2
        places = {
            "q": lambda head: head // share * group_size + head % share,
            "k": lambda head: head * group_size + share,
            "v": lambda head: head * group_size + share + 1,
        }
        index = [places[kind](head) for head in heads]
        linear, d = self.attention.linear_qkv, self.attention.hidden_size_per_attention_head

        def pick(parameter: Tensor | None) -> Tensor | None:
            if parameter is None:
                return None
            rows = parameter.unflatten(0, (-1, d))
            # Not rows[index]: a list of numbers would be sent to the device, and waited for.
            return torch.cat([rows[i] for i in index])

        return pick(linear.weight), pick(linear.bias)

    def _head_norm(self, kind: str, y: Tensor) -> Tensor:
        norms = {"q": self.attention.q_layernorm, "k": self.attention.k_layernorm, "v": None}
        return y if norms[kind] is None else norms[kind](y)


def queries_keys_values(layer: TransformerLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All heads of a tile, not yet rotated: [t, b, m] -> q [t, b, h, d], k, v [t, b, g, d]."""
    return layer.self_attention.get_query_key_value_tensors(layer.input_layernorm(x))


def after_attention(layer: TransformerLayer, x: Tensor, o: Tensor) -> Tensor:
    """The layer's output from its input and attention: [t, b, m], [t, b, h, d] -> [t, b, m]."""
    y = x + _with_bias(*layer.self_attention.linear_proj(o.flatten(2)))
    return y + _with_bias(*layer.mlp(layer.pre_mlp_layernorm(y)))


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias
