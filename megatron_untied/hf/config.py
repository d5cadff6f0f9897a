"""Converts the architecture between ``config.json`` and ModelConfig.

A field either has a counterpart in ModelConfig, must have one particular value, or is known not to
affect the function that the model computes. Any other field is an error.
"""

from collections.abc import Mapping
from typing import Any

import torch

from megatron_untied.checkpoint.run_config import is_a
from megatron_untied.config import ModelConfig
from megatron_untied.config.problems import LARGEST_NUMBER, model_problems
from megatron_untied.hf.fields import REQUIRED, Fields
from megatron_untied.hf.rope import rotary_from_hf, rotary_to_hf

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""``model_type`` and architecture: Llama 2 and 3.x, Mistral, Qwen2 and Qwen2.5, dense Qwen3."""

IGNORED_FIELDS = frozenset(
    "_attn_implementation _attn_implementation_autoset _name_or_path architectures bad_words_ids "
    "begin_suppress_tokens bos_token_id chunk_size_feed_forward decoder_start_token_id "
    "diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id "
    "exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id "
    "id2label is_decoder is_encoder_decoder label2id length_penalty max_length min_length "
    "model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences "
    "output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp "
    "problem_type pruned_heads remove_invalid_values repetition_penalty return_dict "
    "return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature "
    "tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p "
    "unsloth_fixed unsloth_version use_bfloat16 use_cache".split()
)
"""Fields of generation, of training scripts and of the transformers library's own bookkeeping."""

REQUIRED_VALUES = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "rope_interleaved": False,
}
"""Fields that would change the function, with the only value that is supported."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
HF_NAMES = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "init_method_std": "initializer_range",
    "window_size": "sliding_window",
    "rotary_base": "rope_theta",
    "rotary_percent": "partial_rotary_factor",
}
"""Names in ``config.json`` of fields of ModelConfig, where they differ."""
KEPT_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields for generation that an exported config.json copies from the imported one."""


def model_config_from_hf(values: Mapping[str, Any], source: str) -> ModelConfig:
    """The architecture that a ``config.json`` describes.

    Args:
        values: its content.
        source: its path, for messages.

    Raises:
        ValueError: an unsupported architecture, or fields that cannot be honored, by name.
    """
    family = _family(values, source)
    # Each field is taken once; end() refuses what is left, since it may change the function.
    fields = Fields(values, source)
    for name in KEPT_TOKENS:  # written into exports again
        given = values.get(name)
        if not all(is_a(x, int | None) for x in (given if isinstance(given, list) else [given])):
            raise ValueError(f"{source}: {name} is {given!r}, no token; correct it")
    fields.drop(IGNORED_FIELDS)
    for name, value in REQUIRED_VALUES.items():
        fields.demand(name, value)
    heads = fields.take("num_attention_heads", kind=int)
    hidden_size = fields.take("hidden_size", kind=int)
    max_positions = fields.take("max_position_embeddings", kind=int)
    num_layers = fields.take("num_hidden_layers", kind=int)
    if not 1 <= num_layers <= LARGEST_NUMBER:  # before anything is made for each of them
        raise ValueError(f"{source}: num_hidden_layers {num_layers} is below 1 or above any model")
    model = ModelConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=fields.take("intermediate_size", kind=int),
        num_attention_heads=heads,
        # Llama's own default; the other families have defaults of one model size, so no guess.
        num_query_groups=fields.take(
            "num_key_value_heads", heads if family == "llama" else REQUIRED, int
        ),
        kv_channels=_head_width(fields, family, hidden_size, heads),
        vocab_size=fields.take("vocab_size", kind=int),
        max_position_embeddings=max_positions,
        norm_epsilon=fields.take("rms_norm_eps", 1e-6, float),
        # Biases and norms of heads are fixed by the family, except for Llama's own switches.
        add_bias_linear=family == "llama" and _llama_bias(fields),
        add_qkv_bias=family == "qwen2",
        qk_layernorm=family == "qwen3",
        untie_embeddings_and_output_weights=not fields.take("tie_word_embeddings", False, bool),
        rotary=rotary_from_hf(fields, max_positions),
        window_size=_window(fields, family, num_layers),
        init_method_std=fields.take("initializer_range", 0.02, float),
    )
    if family == "qwen3":  # its other value would add biases to q, k, v and o
        fields.demand("attention_bias", False)
    fields.end()
    found = list(model_problems(model, lambda field: HF_NAMES.get(field, field)))
    if found:
        raise ValueError(f"{source}: " + "; ".join(found))
    return model


