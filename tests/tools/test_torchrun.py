"""Signals and errors through a real launcher, whose process group holds data workers too."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.command_line import command_line

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run")
OURS = ("tools/torchrun.py",)


def start(launcher: tuple[str, ...], log: Path, **flags: object) -> subprocess.Popen:
    argv = command_line(
        **{
            "context_parallel_size": 2, "log_interval": 1, "distributed_backend": "gloo",
            "global_batch_size": 1, "train_iters": 1_000_000, "num_workers": 2,
        } | flags
    )  # fmt: skip
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, *launcher, "--standalone", "--nproc-per-node", "2"]
            + ["pretrain_gpt.py", *argv],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},  # noqa: TID251 - a process of its own
        )


def signal_after(words: str, process: subprocess.Popen, log: Path, number: int) -> list[str]:
    """What is printed that is neither progress nor torchrun's log, after the signal's coming."""
    deadline = time.monotonic() + 120
    while words not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(number)
    process.wait(120)
    lines = log.read_text().splitlines()
    quiet = (" [20", " progress:", "W1", "W0", "E1", "E0", "[W", "[Gloo")
    return [line for line in lines if line.strip() and not line.startswith(quiet)]


@pytest.mark.parametrize(
    ("launcher", "flags"),
    [
        pytest.param(TORCHRUN, {}, id="torchrun", marks=pytest.mark.slow),
        pytest.param(OURS, {}, id="tools/torchrun.py"),
        pytest.param(
            TORCHRUN, {"save_on_signal_now": True, "async_save": True}, id="the step before"
        ),
    ],
)
def test_sigterm_to_the_launcher_saves_the_step(tmp_path, launcher, flags):
    log, folder = tmp_path / "log.txt", tmp_path / "c"
    process = start(launcher, log, save=folder, exit_signal_handler=True, **flags)
    lines = signal_after("lm loss", process, log, signal.SIGTERM)
    text = "\n".join(lines)
    iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
    assert f"saved {folder}/iter_{iteration:07d}" in text
    assert "SIGTERM received on rank " in text
    assert f"exiting after iteration {iteration}: SIGTERM" in text
    assert "DataLoader worker" not in text
    if launcher == OURS:
        assert process.returncode == 128 + signal.SIGTERM
        assert lines[-1] == "all ranks of this node ended after SIGTERM"
        assert "Traceback" not in text


def test_an_interrupt_is_one_line_that_tells_how_to_go_on(tmp_path):
    log, folder = tmp_path / "log.txt", tmp_path / "c"
    process = start(OURS, log, save=folder, save_interval=1)
    lines = signal_after("saved", process, log, signal.SIGINT)
    assert process.returncode == 128 + signal.SIGINT
    said = [line for line in lines if "SIGINT" in line]
    assert len(said) == 2
    assert f"exiting now; the last checkpoint is {folder}/iter_" in said[0]
    assert said[1] == "all ranks of this node ended after SIGINT"
    assert "Traceback" not in "\n".join(lines)


def test_an_error_of_all_ranks_is_two_lines(tmp_path):
    log = tmp_path / "log.txt"
    process = start(OURS, log, metrics_jsonl="/proc/nowhere/metrics.jsonl")
    assert process.wait(120) == 1
    lines = [line for line in log.read_text().splitlines() if line and line[0] not in "WE["]
    assert lines[0].startswith("error: --metrics-jsonl /proc/nowhere/metrics.jsonl cannot be ")
    assert lines[1].startswith("rank ")
    assert len(lines) == 2


def test_a_host_that_does_not_resolve_is_refused_before_ranks_start(tmp_path, capsys, monkeypatch):
    from megatron_untied.commands import torchrun
    from megatron_untied.platform import host_names

    wait = host_names.require_resolvable
    monkeypatch.setattr(
        torchrun, "require_resolvable", lambda *args, **kw: wait(*args, **kw, retry_seconds=0.1)
    )
    status = torchrun.main(["--nnodes", "2", "--master-addr", "node.invalid", "absent.py"])
    error = capsys.readouterr().err.splitlines()
    assert status == 1
    assert len(error) == 2
    assert error[1].startswith("error: MASTER_ADDR is node.invalid, which does not resolve")
