"""A user's mistake is printed once, whichever ranks have made it."""

import os
import signal
import threading
import time

import pytest

from megatron_untied.training.errors import print_error_once
from megatron_untied.training.initialize import UserError, read_launch
from megatron_untied.training.rendezvous import open_store
from tests.support.launch import launch


def fail_with(rank: int, messages: dict[int, str]) -> None:
    with print_error_once(read_launch()):
        if rank in messages:
            raise UserError(messages[rank])


@pytest.mark.parametrize(
    ("messages", "printed"),
    [
        (dict.fromkeys(range(3), "error: x"), {0: "error: x"}),
        (
            {0: "error: x", 1: "error: y", 2: "error: y"},
            {0: "error: x [rank 0]", 1: "error: y [ranks 1, 2]"},
        ),
        ({1: "error: x", 2: "error: x"}, {1: "error: x [ranks 1, 2]"}),
    ],
    ids=["all", "two kinds", "not rank 0"],
)
def test_the_lowest_rank_tells(tmp_path, monkeypatch, messages, printed):
    said = launch(fail_or_host, 3, tmp_path, messages, wait_for=list(messages))
    for rank, text in enumerate(said):
        expected = [printed[rank]] if rank in printed else []
        status = ["1"] if rank in messages else []
        assert text.splitlines() == expected + status


def fail_or_host(rank: int, messages: dict[int, str]) -> None:
    """Rank 0 hosts the store, as torchrun does, while it is asked."""
    if rank == 0 and rank not in messages:
        open_store(read_launch()).wait(["ended"])
    fail_with(rank, messages)


def fail_and_be_terminated(rank: int) -> None:
    open_store(read_launch())
    if rank == 0:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        fail_with(rank, {0: "error: x"})
    time.sleep(60)


def test_a_rank_that_waits_for_others_still_tells_when_it_is_terminated(tmp_path):
    """The launcher does that when another rank has crashed."""
    said = launch(fail_and_be_terminated, 2, tmp_path, wait_for=[0])
    assert said[0] == "error: x\n"
