import os
import signal
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_untied.config.run import LoopConfig
from megatron_untied.step_progress import StepPosition
from megatron_untied.training.exits import EarlyExit, SignalWatch, what_follows
from tests.support.ranks import run_on_ranks


def reasons(group, iterations: list[int], **limits) -> list[str | None]:
    with watch(group) as signals:
        early_exit = EarlyExit(LoopConfig(train_iters=100, **limits), signals)
        return [early_exit.reason(iteration) for iteration in iterations]


def watch(group) -> SignalWatch:
    return SignalWatch(dist.HashStore(), group.rank(), advice=str, announce=list)


def test_nothing_ends_a_run_by_default():
    assert run_on_ranks(reasons, 1, [1, 2]) == [[None, None]]


def test_exit_interval():
    assert run_on_ranks(reasons, 1, [3, 4, 8], exit_interval=4) == [
        [None, "--exit-interval 4", "--exit-interval 4"]
    ]


@pytest.mark.parametrize(("minutes", "reason"), [(0.0, "--exit-duration-in-mins 0"), (60.0, None)])
def test_exit_duration(minutes, reason):
    assert run_on_ranks(reasons, 2, [1], exit_duration_in_mins=minutes) == [[reason], [reason]]


def reasons_when_one_rank_is_signaled(group, number) -> list[str | None]:
    before = signal.getsignal(number)
    with watch(group) as signals:
        early_exit = EarlyExit(LoopConfig(train_iters=100, exit_signal_handler=True), signals)
        found = [early_exit.reason(1)]
        if group.rank() == 1:
            os.kill(os.getpid(), number)
        found += [early_exit.reason(2), early_exit.signal()]
    assert signal.getsignal(number) is before
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_all_ranks_end_for_the_same_reason_when_one_is_signaled(number):
    expected = [None, number.name, number.name]
    assert run_on_ranks(reasons_when_one_rank_is_signaled, 2, number) == [expected, expected]


@pytest.mark.parametrize(
    ("step", "save", "left", "text"),
    [
        (
            "iteration 12",
            "/x",
            timedelta(minutes=43),
            "finishing iteration 12, then saving to /x and exiting; about 0:43:00 left",
        ),
        ("iteration 12", None, None, "finishing iteration 12, then exiting without --save"),
        (
            "checkpoint of iteration 4",
            "/x",
            None,
            "finishing checkpoint of iteration 4, then exiting",
        ),
        ("start", "/x", None, "exiting before the first iteration"),
    ],
)
def test_says_what_a_signal_leads_to(step, save, left, text):
    assert what_follows(StepPosition(step=step), save, left) == text
