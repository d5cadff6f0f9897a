"""Workers of a loader outlive signals to the process group, and end with their rank."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from megatron_untied.data.loader import FIELDS, micro_batches

SCRIPT = """
import multiprocessing, os, signal, sys
from tests.data.test_worker_signals import loader
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
batches = loader()
print("workers", *[worker.pid for worker in multiprocessing.active_children()], flush=True)
for line in sys.stdin:
    print(next(batches)["tokens"].tolist(), flush=True)
"""


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([index]) for name in FIELDS}


def loader():
    return micro_batches(
        Numbers(), consumed_samples=0, micro_batch_size=1, data_parallel_rank=0,
        data_parallel_size=1, num_workers=2,
    )  # fmt: skip


@pytest.fixture
def rank():
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    process.kill()
    process.wait()


def ask(rank: subprocess.Popen) -> str:
    rank.stdin.write("next\n")
    rank.stdin.flush()
    return rank.stdout.readline().strip()


def wait_until_gone(pids: list[int], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize("end", ["leaves", "is killed"])
def test_workers_survive_signals_to_the_group_and_end_when_the_rank_does(rank, end):
    workers = [int(pid) for pid in rank.stdout.readline().split()[1:]]
    assert len(workers) == 2
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):  # the first one at once
        os.killpg(rank.pid, number)
        for worker in workers:
            os.kill(worker, signal.SIGHUP)
    assert [ask(rank) for _ in range(12)] == [f"[[{index}]]" for index in range(12)]
    if end == "leaves":
        rank.stdin.close()
        assert rank.wait(60) == 0
    else:
        rank.kill()
        rank.wait()
    assert wait_until_gone(workers)
