"""Tiny Hugging Face models of every family, with random weights and awkward shapes."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 1003
SHARED = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


def heads(query: int, key_value: int) -> dict[str, int]:
    return {"num_attention_heads": query, "num_key_value_heads": key_value}


FAMILIES: dict[str, PreTrainedConfig] = {
    "llama2": LlamaConfig(**SHARED, hidden_size=32, intermediate_size=44, **heads(4, 4)),
    "llama3-wide-heads": LlamaConfig(  # heads together are three times as wide as the model
        **SHARED, hidden_size=56, intermediate_size=72, **heads(28, 4), head_dim=6,
        rope_parameters=LLAMA3, rms_norm_eps=1e-5,
    ),
    "llama3.2-tied": LlamaConfig(
        **SHARED, hidden_size=48, intermediate_size=40, **heads(6, 2), tie_word_embeddings=True,
        rope_parameters=LLAMA3 | {"factor": 32.0},
    ),
    "llama-biased": LlamaConfig(
        **SHARED, hidden_size=32, intermediate_size=44, **heads(4, 2), attention_bias=True,
        mlp_bias=True,
    ),
    "mistral": MistralConfig(
        **SHARED, hidden_size=40, intermediate_size=52, **heads(8, 2), head_dim=10,
        sliding_window=None, rope_parameters=LINEAR,
    ),
    "mistral-window": MistralConfig(
        **SHARED, hidden_size=48, intermediate_size=52, **heads(8, 2), sliding_window=9,
    ),
    "qwen2-window": Qwen2Config(
        **SHARED, hidden_size=48, intermediate_size=52, **heads(8, 2), sliding_window=9,
        use_sliding_window=True, max_window_layers=0,
    ),
    "qwen2.5": Qwen2Config(**SHARED, hidden_size=56, intermediate_size=76, **heads(28, 4)),
    "qwen2-tied": Qwen2Config(
        **SHARED, hidden_size=48, intermediate_size=36, **heads(6, 2), tie_word_embeddings=True,
    ),
    "qwen3": Qwen3Config(
        **SHARED, hidden_size=40, intermediate_size=60, **heads(8, 4), head_dim=16,
        rope_parameters=YARN,
    ),
    "qwen3-tied": Qwen3Config(
        **SHARED, hidden_size=48, intermediate_size=36, **heads(6, 2), head_dim=12,
        tie_word_embeddings=True,
    ),
}  # fmt: skip


def save_model(family: str, folder: Path, *, shard_size: str = "5GB", **dtype) -> Path:
    """Write a model of ``family`` with weights that no two tensors share; the folder."""
    torch.manual_seed(list(FAMILIES).index(family))
    model = AutoModelForCausalLM.from_config(FAMILIES[family]).float()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.15)
    model.to(**dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder
