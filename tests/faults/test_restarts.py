"""The launcher restarts a run that has lost a rank or a node: its losses are those of one that ran.

Ranks are killed or cut off in the sixth iteration of the first attempt; checkpoints are saved every
two iterations, so the fifth is repeated.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import pretrain_gpt
from tests.examples.launching import ROOT, environment, free_port
from tests.examples.test_two_hosts import ADDRESSES, NAMES, hosts, ip, losses  # noqa: F401
from tests.support.command_line import command_line
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import train

FLAGS = {"train_iters": 8, "global_batch_size": 4, "use_distributed_optimizer": True}
SCRIPT = '''
import os, signal, sys, time
from pathlib import Path

sys.path.insert(0, {root!r})
import pretrain_gpt

def break_down():
    """Of rank 1, in the sixth iteration of the first attempt."""
    folder = Path({folder!r})
    if {kind!r} == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / "reached").touch()
    while not (folder / "cut").exists():
        time.sleep(0.1)

forward_step, steps = pretrain_gpt.forward_step, []

def breaking_step(*arguments):
    steps.append(None)
    first = not (Path({folder!r}) / "broken").exists()
    if len(steps) == 11 and os.environ["RANK"] == "1" and first:  # two micro-batches in a step
        (Path({folder!r}) / "broken").touch()
        break_down()
    return forward_step(*arguments)

pretrain_gpt.forward_step = breaking_step
pretrain_gpt.main()
'''


def command(folder: Path, kind: str, options: list[str], **flags: object) -> list[str]:
    """What starts the ranks of one node."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(root=str(ROOT), folder=str(folder), kind=kind))
    paths = {
        "save": folder / "checkpoints",
        "load": folder / "checkpoints",
        "save_interval": 2,
        "metrics_jsonl": folder / "metrics.jsonl",
    }
    argv = command_line(**FLAGS | paths | flags)
    return ["python", str(ROOT / "tools/torchrun.py"), *options, str(script), *argv]


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[float]:
    """Losses of a run on two ranks that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    path = folder / "metrics.jsonl"
    run_on_ranks(train, 2, path, get_batch=pretrain_gpt.get_batch, **FLAGS)
    return losses(folder)


def test_a_killed_rank_is_started_again_with_all_others(expected, tmp_path):
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run(
        command(tmp_path, "killed", options),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert "| 4 iterations done" in done.stdout
    assert losses(tmp_path) == expected  # bit for bit
    again = (tmp_path / "metrics.jsonl.superseded").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in again] == [5]


class Node:
    """An agent of torchrun and its ranks, on a host of its own."""

    def __init__(self, folder: Path, number: int, port: str):
        options = [
            *("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "0"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{port}"),
            *("--rdzv-id", "run", "--rdzv-conf", f"is_host={int(number == 0)}"),
            *("--local-addr", ADDRESSES[number]),
        ]
        # A network namespace shares the name of the machine; "-u" lets it have one of its own.
        named = ["unshare", "-u", "sh", "-c", f'hostname {NAMES[number]} && exec "$@"', "sh"]
        run = command(folder, "cut off", options, distributed_timeout_minutes=0.4)
        self.output = folder / f"{NAMES[number]}-{time.monotonic_ns()}.txt"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", NAMES[number], *named, *run],
                env=environment(GLOO_SOCKET_IFNAME="cable"),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """As a node that loses power."""
        for pid in subprocess.run(
            ["ps", "-o", "pid=", "--sid", str(self.process.pid)], capture_output=True, text=True
        ).stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        self.process.wait()

    def wait_for(self, text: str, seconds: float) -> None:
        """Until the output has ``text``."""
        deadline = time.monotonic() + seconds
        while text not in self.output.read_text():
            assert time.monotonic() < deadline, self.output.read_text()[-5000:]
            time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_node_that_is_cut_off_is_named_and_the_job_starts_again(hosts, expected, tmp_path):  # noqa: F811
    nodes, port = [], free_port()
    try:
        nodes += [Node(tmp_path, number, port) for number in range(2)]
        deadline = time.monotonic() + 300
        while not (tmp_path / "reached").exists():
            assert time.monotonic() < deadline, nodes[0].output.read_text()[-5000:]
            time.sleep(0.2)
        ip(f"-n {NAMES[0]} link set cable down")
        (tmp_path / "cut").touch()
        # Each side ends within its timeout, and says who is missing as far as it can know.
        nodes[0].wait_for("error: rank 1 gave no sign of life, rank 1 last at ", 120)
        nodes[0].wait_for(f", on {NAMES[1]}; reported by rank 0 at iteration 6", 10)
        nodes[1].wait_for(f"error: the store of all ranks does not answer {NAMES[1]}", 120)
        assert nodes[0].process.wait(120) != 0
        nodes[1].kill()  # by the scheduler, when the job has failed
        ip(f"-n {NAMES[0]} link set cable up")
        port = free_port()
        nodes += [Node(tmp_path, number, port) for number in range(2)]
        for node in nodes[2:]:
            assert node.process.wait(300) == 0, node.output.read_text()[-5000:]
    finally:
        for node in nodes:
            if node.process.poll() is None:
                node.kill()
    assert losses(tmp_path) == expected  # bit for bit
