"""Finds the checkpoint that a run continues from, and checks that it may save to its folder.

Only small files are read, so every rank can do this before there are collectives.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from megatron_untied.checkpoint import directory as disk
from megatron_untied.checkpoint.checksums import Checksums
from megatron_untied.checkpoint.run_config import (
    RUN_CONFIG,
    Provenance,
    Samples,
    adaptation_of,
    differences,
    read_provenance,
)
from megatron_untied.checkpoint.state import STATE, Progress, StoredState
from megatron_untied.config import AdaptationConfig
from megatron_untied.config.checkpoint import CheckpointConfig
from megatron_untied.config.flag_names import flag_of
from megatron_untied.config.problems import first_few


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The checkpoint to load, and what follows from it for the run."""

    folder: Path | None = None
    """None for random weights."""
    pretrained: Path | None = None
    """The checkpoint with the frozen weights, if there is another one for them."""
    progress: Progress = Progress()
    """Progress of the run before its first step."""
    provenance: Provenance = Provenance()
    """Provenance of the checkpoints that the run will write; a new run adds a ``run_id``."""
    same_run: bool = False
    """The run continues its own checkpoints: it loads from the folder that it saves to."""
    notes: tuple[str, ...] = ()
    """Warnings about settings that are allowed."""

    def __str__(self) -> str:
        """The checkpoint."""
        return str(self.folder and f"{self.folder} (iteration {self.progress.iteration})")


def find_start(
    config: CheckpointConfig,
    *,
    samples: Samples | None = None,
    skip_train: bool = False,
    adaptation: AdaptationConfig | None = None,
) -> Start:
    """The checkpoint and progress that the run of ``config`` starts from.

    Args:
        config: what to load, and where to save.
        samples: the training samples of this run; None skips the comparison with the checkpoint's.
        skip_train: the run only evaluates.
        adaptation: what this run trains; None skips the comparison with the checkpoint's.

    Raises:
        ValueError: a required checkpoint is missing or damaged, was trained on other samples, has
            trained other parameters or adapters of another model, or ``save`` holds checkpoints of
            another run.
    """
    # Resolved: the same folder may be given relative, or through a link.
    loads_own_folder = bool(
        config.load and config.save and Path(config.load).resolve() == Path(config.save).resolve()
    )
    folder = disk.find_checkpoint(Path(config.load), config.ckpt_step) if config.load else None
    if folder is not None:
        start = _start_from(folder, config, None if skip_train else samples, loads_own_folder)
        if adaptation is not None:
            _require_same_adaptation(folder, config, adaptation)
    else:
        # These flags make sense only for a checkpoint that exists; without them a run that saves
        # to the folder it loads from is at its own first start.
        requiring = {
            "--finetune": config.finetune,
            "--no-load-optim": not config.load_optim,
            "--reset-data-position": config.reset_data_position,
            "--skip-train": skip_train,
            "--exit-on-missing-checkpoint": config.exit_on_missing_checkpoint,
            "--load": not loads_own_folder,
        }
        given = [flag for flag, is_given in requiring.items() if is_given]
        if config.load and given:
            needs = "a folder other than that of --save" if given[0] == "--load" else given[0]
            raise ValueError(
                f"--load {config.load} has no checkpoint, and {needs} needs one; check the path, "
                f"or leave {' and '.join(given)} out to start from random weights"
            )
        start = Start(provenance=Provenance(samples=samples))
    if config.pretrained_checkpoint:
        start = _with_pretrained(start, Path(config.pretrained_checkpoint))
    if config.save and not (skip_train or start.same_run or config.save_into_existing):
        _require_no_checkpoints(config, loads_own_folder)
    return start


