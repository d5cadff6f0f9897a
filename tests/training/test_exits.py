import os
import signal

import pytest

from megatron_untied.training.config import LoopConfig
from megatron_untied.training.exits import EarlyExit
from tests.distributed import run_on_ranks


def reasons(group, iterations: list[int], **limits) -> list[str | None]:
    with EarlyExit(LoopConfig(train_iters=100, **limits)) as early_exit:
        return [early_exit.reason(iteration) for iteration in iterations]


def test_nothing_ends_a_run_by_default():
    assert run_on_ranks(reasons, 1, [1, 2]) == [[None, None]]


def test_exit_interval():
    assert run_on_ranks(reasons, 1, [3, 4, 8], exit_interval=4) == [
        [None, "--exit-interval 4", "--exit-interval 4"]
    ]


@pytest.mark.parametrize(("minutes", "reason"), [(0.0, "--exit-duration-in-mins 0"), (60.0, None)])
def test_exit_duration(minutes, reason):
    assert run_on_ranks(reasons, 2, [1], exit_duration_in_mins=minutes) == [[reason], [reason]]


def reasons_when_one_rank_is_terminated(group) -> list[str | None]:
    before = signal.getsignal(signal.SIGTERM)
    with EarlyExit(LoopConfig(train_iters=100, exit_signal_handler=True)) as early_exit:
        found = [early_exit.reason(1)]
        if group.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        found.append(early_exit.reason(2))
    assert signal.getsignal(signal.SIGTERM) is before
    return found


def test_all_ranks_end_when_one_is_told_to():
    expected = [None, "SIGTERM"]
    assert run_on_ranks(reasons_when_one_rank_is_terminated, 2) == [expected, expected]
