"""The run's configuration beside its weights: JSON for people and ``--use-checkpoint-args``."""

import dataclasses
from pathlib import Path
from typing import Any

from megatron_untied.checkpoint.directory import find_checkpoint, read_json, write_json
from megatron_untied.config import ModelConfig, RotaryConfig

RUN_CONFIG = "run_config.json"


def read_model_config(directory: str | Path, iteration: int | None = None) -> ModelConfig:
    """The architecture of the checkpoint of ``iteration`` (None: the latest) in ``directory``.

    Raises:
        ValueError: there is no checkpoint, or its architecture is not one of this version's.
    """
    folder = find_checkpoint(Path(directory), iteration)
    if folder is None:
        raise ValueError(f"--use-checkpoint-args: {directory} has no checkpoint; check --load")
    return model_config_of(folder)


def model_config_of(folder: Path) -> ModelConfig:
    """The architecture of one checkpoint.

    Raises:
        ValueError: its ``run_config.json`` is missing or holds fields that do not exist here.
    """
    path = folder / RUN_CONFIG
    values = read_json(path).get("model", {})
    if not (isinstance(values, dict) and isinstance(values.get("rotary", {}), dict)):
        raise ValueError(f"{path} holds no architecture; choose another with --ckpt-step")
    rotary = _from_json(RotaryConfig, values.get("rotary", {}), path)
    return _from_json(ModelConfig, values | {"rotary": rotary}, path)


def write_run_config(folder: Path, model: ModelConfig, run_config: Any) -> None:
    """Write the architecture and whatever else ``run_config``, a dataclass or None, says."""
    others = dataclasses.asdict(run_config) if run_config is not None else {}
    write_json(folder / RUN_CONFIG, others | {"model": dataclasses.asdict(model)})


def _from_json(config: type, values: dict[str, Any], path: Path) -> Any:
    known = {field.name: field for field in dataclasses.fields(config)}
    required = {name for name, field in known.items() if _has_no_default(field)}
    unknown, missing = sorted(values.keys() - known), sorted(required - values.keys())
    if unknown or missing:
        raise ValueError(f"{path}: {config.__name__} has unknown {unknown}, missing {missing}")
    return config(**values)


def _has_no_default(field: dataclasses.Field) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING
