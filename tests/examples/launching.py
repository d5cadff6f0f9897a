"""Run what is in ``examples`` as a user would, with a small model where ranks really start."""

import os
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.command_line import MODEL_FLAGS, words

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LAUNCHERS = ("pretrain_8b_5m.sh", "pretrain_32b_4m.sh", "finetune_8b_1m.sh")

TINY = [
    *words(MODEL_FLAGS),
    *(
        "--vocab-size 250 --cp-heads-per-chunk 2 --recompute-num-layers 2 "
        "--cpu-offloading-num-layers 2 --sequence-tile-size 48 --loss-chunk-size 48 "
        "--seq-length 256 --train-iters 3 --lr-warmup-iters 1 --num-workers 0 "
        "--distributed-backend gloo"
    ).split(),
]
"""Flags after a launcher's own: its features, on a model for CPUs."""


def environment(**variables: str) -> dict[str, str]:
    """This process's, without what would tell a launcher about nodes, and with ``variables``."""
    told = ("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK", "GPUS_PER_NODE")
    inherited = {k: v for k, v in os.environ.items() if k not in told}  # noqa: TID251
    own = {
        "PATH": f"{Path(sys.executable).parent}:{inherited['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    return inherited | own | variables


def start(*command: str | Path, folder: Path = ROOT, **variables: str) -> subprocess.Popen:
    """A process; its output is read by :func:`finish`."""
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, timeout: float = 600) -> subprocess.CompletedProcess:
    """Its exit status and output; a process that takes longer is ended."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run(*command: str | Path, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    """A process from start to end."""
    return finish(start(*command, folder=folder, **variables))


@dataclass(frozen=True, slots=True)
class Torchrun:
    """What a launcher starts."""

    options: list[str]
    script: str
    flags: list[str]


def torchrun_command(stdout: str) -> Torchrun:
    """What a launcher says that it starts."""
    start = f"python {ROOT / 'tools/torchrun.py'} "
    (line,) = (line for line in stdout.splitlines() if line.startswith(start))
    words = shlex.split(line)
    script = words.index(str(ROOT / "pretrain_gpt.py"))
    return Torchrun(words[2:script], words[script], words[script + 1 :])


def fake_program(folder: Path, name: str, body: str) -> str:
    """A PATH on which ``name`` is a script, before the system's own programs."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
    (folder / "bin" / name).chmod(0o755)
    return f"{folder / 'bin'}:/usr/bin:/bin"


def free_port() -> str:
    """A port that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])
