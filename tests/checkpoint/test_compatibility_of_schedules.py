"""Which schedules go on from which, and with whose settings."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_untied.checkpoint.compatibility import (
    require_same_schedule,
    resume_schedule,
    schedule_state,
)

SETTINGS = {
    "init_lr": 0.0, "max_lr": 1e-2, "min_lr": 1e-3, "lr_warmup_steps": 8, "lr_decay_steps": 40,
    "lr_decay_style": "cosine", "start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 0,
    "wd_incr_style": "constant", "wsd_decay_steps": 12, "lr_wsd_decay_style": "linear",
}  # fmt: skip


def scheduler(consumed=0, **changes):
    settings = SETTINGS | changes
    group = {"max_lr": settings["max_lr"], "min_lr": settings["min_lr"]}  # as megatron-core's
    made = OptimizerParamScheduler(SimpleNamespace(param_groups=[group]), **settings)
    made.step(consumed)
    return made


def values(made, steps=6):
    """The learning rates and weight decays of the next steps."""
    (group,), found = made.optimizer.param_groups, []
    for _ in range(steps):
        found.append((group["lr"], group["weight_decay"]))
        made.step(4)
    return found


ALLOWED = [
    (20, {"lr_decay_style": "constant"}, {"lr_decay_steps": 80}),
    (20, {"lr_decay_style": "constant"}, {"min_lr": 1e-4}),
    (20, {"lr_decay_style": "constant"}, {"lr_warmup_steps": 4, "lr_decay_steps": 20}),
    (20, {}, {"init_lr": 1e-4}),
    (20, {}, {"wsd_decay_steps": 4, "lr_wsd_decay_style": "cosine"}),
]


@pytest.mark.parametrize(("consumed", "both", "change"), ALLOWED)
def test_what_no_later_value_depends_on_may_differ(consumed, both, change):
    stored, here = scheduler(consumed, **both), scheduler(**both | change)
    require_same_schedule(Path("x"), schedule_state(stored), here)
    resume_schedule(here, schedule_state(stored), take_settings=False)
    assert values(here) == values(stored)


@pytest.mark.parametrize(
    ("consumed", "both", "change", "text"),
    [
        (4, {"lr_decay_style": "constant"}, {"lr_warmup_steps": 4}, "lr_warmup_steps 8, here 4"),
        (4, {"lr_decay_style": "constant"}, {"init_lr": 1e-3}, "init_lr 0.0, here 0.001"),
        (20, {"lr_decay_style": "constant"}, {"max_lr": 2e-2}, "max_lr 0.01, here 0.02"),
        (20, {}, {"lr_decay_style": "constant"}, "lr_decay_style cosine, here constant"),
        (20, {}, {"lr_decay_steps": 80}, "lr_decay_steps 40, here 80"),
        (20, {}, {"start_wd": 0.2, "end_wd": 0.2}, "start_wd 0.1, here 0.2"),
        (20, {"lr_decay_style": "WSD"}, {"wsd_decay_steps": 4}, "wsd_decay_steps 12, here 4"),
        (20, {"lr_decay_style": "WSD"}, {"lr_wsd_decay_style": "cosine"}, "lr_wsd_decay_style"),
    ],
)
def test_refuses_another_schedule_and_names_the_flags_that_choose(consumed, both, change, text):
    stored, here = scheduler(consumed, **both), scheduler(**both | change)
    with pytest.raises(ValueError, match=text) as refused:
        require_same_schedule(Path("x"), schedule_state(stored), here)
    assert "--override-opt_param-scheduler" in str(refused.value)
    assert "--use-checkpoint-opt_param-scheduler" in str(refused.value)


OTHER = {"max_lr": 2e-2, "min_lr": 0.0, "lr_decay_steps": 80, "start_wd": 0.3, "end_wd": 0.3}


def test_the_settings_of_the_run_or_of_the_checkpoint_go_on_from_the_same_step():
    stored = schedule_state(scheduler(20))
    ours, theirs = scheduler(**OTHER), scheduler(**OTHER)
    resume_schedule(ours, stored, take_settings=False)
    resume_schedule(theirs, stored, take_settings=True)
    assert values(ours) == values(scheduler(20, **OTHER))
    assert values(theirs) == values(scheduler(20))


def test_a_checkpoint_of_an_earlier_version_says_less():
    stored = scheduler(20, lr_decay_style="WSD").state_dict()
    require_same_schedule(Path("x"), stored, scheduler(lr_decay_style="WSD", wsd_decay_steps=4))
