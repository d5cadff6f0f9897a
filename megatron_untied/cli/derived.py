"""Settings of a model that follow from several flags: sizes, vocabulary, rotary embedding.

Megatron derives sizes that are not given from others. The vocabulary comes from the tokenizer, a
preset or a checkpoint. Flags of the rotary embedding replace or change what a preset or a
checkpoint has.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_untied.config import RotaryConfig
from megatron_untied.config.data import DataConfig
from megatron_untied.config.flag_names import flag_of
from megatron_untied.data.tokenizers import build_tokenizer
from megatron_untied.presets import read_preset
from megatron_untied.rope import yarn_attention_factor

Values = Mapping[str, Any]
"""Values of flags by name."""


def derived_sizes(values: Values) -> dict[str, Any]:
    """Sizes of a ModelConfig, as given or derived as Megatron derives them.

    Raises:
        ValueError: a size that is not given cannot be derived.
    """
    m, h = values["hidden_size"], values["num_attention_heads"]
    max_positions = values["max_position_embeddings"]
    if values["kv_channels"] is None and m % h:
        raise ValueError(
            f"--hidden-size {m} is not a multiple of --num-attention-heads {h}; "
            f"give --kv-channels, such as {max(2, m // h // 2 * 2)}"  # even, for rotary pairs
        )
    return {
        "kv_channels": values["kv_channels"] or m // h,
        "ffn_hidden_size": values["ffn_hidden_size"] or _mlp_width(values),
        # The flag's default, 1, counts with the switch only.
        "num_query_groups": values["num_query_groups"] if values["group_query_attention"] else h,
        # Megatron requires the flag. Rotary embedding needs no maximum.
        "max_position_embeddings": max_positions or values["seq_length"],
        "vocab_size": 0,  # replaced by model_vocab_size(), which reads the tokenizer
    }


def _mlp_width(values: Values) -> int:
    """4 m; with SwiGLU 2/3 of that, because it has three matrices instead of two."""
    m, t = values["hidden_size"], values["tensor_model_parallel_size"]
    if not values["swiglu"]:
        return 4 * m
    width = (4 * m * 2 // 3) // 64 * 64  # Megatron's rounding, to multiples of 64
    if width == 0:
        raise ValueError(
            f"--hidden-size {m} with --swiglu gives an MLP of width 0: 8/3 x {m}, rounded down "
            f"to a multiple of 64; give --ffn-hidden-size, such as {-(-8 * m // (3 * t)) * t}"
        )
    return width


def tokenizer_vocab_size(values: Values) -> int | None:
    """--vocab-size, or for NullTokenizer with a preset, the value that gives the preset's rows."""
    null = values["tokenizer_type"] == "NullTokenizer"
    if null and values["model"] and values["vocab_size"] is None:
        return read_preset(values["model"]).vocab_size - 1  # one more is the end of document
    return values["vocab_size"]


def model_vocab_size(values: Values, data: DataConfig, stored: int | None) -> int:
    """Rows of the embedding before padding: tokens of the tokenizer, or rows of the architecture.

    An architecture may have more rows than the tokenizer has tokens. They are kept, because the
    softmax of the published model includes them.

    Args:
        values: of the flags.
        data: the tokenizer.
        stored: rows in the checkpoint that --use-checkpoint-args reads; None without it.

    Raises:
        ValueError: the tokenizer cannot be loaded, or has more tokens than there are rows.
    """
    # Quiet: the run builds it again for its data, and logs then.
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


SCALE_FLAGS = {
    "llama3": "--use-rope-scaling",
    "linear": "--rotary-seq-len-interpolation-factor",
    "yarn": "--position-embedding-type yarn",
}
ROPE_SCALING_FACTOR = 8.0
"""Megatron's default of --rope-scaling-factor."""


def rotary_config(given: Values, stored: RotaryConfig) -> RotaryConfig:
    """Apply the ``given`` flags to the rotary embedding ``stored`` in a checkpoint or by default.

    A scaling that is given replaces the stored one with all its parameters.

    Raises:
        ValueError: flags have no effect, contradict each other or are incomplete.
    """
    plain = {"base": "rotary_base", "percent": "rotary_percent"}
    changes = {field: given[name] for field, name in plain.items() if name in given}
    kind = _kind(given)
    if kind is not None:
        base = {"base": stored.base, "percent": stored.percent}
        return RotaryConfig(**base | changes | _scaling(given, kind))
    if given.get("position_embedding_type") == "rope" and stored.scaling == "yarn":
        raise ValueError(
            "--position-embedding-type rope contradicts the checkpoint, which has yarn; "
            "leave out the flag"
        )
    return replace(stored, **changes)


def replace_scaling(preset: Values, given: Values) -> dict[str, Any]:
    """``preset`` | ``given``, where a scaling in ``given`` replaces that of the preset entirely."""
    kinds = _kinds(given)
    kept = dict(preset)
    if kinds and kinds != _kinds(preset):
        others = ("position_embedding_type", "rotary_seq_len_interpolation_factor")
        # What is left of the preset's scaling would be a second one, which is refused.
        for name in preset:
            if name in others or name.startswith("yarn_") or "rope_scaling" in name:
                del kept[name]
    return kept | dict(given)


def _kinds(given: Values) -> list[str]:
    """Every kind of scaling that a flag asks for."""
    interpolation = given.get("rotary_seq_len_interpolation_factor")
    asked = {
        "llama3": given.get("use_rope_scaling", False),
        "linear": interpolation is not None and interpolation > 1,
        "none": interpolation == 1,
        "yarn": given.get("position_embedding_type") == "yarn",
    }
    return [kind for kind, is_asked in asked.items() if is_asked]


def _kind(given: Values) -> str | None:
    """The kind of scaling that the flags ask for; None if none does."""
    kinds = _kinds(given)
    # A factor of 1 is no scaling, but it does replace that of a checkpoint.
    scaled = [kind for kind in kinds if kind != "none"]
    if len(scaled) > 1:
        flags = " and ".join(SCALE_FLAGS[kind] for kind in scaled)
        raise ValueError(f"{flags} both scale the rotary embedding; give one of them")
    for name in given:
        if name.startswith("yarn_") and "yarn" not in kinds:
            raise ValueError(
                f"{flag_of(name)} has no effect without --position-embedding-type yarn; give both"
            )
    return next(iter(scaled or kinds), None)


def _scaling(given: Values, kind: str) -> dict[str, Any]:
    """Fields of RotaryConfig for a ``kind`` of scaling."""
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
    missing = [flag_of(name) for name in needed if name not in given]
    if missing:
        raise ValueError(f"--position-embedding-type yarn needs {' and '.join(missing)}")
    factor, original = (given[name] for name in needed)
    fields = {"scaling": "yarn", "scaling_factor": factor, "original_max_positions": original}
    for field, name in {
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "truncate": "yarn_correction_range_round_to_int",
    }.items():
        # Others keep the defaults of RotaryConfig, which are those of the YaRN paper.
        if name in given:
            fields[field] = given[name]
    if "yarn_mscale" in given:
        mscale = given["yarn_mscale"], given["yarn_mscale_all_dim"]  # REQUIRED_FLAGS: both or none
        fields["attention_factor"] = yarn_attention_factor(factor, *mscale)
    return fields
