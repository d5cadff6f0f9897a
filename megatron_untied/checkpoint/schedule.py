"""The learning rate schedule of a checkpoint and of the run that goes on from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

NOT_IN_STATE = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")
"""What megatron-core's own state of a schedule leaves out."""


def schedule_state(scheduler: OptimizerParamScheduler) -> dict[str, Any]:
    """Every setting of a schedule and how far it is; steps are samples."""
    return scheduler.state_dict() | {name: getattr(scheduler, name) for name in NOT_IN_STATE}


def require_same_schedule(
    folder: Path, stored: Mapping[str, Any], scheduler: OptimizerParamScheduler
) -> None:
    """Check that the learning rate and weight decay go on as they began.

    Settings that no later value depends on may differ: the length of a constant schedule, so that
    training can be prolonged, and a warmup that is over.

    Raises:
        ValueError: with the settings that differ, both values and the flags that choose.
    """
    here = schedule_state(scheduler)
    unread = _unread(stored, here)
    names = [name for name in stored if name in here and name not in unread]
    differing = [f"{n} {stored[n]}, here {here[n]}" for n in names if stored[n] != here[n]]
    if differing:
        raise ValueError(
            f"{folder} has another schedule (steps are samples): {'; '.join(differing)}. Give it "
            "the same --lr, --min-lr, --lr-warmup-iters, --lr-decay-iters (--train-iters, unless "
            "given), --weight-decay and --global-batch-size; or --override-opt_param-scheduler "
            "for the new schedule, --use-checkpoint-opt_param-scheduler for the old one, both "
            "with Adam's moments; or --no-load-optim to start the optimizer anew."
        )


def resume_schedule(
    scheduler: OptimizerParamScheduler, stored: Mapping[str, Any], *, take_settings: bool
) -> None:
    """Go on after as many samples as ``stored``; with its settings, or with those of this run."""
    if take_settings:
        for name in stored.keys() - {"num_steps"}:
            setattr(scheduler, name, stored[name])
        for group in scheduler.optimizer.param_groups:
            # megatron-core's groups have copies, which count for more than the schedule's own.
            group |= {name: stored[name] for name in ("max_lr", "min_lr") if name in group}
    scheduler.num_steps = stored["num_steps"]
    scheduler.step(0)


def _unread(stored: Mapping[str, Any], here: Mapping[str, Any]) -> set[str]:
    unread = {"num_steps"}
    styles = {stored["lr_decay_style"], here["lr_decay_style"]}
    warm = stored["num_steps"] > max(stored["lr_warmup_steps"], here["lr_warmup_steps"])
    if warm:
        unread.add("init_lr")
    if styles == {"constant"}:
        unread |= {"lr_decay_steps", "min_lr"} | ({"lr_warmup_steps"} if warm else set())
    if "WSD" not in styles:
        unread |= {"wsd_decay_steps", "lr_wsd_decay_style"}
    return unread
