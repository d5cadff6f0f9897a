"""Which run wrote a checkpoint and from which samples, kept in its ``run_config.json``."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_untied.checkpoint.directory import read_json

RUN_CONFIG = "run_config.json"
PROVENANCE = "provenance"


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """What training samples depend on, by flag; the values are JSON and can be shown."""

    order: dict[str, Any]
    """What decides which sample comes after so many: another value repeats some and misses some."""
    content: dict[str, Any]
    """What decides how the model sees the same samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where a checkpoint comes from. Checkpoints of earlier versions have none of it."""

    run_id: str | None = None
    """Of the run that wrote it: the same for all checkpoints that one run, with its restarts,
    leaves in one folder."""
    samples: Samples | None = None
    source_dtype: str | None = None
    """Dtype of the Hugging Face weights that training began with, such as ``bfloat16``."""


def read_provenance(folder: Path) -> Provenance:
    """Of the checkpoint in ``folder``.

    Raises:
        ValueError: its ``run_config.json`` is missing, or something else is in it.
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
    """Whether ``folder`` is a checkpoint that the run wrote; what cannot be read is not."""
    try:
        return read_provenance(folder).run_id == run_id
    except (ValueError, OSError):
        return False


def differences(before: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """The flags whose values differ, with both."""
    return [
        f"{flag}: {before.get(flag, 'not given')}, here {here.get(flag, 'not given')}"
        for flag in dict.fromkeys([*before, *here])
        if before.get(flag) != here.get(flag)
    ]


def as_json(provenance: Provenance) -> dict[str, Any]:
    """What :func:`read_provenance` reads, under its name in ``run_config.json``."""
    return {PROVENANCE: dataclasses.asdict(provenance)}
