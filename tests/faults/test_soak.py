"""Memory, file descriptors and threads of a long run with everything on do not grow.

The streamed layers keep their inputs on the host and on a disk, and the run saves, deletes old
checkpoints and evaluates all the time.
"""

import ctypes
import gc
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import pretrain_gpt
from megatron_untied.training.reporting import Reporter
from tests.support.command_line import command_line
from tests.support.corpus import random_documents, write_token_files
from tests.support.launch import launch
from tests.support.tiny_model import TINY

FLAGS = {
    "seq_length": 256,
    "context_parallel_size": 2,
    "cp_heads_per_chunk": 2,
    "use_distributed_optimizer": True,
    "recompute_granularity": "selective",
    "cpu_offloading_num_layers": 2,
    "park_during_attention": True,
    "sequence_tile_size": 128,
    "loss_chunk_size": 128,
    "global_batch_size": 1,
    "save_interval": 6,
    "most_recent_k": 2,
    "eval_interval": 5,
    "eval_iters": 1,
    "log_interval": 10,
    "mock_data": None,
    "num_workers": 1,
    "split": "9,1,0",
}
KILLED_AFTER = 2
"""Steps after which the data workers of rank 0 are killed, and others go on."""
WARM_STEPS = 6
"""After them everything has been allocated that a step uses."""
MOST_GROWTH = 0.01
"""Of the resident memory over a whole run, by the line that fits it best."""
NO_RECORD = {"TORCH_FR_BUFFER_SIZE": "0"}
"""torch records the last 2000 collectives: 3 MiB that fill up over 25 of these steps."""


def measures() -> dict[str, int]:
    """What this process holds: resident bytes, open file descriptors, threads."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what malloc only keeps is no growth
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "resident_bytes": int(lines["VmRSS"].split()[0]) * 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(lines["Threads"]),
    }


def train_and_measure(rank: int, folder: Path, steps: int) -> None:
    os.environ |= NO_RECORD  # noqa: TID251 - torch can be told in no other way
    step, measured = Reporter.step, []

    def measuring(self, result, progress, **others) -> None:
        if rank == 0 and progress.iteration == KILLED_AFTER:
            for worker in multiprocessing.active_children():
                os.kill(worker.pid, signal.SIGKILL)
        measured.append(measures())
        step(self, result, progress, **others)

    Reporter.step = measuring
    paths = {
        "save": folder / "checkpoints",
        "activation_disk": folder,
        "data_path": folder / "data",
    }
    sys.argv = ["pretrain_gpt.py", *command_line(**FLAGS, **paths, train_iters=steps)]
    pretrain_gpt.main()
    (folder / f"measured{rank}.json").write_text(json.dumps(measured))


def soak(folder: Path, steps: int, timeout: float) -> list[dict[str, dict[str, float]]]:
    """Growth over a run of so many steps, by rank: slope x steps, and the mean, of each measure."""
    vocab_size = TINY.vocab_size - 1
    write_token_files(folder / "data", random_documents(400, vocab_size=vocab_size, eod=vocab_size))
    said = launch(train_and_measure, 2, folder, folder, steps, timeout=timeout)
    assert "others go on in its place" in said[0]
    found = []
    for rank in range(2):
        path = folder / f"measured{rank}.json"
        assert path.exists(), said[rank]
        measured = json.loads(path.read_text())
        assert len(measured) == steps, said[rank]
        found.append({})
        for name in measured[0]:
            values = np.array([each[name] for each in measured[WARM_STEPS:]], float)
            slope = np.polyfit(np.arange(len(values)), values, 1)[0]
            found[rank][name] = {"slope": slope, "growth": slope * steps, "mean": values.mean()}
    saved = sorted(path.name for path in (folder / "checkpoints").glob("iter_*"))
    last = steps - steps % FLAGS["save_interval"]
    kept = sorted({steps, last, last - FLAGS["save_interval"]})[-2:]
    assert saved == [f"iter_{iteration:07d}" for iteration in kept]
    return found


def require_flat(found: list[dict[str, dict[str, float]]]) -> None:
    for rank, measured in enumerate(found):
        resident = measured["resident_bytes"]
        assert resident["growth"] < MOST_GROWTH * resident["mean"], f"rank {rank}: {resident}"
        for name in ("descriptors", "threads"):
            assert abs(measured[name]["growth"]) < 1, f"rank {rank}: {name} {measured[name]}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_grows_in_forty_steps(tmp_path):
    require_flat(soak(tmp_path, 40, timeout=850))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_grows_in_five_hundred_steps(tmp_path):
    require_flat(soak(tmp_path, 500, timeout=3500))
