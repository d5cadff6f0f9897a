"""The sizes of a model that Megatron derives from others where their flags are left out."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_untied.config import RotaryConfig
from megatron_untied.config.data import DataConfig
from megatron_untied.data.tokenizers import build_tokenizer
from megatron_untied.presets import read_preset
from megatron_untied.rope import yarn_attention_factor


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


Values = Mapping[str, Any]


def tokenizer_vocab_size(values: Values) -> int | None:
    """--vocab-size; with a preset, NullTokenizer's is what gives the model the preset's rows."""
    null = values["tokenizer_type"] == "NullTokenizer"
    if null and values["model"] and values["vocab_size"] is None:
        return read_preset(values["model"]).vocab_size - 1  # the end of document is one more
    return values["vocab_size"]


def model_vocab_size(values: Values, data: DataConfig, stored: int | None) -> int:
    """Tokens of the tokenizer; or the rows of the architecture, which may be more.

    Rows that no token uses are as a published model has them; the softmax goes over them all the
    same. ``stored`` are those of a checkpoint that --use-checkpoint-args reads.

    Raises:
        ValueError: the tokenizer cannot be had, or has more tokens than there are rows.
    """
    num_tokens = build_tokenizer(
        data.tokenizer_type, model=data.tokenizer_model, vocab_size=data.vocab_size, quiet=True
    ).vocab_size
    if stored is not None:
        num_rows, owner = stored, f"the checkpoint in {values['load']}"
        remedy = "the tokenizer it was trained with"
    elif values["model"] and values["vocab_size"] is None:
        num_rows, owner = read_preset(values["model"]).vocab_size, f"--model {values['model']}"
        remedy = f"its own tokenizer, or --vocab-size {num_tokens} for a model with as many rows"
    else:
        return num_tokens
    if num_tokens > num_rows:
        raise ValueError(
            f"the tokenizer has {num_tokens} tokens and {owner} {num_rows}; give {remedy}"
        )
    return num_rows


Values = Mapping[str, Any]

SCALE_FLAGS = {
    "llama3": "--use-rope-scaling",
    "linear": "--rotary-seq-len-interpolation-factor",
    "yarn": "--position-embedding-type yarn",
}
ROPE_SCALING_FACTOR = 8.0
"""Megatron's default of --rope-scaling-factor."""


def rotary_config(given: Values, stored: RotaryConfig) -> RotaryConfig:
    """``stored`` as the ``given`` flags change it; a kind of scaling replaces another as a whole.

    Raises:
        ValueError: for flags that have no effect, contradict each other or leave something open.
    """
    plain = {"base": "rotary_base", "percent": "rotary_percent"}
    changes = {field: given[name] for field, name in plain.items() if name in given}
    kind = _kind(given)
    if kind is not None:
        base = {"base": stored.base, "percent": stored.percent}
        return RotaryConfig(**base | changes | _scaling(given, kind))
    if given.get("position_embedding_type") == "rope" and stored.scaling == "yarn":
        raise ValueError(
            "--position-embedding-type rope, and the checkpoint's positions are yarn's; "
            "leave it out"
        )
    return replace(stored, **changes)


def replace_scaling(preset: Values, given: Values) -> dict[str, Any]:
    """``preset`` | ``given``; a kind of scaling that ``given`` asks for replaces another whole."""
    kinds = _kinds(given)
    kept = kinds in ([], _kinds(preset))
    return {name: v for name, v in preset.items() if kept or not _scales(name)} | dict(given)


def _scales(name: str) -> bool:
    others = ("position_embedding_type", "rotary_seq_len_interpolation_factor")
    return name in others or name.startswith("yarn_") or "rope_scaling" in name


def _kinds(given: Values) -> list[str]:
    """How positions are to be scaled, by every flag that says so."""
    interpolation = given.get("rotary_seq_len_interpolation_factor")
    asked = {
        "llama3": given.get("use_rope_scaling", False),
        "linear": interpolation is not None and interpolation > 1,
        "none": interpolation == 1,
        "yarn": given.get("position_embedding_type") == "yarn",
    }
    return [kind for kind, is_asked in asked.items() if is_asked]


def _kind(given: Values) -> str | None:
    """How positions are to be scaled; None if no flag says."""
    kinds = _kinds(given)
    scaled = [kind for kind in kinds if kind != "none"]
    if len(scaled) > 1:
        flags = " and ".join(SCALE_FLAGS[kind] for kind in scaled)
        raise ValueError(f"{flags} each scale the rotary embedding; give one")
    for name in given:
        if name.startswith("yarn_") and "yarn" not in kinds:
            raise ValueError(f"{_flag(name)} does nothing without --position-embedding-type yarn")
    return next(iter(scaled or kinds), None)


def _scaling(given: Values, kind: str) -> dict[str, Any]:
    """Fields of RotaryConfig."""
    factors = {
        "none": 1.0,
        "llama3": given.get("rope_scaling_factor", ROPE_SCALING_FACTOR),
        "linear": float(given.get("rotary_seq_len_interpolation_factor", 1)),
    }
    if kind == "yarn":
        return _yarn(given)
    return {"scaling": kind, "scaling_factor": factors[kind]}


def _yarn(given: Values) -> dict[str, Any]:
    needed = ("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings")
    missing = [_flag(name) for name in needed if name not in given]
    if missing:
        raise ValueError(f"--position-embedding-type yarn needs {' and '.join(missing)}")
    factor, original = (given[name] for name in needed)
    fields = {"scaling": "yarn", "scaling_factor": factor, "original_max_positions": original}
    for field, name in {
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "truncate": "yarn_correction_range_round_to_int",
    }.items():
        if name in given:
            fields[field] = given[name]
    if "yarn_mscale" in given:
        mscale = given["yarn_mscale"], given["yarn_mscale_all_dim"]
        fields["attention_factor"] = yarn_attention_factor(factor, *mscale)
    return fields


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
