"""Floating-point operations of one optimizer step, by the model's mathematics alone.

What a rank really computes may be more (recomputation, padded vocabulary) and is not counted.
"""

from megatron_untied.config import ModelConfig


def step_flops(model: ModelConfig, *, seq_length: int, num_samples: int) -> int:
    """Forward and backward of ``num_samples`` sequences; a multiply and an add count as two.

    The backward of a product is two products, so a step is three forwards.
    """
    linear = seq_length * 2 * (model.num_layers * layer_weights(model) + output_weights(model))
    attention = model.num_layers * attention_flops(model, seq_length=seq_length)
    return 3 * num_samples * (linear + attention)


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
