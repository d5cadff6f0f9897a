"""Runs ``pretrain_gpt.py`` as a user does, in a process of its own, and reads its metrics."""

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.sizes import ROOT
from megatron_untied.cli.planner_flags import complete
from megatron_untied.training.metrics import read_metrics


class TrainingFailed(RuntimeError):
    """A run that ended with an error; the message is the end of what it printed."""

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the GPU's memory did not suffice."""
        return "out of memory" in str(self).lower()


def train(flags: str, iterations: int, on_cpu: bool = False) -> list[dict]:
    """The metrics of every iteration of a run on one rank.

    Raises:
        TrainingFailed: the run ended with an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        words = f"{flags} --train-iters {iterations} --eval-iters 0 --num-workers 0".split()
        run = [sys.executable, "pretrain_gpt.py", *complete(words), "--metrics-jsonl", str(metrics)]
        if on_cpu:
            run = ["env", "CUDA_VISIBLE_DEVICES=", *run]
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise TrainingFailed((done.stdout + done.stderr)[-3000:])
        return read_metrics(metrics)
