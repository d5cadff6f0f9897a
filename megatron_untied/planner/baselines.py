"""What published methods take of a GPU, by rules about their buffers, to compare a plan with.

Both recompute layers fully with their inputs on the host, run MLP, norm and loss by tiles, shard
with FSDP2 in layers with embedding and output in the root unit, and attend with FlashAttention-3:
the stack of Ulysses with tiling (USP, arXiv 2405.07719; ALST, arXiv 2506.13996), and untied Ulysses
as published (arXiv 2602.21196). The peak is in attention's backward.

Letters: H is the residual of a rank, w and k the widths of all query and all key-value heads over
the hidden size, r the part of the heads in one chunk, A x P Ulysses x ring ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_untied.config import ModelConfig
from megatron_untied.planner.weights import parameter_units


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A model and a sequence on ranks that share it."""

    model: ModelConfig
    seq_length: int
    num_ulysses: int
    num_ring: int = 1

    @property
    def num_ranks(self) -> int:
        """All that share the sequence and the weights."""
        return self.num_ulysses * self.num_ring

    @property
    def residual_bytes(self) -> float:
        """H in bf16."""
        return self.seq_length / self.num_ranks * self.model.hidden_size * 2


def ulysses_with_tiling(setting: Setting) -> dict[str, float]:
    """Bytes by cause of the stack that exchanges all heads at once."""
    return _bytes(setting, heads_per_rank=_share(setting.model.num_attention_heads, setting))


def untied_as_published(setting: Setting, heads_per_rank: int = 1) -> dict[str, float]:
    """Bytes by cause of untied Ulysses' own implementation, so many heads a rank a chunk."""
    return _bytes(setting, heads_per_rank=heads_per_rank, accumulates=True)


METHODS = {
    "Ulysses with tiling": ulysses_with_tiling,
    "untied Ulysses as published": untied_as_published,
}


def _bytes(setting: Setting, *, heads_per_rank: int, accumulates: bool = False) -> dict[str, float]:
    h = setting.residual_bytes
    parts = {
        "exchanged heads": _exchanged(setting, heads_per_rank),
        "ring": _ring(setting, heads_per_rank) if setting.num_ring > 1 else 0.0,
        "attention of own tokens": _own_tokens(setting, accumulates=accumulates),
        "around attention": _around(setting),
    }
    in_h = {cause: h * number for cause, number in parts.items() if number}
    return in_h | _weights(setting)


def _exchanged(setting: Setting, heads_per_rank: int) -> float:
    """In H: q, o, dO, dQ and k, v, dK, dV of the heads in use, over their part of the sequence.

    And the kernel's own: dQ in fp32; where query heads share a key-value head dK and dV too.
    """
    q, kv = _query(setting, heads_per_rank), _key_value(setting, heads_per_rank)
    is_shared = heads_per_rank > _key_value_heads(setting, heads_per_rank)
    return 4 * q + 4 * kv + 2 * q + (4 * kv if is_shared else 0.0)


def _ring(setting: Setting, heads_per_rank: int) -> float:
    """In H, of USP's ring attention.

    Sums of dQ, dK, dV in fp32; the dK, dV that are passed on, in fp32; the next k, v; and what the
    kernel writes in one step.
    """
    q, kv = _query(setting, heads_per_rank), _key_value(setting, heads_per_rank)
    sums, passed_on, borrowed, written = 2 * q + 4 * kv, 4 * kv, 2 * kv, q + 2 * kv
    return sums + passed_on + borrowed + written


def _own_tokens(setting: Setting, *, accumulates: bool) -> float:
    """In H: the normed input, O and dO of all heads; by chunks also the sum of the input's dX."""
    w = setting.model.num_attention_heads * setting.model.kv_channels / setting.model.hidden_size
    return 1 + 2 * w + accumulates


def _around(setting: Setting) -> float:
    """In H: the layer's input, the gradient, the first layer's input, which never leaves.

    And cosines and sines of the whole sequence in bf16, and three fp32 statistics of each row.
    """
    model = setting.model
    table = setting.num_ranks * model.kv_channels * 2 / model.hidden_size
    statistics = 3 * 2 * model.num_attention_heads / model.hidden_size
    return 3 + table + statistics


def _weights(setting: Setting) -> Mapping[str, float]:
    """States in fp32, 16 bytes a parameter over the ranks.

    Gathered in bf16: embedding and output matrix through all of backward, a layer and the next.
    Gradients in bf16: of the output matrix until the end, of the last layer while it is reduced.
    """
    units = parameter_units(setting.model)
    ends = units.embedding.numel + units.output.numel
    output = units.output.numel or units.embedding.numel
    return {
        "weights, gradients and moments": 16 * units.numel / setting.num_ranks,
        "gathered weights": 2 * (ends + 2 * units.layer.numel),
        "whole gradients": 2 * (output + units.layer.numel),
    }


def _query(setting: Setting, heads_per_rank: int) -> float:
    """In H: query heads of one rank over its Ulysses group's part of the sequence."""
    model = setting.model
    return heads_per_rank * setting.num_ulysses * model.kv_channels / model.hidden_size


def _key_value(setting: Setting, heads_per_rank: int) -> float:
    return _query(setting, _key_value_heads(setting, heads_per_rank))


def _key_value_heads(setting: Setting, heads_per_rank: int) -> int:
    share = setting.model.num_attention_heads // setting.model.num_query_groups
    return -(-heads_per_rank // share)


def _share(heads: int, setting: Setting) -> int:
    return -(-heads // setting.num_ulysses)
