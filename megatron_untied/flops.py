"""Floating-point operations of one optimizer step, as the model's mathematics requires.

Recomputation and vocabulary padding are not counted, except in :func:`slow_step_seconds`, an upper
bound for the time of a step.
"""

from megatron_untied.config import MemoryConfig, ModelConfig
from megatron_untied.phases import Phase
from megatron_untied.step_progress import COST


def step_flops(model: ModelConfig, *, seq_length: int, num_samples: int) -> int:
    """Forward and backward of ``num_samples`` sequences; a multiply and an add count as two."""
    linear = linear_flops(model, seq_length=seq_length)
    attention = model.num_layers * attention_flops(model, seq_length=seq_length)
    return 3 * num_samples * (linear + attention)  # the backward of a product is two products


def slow_step_seconds(
    model: ModelConfig,
    memory: MemoryConfig,
    *,
    seq_length: int,
    num_samples: int,
    world_size: int,
    flops_per_second: float,
) -> float:
    """Seconds of a step on ranks that compute ``flops_per_second`` each.

    Recomputation counts. Exchanges do not: they overlap with attention or are short beside it.
    """
    forwards = 4 if memory.recompute_granularity else 3
    linear = linear_flops(model, seq_length=seq_length)
    layer = attention_flops(model, seq_length=seq_length)
    attention = model.num_layers * layer * attention_units(memory, model.num_layers)
    return num_samples * (forwards * linear + attention) / world_size / flops_per_second


def attention_units(memory: MemoryConfig, num_layers: int) -> float:
    """Cost of an average layer's attention in a step, in units of its forward.

    An upper bound for "auto".
    """
    recomputed = 0.0
    if "auto" in (memory.recompute_granularity, memory.attention_output_layers):
        recomputed = 1.0
    elif memory.recompute_granularity is not None:
        recomputed = memory.first_kept_output(num_layers) / num_layers
    recompute = recomputed * COST[Phase.RECOMPUTE_ATTENTION]
    return COST[Phase.ATTENTION_FORWARD] + recompute + COST[Phase.ATTENTION_BACKWARD]


def attention_flops(model: ModelConfig, *, seq_length: int) -> int:
    """Forward of one layer's attention on one sequence: q k^T and p v.

    Causal attention is half of all pairs; a window leaves a band of them. Document
    boundaries are not considered: with them attention costs less.
    """
    width = model.num_attention_heads * model.kv_channels
    seen = min(model.window_size or seq_length, seq_length)
    # seen * s - seen^2 / 2 pairs, times two products, times two operations.
    return 2 * width * (2 * seq_length * seen - seen**2)


def linear_flops(model: ModelConfig, *, seq_length: int) -> int:
    """Forward of all matrices on one sequence, without padding of the vocabulary."""
    output = model.hidden_size * model.vocab_size  # the embedding lookup costs nothing
    return seq_length * 2 * (model.num_layers * layer_weights(model) + output)


def layer_weights(model: ModelConfig) -> int:
    """Elements of the matrices of a layer, without norms and biases."""
    query = model.num_attention_heads * model.kv_channels
    key_value = 2 * model.num_query_groups * model.kv_channels
    mlp = (3 if model.swiglu else 2) * model.ffn_hidden_size
    return model.hidden_size * (query + key_value + query + mlp)