def model_config_to_hf(
    model: ModelConfig, dtype: torch.dtype, like: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of a ``config.json`` for ``model``.

    Args:
        model: the architecture.
        dtype: of the weights.
        like: the ``config.json`` that the weights were imported with, or empty. Its family is used
            if it can express ``model``, and its special tokens are copied.

    Raises:
        ValueError: no family can express ``model``.
    """
    able = [family for family in FAMILIES if _can_express(family, model)]
    if not able:
        raise ValueError(_inexpressible(model))
    # Otherwise the first in the order of FAMILIES: Llama where it suffices.
    family = like["model_type"] if like.get("model_type") in able else able[0]
    # Every field, also those with a default: defaults differ between versions of transformers.
    values = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "initializer_range": model.init_method_std,
        "use_cache": True,
    }
    tokens = {name: like.get(name) for name in KEPT_TOKENS}
    return values | tokens | _own_fields(family, model) | rotary_to_hf(model.rotary)


def _family(values: Mapping[str, Any], source: str) -> str:
    """The ``model_type``, checked. First of all: it gives the clearest reason for a refusal."""
    for name in ("quantization_config", "compression_config"):
        if quantization := values.get(name):
            method = "unknown method"
            if isinstance(quantization, dict):
                method = quantization.get("quant_method", method)
            raise ValueError(
                f"{source}: the weights are quantized ({name}: {method}); convert a bf16, fp16 or "
                "fp32 checkpoint of the model"
            )
    supported = ", ".join(FAMILIES.values())
    # Types first: these are keys of a table, and a list has no hash.
    family, architectures = values.get("model_type"), values.get("architectures") or []
    if not is_a(family, str | None) or not isinstance(architectures, list):
        raise ValueError(
            f"{source}: model_type {family!r} is no text, or architectures {architectures!r} no "
            f"list; supported are {supported}"
        )
    architectures = architectures or [FAMILIES.get(family, f"model_type {family!r}")]
    if any(values.get(name) for name in EXPERTS) or "moe" in str(family):
        raise ValueError(
            f"{source}: {architectures[0]} is a mixture of experts; dense models are supported: "
            f"{supported}"
        )
    unknown = [name for name in architectures if name not in FAMILIES.values()]
    if family not in FAMILIES or unknown:
        raise ValueError(f"{source}: {(unknown or architectures)[0]} is none of {supported}")
    if architectures != [FAMILIES[family]]:
        raise ValueError(
            f"{source}: architectures are {architectures}, and model_type {family!r} is "
            f"{FAMILIES[family]}; correct the one that is wrong"
        )
    return family


def _head_width(fields: Fields, family: str, hidden_size: int, heads: int) -> int:
    # Qwen3's class has this default, whatever the hidden size; the others divide.
    width = fields.take("head_dim", 128 if family == "qwen3" else None, int)
    if width is not None:
        return width
    if heads < 1 or hidden_size % heads:
        raise ValueError(
            f"{fields.source}: hidden_size {hidden_size} is not a multiple of num_attention_heads "
            f"{heads}, and there is no head_dim; complete it"
        )
    return hidden_size // heads


def _llama_bias(fields: Fields) -> bool:
    attention, mlp = fields.take("attention_bias", False), fields.take("mlp_bias", False)
    if attention != mlp:
        raise ValueError(
            f"{fields.source}: attention_bias is {attention} and mlp_bias {mlp}; all linear layers "
            "or none can have a bias"
        )
    return attention


def _window(fields: Fields, family: str, num_layers: int) -> int | None:
    """The attention window in tokens, the same for every layer; None is unlimited."""
    if family == "llama":  # has no window; a field of that name is refused as not understood
        return None
    if family == "mistral":
        return fields.take_or_null("sliding_window", int)  # 4096 in the library if it is left out
    # Qwen: a window, the switch for it, and the layers that have one, in two ways.
    slides = fields.take("use_sliding_window", False, bool)
    window = fields.take("sliding_window", REQUIRED if slides else None, int)
    first = fields.take("max_window_layers", 28, int)
    num_full = min(max(0, first), num_layers) if slides else num_layers
    default = ["full_attention"] * num_full + ["sliding_attention"] * (num_layers - num_full)
    layers = fields.take("layer_types", default, list)
    if len(layers) != num_layers or any(kind != layers[0] for kind in layers) or not layers:
        numbers = [i for i, kind in enumerate(layers) if kind == "sliding_attention"]
        raise ValueError(
            f"{fields.source}: use_sliding_window, max_window_layers {first} and layer_types give "
            f"a window to {len(numbers)} of {num_layers} layers; all or none can have one"
        )
    if layers[0] == "full_attention":
        return None
    if layers[0] != "sliding_attention" or not slides:
        raise ValueError(
            f"{fields.source}: layer_types are {layers[0]!r} with use_sliding_window {slides}; "
            "'full_attention', or 'sliding_attention' with use_sliding_window, can be converted"
        )
    return window


def _can_express(family: str, model: ModelConfig) -> bool:
    if model.normalization != "RMSNorm" or not model.swiglu or model.rotary.percent != 1.0:
        return False
    biases = model.add_bias_linear, model.add_qkv_bias
    if family == "llama":
        # LlamaConfig requires the multiple even when head_dim is given.
        fits = model.hidden_size % model.num_attention_heads == 0 and model.window_size is None
        return fits and not model.qk_layernorm and biases != (False, True)
    # Qwen2 always has biases on q, k and v, the others never; only Qwen3 normalizes heads.
    return biases == (False, family == "qwen2") and model.qk_layernorm == (family == "qwen3")


def _own_fields(family: str, model: ModelConfig) -> dict[str, Any]:
    window = model.window_size
    if family == "llama":
        return {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}
    if family == "mistral":
        return {"sliding_window": window}
    # max_window_layers counts the first layers, which have full attention.
    layers = 0 if window else model.num_layers
    sliding = {"sliding_window": window, "use_sliding_window": window is not None}
    return sliding | {"max_window_layers": layers}


def _inexpressible(model: ModelConfig) -> str:
    names = ("normalization", "swiglu", "add_bias_linear", "add_qkv_bias", "qk_layernorm")
    listed = ", ".join(f"{name} {getattr(model, name)}" for name in (*names, "window_size"))
    return (
        f"none of {', '.join(FAMILIES.values())} is a model with {listed}, rotary percent "
        f"{model.rotary.percent}, {model.num_attention_heads} heads at hidden size "
        f"{model.hidden_size}"
    )
