"""Thirty steps and five saves take the memory of five steps and none."""

import ctypes
import gc
import os
import sys
from pathlib import Path

import pretrain_gpt
from megatron_untied.training.reporting import Reporter
from tests.support.command_line import command_line
from tests.support.launch import launch

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
    "train_iters": 30,
    "save_interval": 6,
}


NO_RECORD = {"TORCH_FR_BUFFER_SIZE": "0"}
"""torch records the last 2000 collectives: 3 MiB that fill up over 25 of these steps."""


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what malloc only keeps is no growth
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) * 1024


def train_and_measure(rank: int, folder: Path) -> None:
    os.environ |= NO_RECORD  # noqa: TID251 - torch can be told in no other way
    step, measured = Reporter.step, []

    def measuring(self, result, progress, **others) -> None:
        measured.append(resident_bytes())
        step(self, result, progress, **others)

    Reporter.step = measuring
    sys.argv = ["pretrain_gpt.py", *command_line(**FLAGS, save=folder / "checkpoints")]
    pretrain_gpt.main()
    (folder / f"bytes{rank}.txt").write_text(" ".join(map(str, measured)))


def test_resident_memory_does_not_grow(tmp_path):
    said = launch(train_and_measure, 2, tmp_path, tmp_path)
    for rank in range(2):
        measured = [int(x) for x in (tmp_path / f"bytes{rank}.txt").read_text().split()]
        assert len(measured) == FLAGS["train_iters"], said[rank]
        assert measured[29] < 1.01 * measured[4], measured
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*"))
    assert saved == [f"iter_{iteration:07d}" for iteration in (6, 12, 18, 24, 30)]
