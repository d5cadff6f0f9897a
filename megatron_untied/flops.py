"""Floating-point operations of one optimizer step, by the model's mathematics alone.

What a rank really computes may be more (recomputation, padded vocabulary) and is not counted, but
in :func:`slow_step_seconds`, which says how long a step may take.
"""

from megatron_untied.config import MemoryConfig, ModelConfig
from megatron_untied.phases import Phase
from megatron_untied.step_progress import COST


def step_flops(model: ModelConfig, *, seq_length: int, num_samples: int) -> int:
    """Forward and backward of ``num_samples`` sequences; a multiply and an add count as two.

    The backward of a product is two products, so a step is three forwards.
    """
    linear = seq_length * 2 * (model.num_layers * layer_weights(model) + output_weights(model))
    attention = model.num_layers * attention_flops(model, seq_length=seq_length)
    return 3 * num_samples * (linear + attention)


def slow_step_seconds(
    model: ModelConfig,
    memory: MemoryConfig,
    *,
    seq_length: int,
    num_samples: int,
    world_size: int,
    flops_per_second: float,
) -> float:
    """How long a step takes on ranks that compute no more than ``flops_per_second`` each.

    Recomputed work counts; exchanges, which hide behind attention or are short beside it, do not.
    """
    forwards = 4 if memory.recompute_granularity else 3
    linear = seq_length * 2 * (model.num_layers * layer_weights(model) + output_weights(model))
    layer = attention_flops(model, seq_length=seq_length)
    attention = model.num_layers * layer * attention_units(memory)
    return num_samples * (forwards * linear + attention) / world_size / flops_per_second


def attention_units(memory: MemoryConfig) -> float:
    """Attention of a layer in a step, in forwards of it; at most, where that is left open."""
    again = (
        COST[Phase.RECOMPUTE_ATTENTION] if memory.recompute_granularity in ("full", "auto") else 0.0
    )
    return COST[Phase.ATTENTION_FORWARD] + again + COST[Phase.ATTENTION_BACKWARD]


def attention_flops(model: ModelConfig, *, seq_length: int) -> int:
    """Forward of one layer's attention on one sequence: q k^T and p v.

    Causal attention is half of all pairs; a window leaves a band of them. Documents are not known
    here: attention that stops at their ends does less than is counted.
    """
    width = model.num_attention_heads * model.kv_channels
    seen = min(model.window_size or seq_length, seq_length)
    return 2 * width * (2 * seq_length * seen - seen**2)


def layer_weights(model: ModelConfig) -> int:
    """Matrix elements of a layer that each token is multiplied with; norms and biases are left."""
    query = model.num_attention_heads * model.kv_channels
    key_value = 2 * model.num_query_groups * model.kv_channels
    mlp = (3 if model.swiglu else 2) * model.ffn_hidden_size
    return model.hidden_size * (query + key_value + query + mlp)


def output_weights(model: ModelConfig) -> int:
    """Matrix elements of the projection to the vocabulary, padding left out; looking up is free."""
    return model.hidden_size * model.vocab_size
