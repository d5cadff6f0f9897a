"""Converts the rotary fields of ``config.json``, in the formats of transformers 4 and 5.

Version 4 has ``rope_theta`` and, with scaled positions, ``rope_scaling``. Version 5 has
``rope_parameters``, with the fields of both.
"""

import typing
from typing import Any

from megatron_untied.config import RotaryConfig
from megatron_untied.hf.fields import REQUIRED, Fields
from megatron_untied.rope import check_scaling, yarn_attention_factor

FIELDS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "scaling_factor"},
    "llama3": {
        "factor": "scaling_factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_positions",
    },
    "yarn": {
        "factor": "scaling_factor",
        "original_max_position_embeddings": "original_max_positions",
        "attention_factor": "attention_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
    },
}
"""By kind of scaling: Hugging Face's names of the fields of RotaryConfig."""
_KINDS = typing.get_type_hints(RotaryConfig)


def rotary_from_hf(fields: Fields, max_positions: int) -> RotaryConfig:
    """Take every rope field of a ``config.json``.

    Raises:
        ValueError: a kind or field of scaling is not supported, or two contradict each other.
    """
    base = fields.take("rope_theta", None, float)
    fields.demand("partial_rotary_factor", 1.0)
    found = {}
    for name in ("rope_scaling", "rope_parameters"):
        if values := fields.take(name, None):
            inner = Fields(values, f"{fields.source}: {name}")
            found[name] = _rotary(inner, base, max_positions)
    # A file for both versions of transformers holds both, and they must agree.
    if not found:
        return RotaryConfig(base=base or RotaryConfig().base)
    if len(set(found.values())) > 1:
        raise ValueError(f"{fields.source}: rope_scaling and rope_parameters differ; keep one")
    return next(iter(found.values()))


def rotary_to_hf(rotary: RotaryConfig) -> dict[str, Any]:
    """The fields for ``config.json`` in both formats, so that either version reads them."""
    kind = "default" if rotary.scaling == "none" else rotary.scaling
    values = {theirs: getattr(rotary, ours) for theirs, ours in FIELDS[kind].items()}
    scaling = {"rope_type": kind} | {n: v for n, v in values.items() if v is not None}
    return {
        "rope_theta": rotary.base,
        "rope_scaling": None if kind == "default" else scaling,
        "rope_parameters": scaling | {"rope_theta": rotary.base},
    }


def _rotary(fields: Fields, base: float | None, max_positions: int) -> RotaryConfig:
    kind = _kind(fields)
    own_base = fields.take("rope_theta", base, float)
    if base is not None and own_base != base:
        raise ValueError(f"{fields.source}.rope_theta is {own_base}, rope_theta {base}; keep one")
    fields.demand("partial_rotary_factor", 1.0)
    values = {"base": own_base or RotaryConfig().base}
    if kind != "default":
        values |= {"scaling": kind} | _scaling(fields, kind, max_positions)
    fields.end()
    rotary = RotaryConfig(**values)
    try:
        check_scaling(rotary)
    except ValueError as error:
        raise ValueError(f"{fields.source}: {error}") from error
    return rotary


def _kind(fields: Fields) -> str:
    # Older versions of transformers call the field type.
    legacy = fields.take("type", None)
    kind = fields.take("rope_type", legacy or "default")
    if legacy is not None and legacy != kind:
        raise ValueError(f"{fields.source}: rope_type is {kind!r}, type {legacy!r}; keep one")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise ValueError(f"{fields.source}: rope_type {kind!r} is none of {', '.join(FIELDS)}")
    return kind


def _scaling(fields: Fields, kind: str, max_positions: int) -> dict[str, Any]:
    # What Hugging Face takes where a field is left out; the rest has to be there.
    original = None
    if kind != "linear":
        original = fields.take("original_max_position_embeddings", None, int)
    original = original or max_positions
    if original < 1:
        raise ValueError(f"{fields.source}: {original} original positions are none; correct it")
    defaults = {"original_max_position_embeddings": original}
    if kind == "yarn":
        defaults |= {"factor": max_positions / original, "attention_factor": None}
        defaults |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    values = {
        ours: fields.take(theirs, defaults.get(theirs, REQUIRED), _KINDS[ours])
        for theirs, ours in FIELDS[kind].items()
    }
    if kind == "yarn":
        # DeepSeek's form of the attention factor; an explicit one overrides it.
        mscale = fields.take("mscale", None, float), fields.take("mscale_all_dim", None, float)
        if values["attention_factor"] is None and all(mscale):
            if min(mscale) < 0:
                raise ValueError(f"{fields.source}: an mscale is below 0; correct it")
            values["attention_factor"] = yarn_attention_factor(values["scaling_factor"], *mscale)
    return values
