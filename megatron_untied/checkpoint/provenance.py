"""The run and the samples that a checkpoint comes from, stored in its ``run_config.json``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_untied.checkpoint.directory import read_json

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


def read_provenance(folder: Path) -> Provenance:
    """The provenance of the checkpoint in ``folder``.

    Raises:
        ValueError: its ``run_config.json`` is missing or not valid.
    """
    path = folder / RUN_CONFIG
    values = read_json(path).get(PROVENANCE, {})
    try:
        samples = values.get("samples")
        return Provenance(**values | {"samples": Samples(**samples) if samples else None})
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} is of another version ({error}); choose another checkpoint with --ckpt-step"
        ) from error


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
        for flag in dict.fromkeys([*before, *here])
        if before.get(flag) != here.get(flag)
    ]