def _start_from(
    folder: Path, config: CheckpointConfig, samples: Samples | None, loads_own_folder: bool
) -> Start:
    if checksums := Checksums.read(folder):
        for name in (STATE, RUN_CONFIG):
            checksums.require_small_file(name)
    stored = read_provenance(folder)
    # The run id decides which checkpoints may be replaced or deleted, so only a restart keeps it.
    same_run = loads_own_folder and not config.finetune
    provenance = replace(stored, samples=samples, run_id=stored.run_id if same_run else None)
    if config.finetune:
        return Start(folder=folder, provenance=provenance)
    progress, notes = StoredState.read(folder).progress, []
    if config.reset_data_position:
        progress = replace(progress, consumed_samples=0, data_start=progress.iteration)
    elif samples is not None:
        notes = _compare_samples(folder, stored.samples, samples, progress)
    return Start(
        folder=folder,
        progress=progress,
        provenance=provenance,
        same_run=same_run,
        notes=tuple(notes),
    )


def _require_same_adaptation(
    folder: Path, config: CheckpointConfig, adaptation: AdaptationConfig
) -> None:
    """Refuse a checkpoint whose tensors or moments are those of other parameters."""
    stored, differing = adaptation_of(folder), []
    for name in ("lora_rank", "lora_alpha", "lora_targets", "freeze"):
        before, here = getattr(stored, name), getattr(adaptation, name)
        # Its patterns decide which moments there are, nothing else.
        if before != here and not (name == "freeze" and (config.finetune or not config.load_optim)):
            differing.append(f"{flag_of(name)} {before}, here {here}")
    if stored.lora_rank is None and adaptation.lora_rank is not None:
        raise ValueError(
            f"--load {folder} is of a whole model, and --lora-rank loads adapters; give it as "
            "--pretrained-checkpoint"
        )
    if differing:
        raise ValueError(
            f"{folder} trained other parameters: {'; '.join(differing)}. Give the same; weights "
            "with adapters merged are made by tools/convert_checkpoint.py, and --no-load-optim "
            "starts the optimizer anew after another --freeze"
        )


def _with_pretrained(start: Start, directory: Path) -> Start:
    """``start`` with the checkpoint of the frozen weights, which must be the one it began with."""
    folder = disk.find_checkpoint(directory, None)
    if folder is None:
        raise ValueError(f"--pretrained-checkpoint {directory} has no checkpoint; check the path")
    of_base = read_provenance(folder)
    pretrained = of_base.run_id and f"{of_base.run_id}, {folder.name}"
    before = start.provenance.pretrained
    if before and pretrained and before != pretrained:
        raise ValueError(
            f"{start.folder} has adapters of another checkpoint ({before}) than "
            f"--pretrained-checkpoint {folder} ({pretrained}); give that one"
        )
    provenance = replace(start.provenance, pretrained=pretrained, source_dtype=of_base.source_dtype)
    return replace(start, pretrained=folder, provenance=provenance)


def _compare_samples(
    folder: Path, stored: Samples | None, here: Samples, progress: Progress
) -> list[str]:
    """Refuse another order of samples; returns warnings for other differences."""
    if stored is None:
        return [
            f"{folder} does not record its training samples; the data continues after "
            f"{progress.consumed_samples} samples, which is right for the same --data-path, "
            "--split, --seq-length and --seed"
        ]
    if changed := differences(stored.order, here.order):
        raise ValueError(
            f"{folder} was trained on samples in another order: {'; '.join(changed)}. After its "
            f"{progress.consumed_samples} samples some would be repeated and others missed. Give "
            "the same settings; or --reset-data-position to keep weights, moments and schedule and "
            "restart the samples; or --finetune to take the weights alone"
        )
    if changed := differences(stored.content, here.content):
        return [f"{folder} saw its samples in another way: {'; '.join(changed)}"]
    return []


def _require_no_checkpoints(config: CheckpointConfig, loads_own_folder: bool) -> None:
    # Saving among them would move the tracker, and so hide the other run's latest checkpoint.
    names = disk.checkpoint_names(Path(config.save))
    if not names:
        return
    if config.finetune and loads_own_folder:
        reason, advice = "--finetune starts a new run", "leave --finetune out to continue it"
    else:
        reason, advice = "this run does not continue them", f"--load {config.save} to continue them"
    listed = first_few(names, 3)
    raise ValueError(
        f"--save {config.save} holds checkpoints already ({listed}), and {reason}; give another "
        f"folder, or {advice}, or --save-into-existing to save beside them"
    )
