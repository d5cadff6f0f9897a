import dataclasses

from megatron_untied.config import ModelConfig
from megatron_untied.flops import attention_flops, layer_weights, step_flops

LLAMA3_8B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=128256,
    max_position_embeddings=8192,
)


def test_weights_of_a_layer_by_hand():
    # q and o: 4096 x 4096 each; k and v: 4096 x 1024 each; three matrices 4096 x 14336.
    assert layer_weights(LLAMA3_8B) == 2 * 16_777_216 + 2 * 4_194_304 + 3 * 58_720_256
    two_matrices = dataclasses.replace(LLAMA3_8B, swiglu=False)
    assert layer_weights(LLAMA3_8B) - layer_weights(two_matrices) == 58_720_256


def test_short_sequences_cost_six_operations_a_weight_and_token():
    all_weights = 32 * 218_103_808 + 4096 * 128256
    flops = step_flops(LLAMA3_8B, seq_length=1, num_samples=10)
    attention = 10 * 3 * 32 * 2 * 4096
    assert flops == 10 * 6 * all_weights + attention


def test_causal_attention_is_half_of_two_square_products():
    # Two products of 2 s^2 d for each of 32 heads of 128; a causal mask leaves half.
    assert attention_flops(LLAMA3_8B, seq_length=1000) == 2 * (2 * 1000**2 * 128) * 32 // 2


def test_a_window_leaves_a_band():
    # The triangle of all pairs without the triangle of those more than 100 tokens apart.
    windowed = dataclasses.replace(LLAMA3_8B, window_size=100)
    assert attention_flops(windowed, seq_length=1000) == 2 * 2 * 4096 * (1000**2 - 900**2) // 2
    longer = dataclasses.replace(LLAMA3_8B, window_size=2000)
    assert attention_flops(longer, seq_length=1000) == attention_flops(LLAMA3_8B, seq_length=1000)


def test_attention_dominates_at_five_million_tokens():
    s = 5 * 1024**2
    flops = step_flops(LLAMA3_8B, seq_length=s, num_samples=1)
    attention = 3 * 32 * attention_flops(LLAMA3_8B, seq_length=s)
    assert attention == 3 * 32 * 2 * s**2 * 4096
    assert 0.98 < attention / flops < 0.99
    assert flops == attention + 6 * s * (32 * 218_103_808 + 4096 * 128256)
