"""The sizes of a model that Megatron derives from others where their flags are left out."""

from collections.abc import Mapping
from typing import Any


def derived_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig.

    Raises:
        ValueError: a size that is not given cannot be derived.
    """
    m, h = values["hidden_size"], values["num_attention_heads"]
    max_positions = values["max_position_embeddings"]
    return {
        "kv_channels": values["kv_channels"] or _head_width(m, h),
        "ffn_hidden_size": values["ffn_hidden_size"] or _mlp_width(values),
        "num_query_groups": values["num_query_groups"] if values["group_query_attention"] else h,
        "max_position_embeddings": max_positions or values["seq_length"],
        "vocab_size": 0,  # the tokenizer or the preset says
    }


def _head_width(m: int, h: int) -> int:
    if m % h:
        raise ValueError(
            f"--hidden-size {m} is not a multiple of --num-attention-heads {h}; "
            f"give --kv-channels, such as {max(2, m // h // 2 * 2)}"
        )
    return m // h


def _mlp_width(values: Mapping[str, Any]) -> int:
    """4 m; with SwiGLU 2/3 of it, as there are three matrices instead of two."""
    m, t = values["hidden_size"], values["tensor_model_parallel_size"]
    if not values["swiglu"]:
        return 4 * m
    width = (4 * m * 2 // 3) // 64 * 64
    if width == 0:
        raise ValueError(
            f"--hidden-size {m} with --swiglu leaves an MLP of width 0: 8/3 x {m}, rounded down "
            f"to a multiple of 64; give --ffn-hidden-size, such as {-(-8 * m // (3 * t)) * t}"
        )
    return width
