"""Configuration of saving and loading checkpoints."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Where to save and load, and which parts of a checkpoint to load."""

    save: str | None = None  # folder of all checkpoints of a run
    save_interval: int | None = None
    """Iterations between checkpoints; None saves only at the end."""
    async_save: bool = False
    """Write checkpoints while training goes on, from a copy of the state on the host."""
    exit_on_failed_save: bool = True
    """Stop when a checkpoint cannot be written, instead of training on until the next one."""
    save_into_existing: bool = False
    """Allow saving into a folder with checkpoints of another run."""
    save_retain_interval: int | None = None
    """Delete a checkpoint of this run once there is a later one, unless its iteration is a multiple
    of this; None keeps all."""
    most_recent_k: int | None = None
    """Keep so many of the last checkpoints of this run, and those that ``save_retain_interval``
    retains; None is 1 with that flag, and otherwise all."""
    load: str | None = None  # such a folder too
    pretrained_checkpoint: str | None = None
    """Such a folder with the frozen weights, which this run's checkpoints leave out."""
    ckpt_step: int | None = None
    """Iteration to load; None is the one named by ``latest_checkpointed_iteration.txt``."""
    finetune: bool = False
    """Load the weights only and start at iteration 0."""
    load_optim: bool = True
    """Load Adam's moments and step and the learning rate schedule."""
    override_opt_param_scheduler: bool = False
    """Load the moments, but use this run's schedule if the checkpoint has another one."""
    use_checkpoint_opt_param_scheduler: bool = False
    """Use the checkpoint's schedule if this run has another one."""
    reset_data_position: bool = False
    """Continue weights, moments and schedule, but restart the training samples."""
    load_rng: bool = True
    """Load random states, if the parallel sizes are the same."""
    use_checkpoint_args: bool = False
    """The architecture is that in ``load``, or ``pretrained_checkpoint`` if given, apart from flags
    that may change it."""
    exit_on_missing_checkpoint: bool = False
    """Stop when ``load`` is ``save`` and holds no checkpoint, instead of starting from random
    weights."""
