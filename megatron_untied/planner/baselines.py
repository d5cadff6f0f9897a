"""GPU memory of published methods, by rules about their buffers, for comparison with a plan.

Both methods recompute layers fully with their inputs on the host, run MLP, norm and loss by tiles,
shard with FSDP2 by layers with embedding and output matrix in the root unit, and attend with
FlashAttention-3: Ulysses with tiling (USP, arXiv 2405.07719; ALST, arXiv 2506.13996), and untied
Ulysses as published (arXiv 2602.21196). The peak is in attention's backward.

Unit: H is the bf16 residual of a rank, so a buffer of all heads takes the heads' width over the
hidden size.
"""

from dataclasses import dataclass

from megatron_untied.config import ModelConfig
from megatron_untied.planner.weights import parameter_units


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A model and a sequence on ranks that share both."""

    model: ModelConfig
    seq_length: int
    num_ulysses: int
    num_ring: int = 1

    @property
    def num_ranks(self) -> int:
        """Ulysses x ring ranks, which share the sequence and the weights."""
        return self.num_ulysses * self.num_ring

    @property
    def residual_bytes(self) -> float:
        """H: [seq_length / num_ranks, hidden_size] in bf16."""
        return self.seq_length / self.num_ranks * self.model.hidden_size * 2


def ulysses_with_tiling(setting: Setting) -> dict[str, float]:
    """Bytes by category of the method that exchanges all heads at once."""
    heads_per_rank = -(-setting.model.num_attention_heads // setting.num_ulysses)
    return _bytes_by_category(setting, heads_per_rank, accumulates=False)


def untied_as_published(setting: Setting, heads_per_rank: int = 1) -> dict[str, float]:
    """Bytes by category of untied Ulysses' own code; ``heads_per_rank``: query heads per chunk."""
    return _bytes_by_category(setting, heads_per_rank, accumulates=True)


METHODS = {
    "Ulysses with tiling": ulysses_with_tiling,
    "untied Ulysses as published": untied_as_published,
}


def _bytes_by_category(
    setting: Setting, heads_per_rank: int, *, accumulates: bool
) -> dict[str, float]:
    """``accumulates``: chunks add up the gradient of the layer's input."""
    model, m = setting.model, setting.model.hidden_size
    heads_per_kv_head = model.num_attention_heads // model.num_query_groups
    kv_heads_per_rank = -(-heads_per_rank // heads_per_kv_head)
    # In H: the heads in use on a rank, over its Ulysses group's part of the sequence.
    q, kv = (
        heads * setting.num_ulysses * model.kv_channels / m
        for heads in (heads_per_rank, kv_heads_per_rank)
    )
    exchanged = 4 * q + 4 * kv + 2 * q  # q, o, dO, dQ; k, v, dK, dV; the kernel's dQ in fp32
    if heads_per_rank > kv_heads_per_rank:
        exchanged += 4 * kv  # grouped heads: the kernel's dK and dV are fp32 too
    ring = 0.0
    if setting.num_ring > 1:
        sums = 2 * q + 4 * kv  # dQ, dK, dV in fp32
        passed_on, arriving = 4 * kv, 2 * kv  # fp32 dK and dV in transit; the next k and v
        written = q + 2 * kv  # by the kernel in one step of the ring
        ring = sums + passed_on + arriving + written
    output = model.num_attention_heads * model.kv_channels / m
    own_tokens = 1 + 2 * output + accumulates  # the normed input; O and dO; the sum of dX
    tables = setting.num_ranks * model.kv_channels * 2 / m  # cos and sin of all tokens, bf16
    statistics = 3 * 2 * model.num_attention_heads / m  # three per row and head, fp32
    around = 3 + tables + statistics  # the layer's input, the gradient, the first layer's input
    in_residuals = {
        "exchanged heads": exchanged,
        "ring": ring,
        "attention of own tokens": own_tokens,
        "around attention": around,
    }
    in_bytes = {name: setting.residual_bytes * x for name, x in in_residuals.items() if x}
    # Weights, gradients and moments under full sharding.
    units = parameter_units(model)
    ends = units.embedding.numel + units.output.numel
    matrix = units.output.numel or units.embedding.numel
    return in_bytes | {
        # 16 bytes per parameter: all states are fp32.
        "weights, gradients and moments": 16 * units.numel / setting.num_ranks,
        # bf16: the root unit stays gathered through backward; this layer and the next one.
        "gathered weights": 2 * (ends + 2 * units.layer.numel),
        # bf16: the output matrix' until the end, and the last layer's while it is reduced.
        "whole gradients": 2 * (matrix + units.layer.numel),
    }
