"""What a run asks of checkpoints."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Where weights come from, where they go, and what of a checkpoint is taken."""

    save: str | None = None
    save_interval: int | None = None
    """Iterations between checkpoints; None saves only at the end."""
    save_into_existing: bool = False
    """Save into a folder with another run's checkpoints too."""
    save_retain_interval: int | None = None
    """Delete a checkpoint of this run once there is a later one, unless its iteration is a multiple
    of this; None keeps all."""
    load: str | None = None
    ckpt_step: int | None = None
    """Iteration to load; None is the one named by ``latest_checkpointed_iteration.txt``."""
    finetune: bool = False
    """Take the weights alone and start at iteration 0."""
    load_optim: bool = True
    """Take Adam's moments and step and the learning rate schedule."""
    override_opt_param_scheduler: bool = False
    """Keep the moments, but follow this run's schedule where the checkpoint has another."""
    use_checkpoint_opt_param_scheduler: bool = False
    """Follow the checkpoint's schedule where this run has another."""
    reset_data_position: bool = False
    """Go on with weights, moments and schedule, but begin the training samples anew."""
    load_rng: bool = True
    use_checkpoint_args: bool = False
    """The architecture was read from ``load``, but for flags that were given all the same."""
    exit_on_missing_checkpoint: bool = False
    """Stop when ``load`` is ``save`` and holds no checkpoint, instead of starting from random
    weights."""
