"""``run_config.json`` beside the weights: architecture, settings of the run, and provenance.

The architecture is read back for ``--use-checkpoint-args`` and to check that a checkpoint fits.
The :class:`Provenance` tells which run wrote a checkpoint and which samples it has seen.
"""

import dataclasses
import re
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_untied.checkpoint.directory import find_checkpoint, read_json, write_json
from megatron_untied.config import AdaptationConfig, ModelConfig, RotaryConfig
from megatron_untied.config.problems import model_problems

RUN_CONFIG = "run_config.json"
PROVENANCE = "provenance"


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Settings that determine the training samples, by flag; the values are JSON."""

    order: dict[str, Any]
    """Settings of the order of samples: another value would repeat some and miss some."""
    content: dict[str, Any]
    """Settings of how the same samples are presented to the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """The origin of a checkpoint. Checkpoints of earlier versions have no provenance."""

    run_id: str | None = None
    """Identifies the run that wrote it: the same for all checkpoints of one run and its restarts in
    one folder."""
    samples: Samples | None = None
    source_dtype: str | None = None
    """Dtype of the Hugging Face weights that training started from, such as ``bfloat16``."""
    pretrained: str | None = None
    """Run and iteration of the checkpoint with the weights that this one leaves out."""


def write_run_config(
    folder: Path, model: ModelConfig, run_config: Any, provenance: Provenance
) -> None:
    """Write the architecture, the provenance and the settings of ``run_config``.

    ``run_config`` is a dataclass, or None where there was no run.
    """
    values = dataclasses.asdict(run_config) if run_config is not None else {}
    # Last: these are what is read back, whatever run_config holds under the same names.
    values |= {"model": dataclasses.asdict(model), PROVENANCE: dataclasses.asdict(provenance)}
    write_json(folder / RUN_CONFIG, values)


def read_model_config(directory: str | Path, iteration: int | None = None) -> ModelConfig:
    """The architecture of the checkpoint of ``iteration`` (None: the latest) in ``directory``.

    Raises:
        ValueError: there is no checkpoint, or this version does not support its architecture.
    """
    folder = find_checkpoint(Path(directory), iteration)
    if folder is None:
        raise ValueError(f"--use-checkpoint-args: {directory} has no checkpoint; check the path")
    return model_config_of(folder)


def model_config_of(folder: Path) -> ModelConfig:
    """The architecture of one checkpoint.

    Raises:
        ValueError: its ``run_config.json`` is missing, or has fields or values that are not valid.
    """
    path = folder / RUN_CONFIG
    values = section(path, "model")
    rotary = from_json(RotaryConfig, values.get("rotary", {}), path)
    model = from_json(ModelConfig, values | {"rotary": rotary}, path)
    # The file may be edited by hand: types alone do not make a model that can be built.
    found = list(model_problems(model, lambda field: field))
    if found:
        raise ValueError(f"{path}: {'; '.join(found)}; choose another with --ckpt-step")
    return model


def section(path: Path, name: str) -> dict[str, Any]:
    """An object inside that of a JSON file; empty if it is not there.

    Raises:
        ValueError: it is something else.
    """
    values = read_json(path).get(name)
    if not isinstance(values, dict | None):
        raise ValueError(f"{path}: {name} is no object; choose another with --ckpt-step")
    return values or {}


def from_json(config: type, values: Any, path: Path) -> Any:
    """A ``config``, a dataclass, with the fields ``values`` of a JSON file.

    Raises:
        ValueError: fields are missing or unknown, or a value has another type than its field.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{path}: {values!r} is no {config.__name__}")
    known = {field.name: field for field in dataclasses.fields(config)}
    # A field with a default may be missing: it is newer than the checkpoint.
    required = {
        name
        for name, field in known.items()
        if field.default is field.default_factory is dataclasses.MISSING
    }
    unknown, missing = sorted(values.keys() - known), sorted(required - values.keys())
    if unknown or missing:
        raise ValueError(
            f"{path}: {config.__name__} has unknown {unknown}, missing {missing}; choose another "
            "checkpoint with --ckpt-step"
        )
    for name, kind in typing.get_type_hints(config).items():
        if name in values and not is_a(values[name], kind):
            expected = getattr(kind, "__name__", str(kind)).removeprefix("typing.")
            raise ValueError(
                f"{path}: {name} is {values[name]!r}, which is no {expected}; choose another "
                "checkpoint with --ckpt-step"
            )
    return config(**values)


def is_a(value: Any, kind: Any) -> bool:
    """Whether a JSON value can be in a field annotated with ``kind``."""
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(is_a(v, typing.get_args(kind)[0]) for v in value)
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    if typing.get_origin(kind) is dict or kind is Any:
        return kind is Any or isinstance(value, dict)
    if typing.get_args(kind):
        return any(is_a(value, member) for member in typing.get_args(kind))
    if isinstance(value, bool) or kind is bool:  # Python's bool is an int
        return isinstance(value, bool) and kind is bool
    if kind is float:  # JSON writes 1.0 as 1.0 or 1; Python reads NaN and Infinity
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return isinstance(value, kind)


def adaptation_of(folder: Path) -> AdaptationConfig:
    """What was trained in the run that wrote a checkpoint."""
    values = section(folder / RUN_CONFIG, "adaptation")
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return from_json(AdaptationConfig, values, folder / RUN_CONFIG)


def read_provenance(folder: Path) -> Provenance:
    """The provenance of the checkpoint in ``folder``.

    Raises:
        ValueError: its ``run_config.json`` is missing or not valid.
    """
    path = folder / RUN_CONFIG
    values = section(path, PROVENANCE)
    # None in checkpoints of an import, which has seen no samples.
    samples = values.get("samples") and from_json(Samples, values["samples"], path)
    provenance = from_json(Provenance, values | {"samples": samples or None}, path)
    # It is part of names of folders, which must not lead elsewhere.
    if provenance.run_id is not None and not re.fullmatch(r"[\w-]+", provenance.run_id):
        raise ValueError(
            f"{path}: run_id {provenance.run_id!r} is no name of a run; choose another checkpoint "
            "with --ckpt-step"
        )
    return provenance


def is_of_run(folder: Path, run_id: str | None) -> bool:
    """Whether the run wrote the checkpoint in ``folder``; False for one that cannot be read."""
    try:
        return read_provenance(folder).run_id == run_id
    except (ValueError, OSError):
        return False  # the caller replaces or deletes only what is surely its own


def differences(before: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """The flags whose values differ, with both values."""
    return [
        f"{flag}: {before.get(flag, 'not given')}, here {here.get(flag, 'not given')}"
        for flag in dict.fromkeys([*before, *here])  # a set would reorder them in each process
        if before.get(flag) != here.get(flag)
    ]
