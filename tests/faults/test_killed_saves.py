"""Kill ranks with SIGKILL, mostly while they save: the latest complete checkpoint always loads.

``--fault-seed`` chooses other moments.
"""

import itertools
import os
import random
import signal
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_untied.checkpoint import (
    CheckpointConfig,
    CheckpointSave,
    Progress,
    Provenance,
    load_checkpoint,
)
from megatron_untied.checkpoint import directory as disk
from megatron_untied.checkpoint.checksums import CHECKSUMS, ChecksummedFile, Checksums
from megatron_untied.checkpoint.state import tensors_of
from tests.checkpoint.warnings import recorded_warnings
from tests.support.launch import launch
from tests.support.optimizer_run import Split, small_run

RANKS = 2
RUN = Provenance(run_id="a")
FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove"}
MOMENTS = {"file": 60, "write": 1500, "training": 1}
"""Kinds of moments to kill at, and about how many of them two saves have on one rank: steps on the
file system, writes within the file of tensors, and the one between two saves."""


def fill(state, iteration: int) -> None:
    """Give every tensor of the state a value of its iteration."""
    for shard in state.shards.shards(with_moments=True):
        for _, tensor in tensors_of(shard):
            tensor.fill_(iteration)


def save_until_killed(
    rank: int, path: str, victim: int, kind: str, number: int, record: str, in_background: bool
) -> None:
    """Continue the run in ``path`` and save an iteration after another.

    In the background the state already changes while it is written. The victim kills itself at the
    moment of that kind and number.
    """
    dist.init_process_group("gloo")
    run = small_run(Split())
    config = CheckpointConfig(load=path, save=path)
    with recorded_warnings() as said:
        done = load_checkpoint(config, run.state, seed=3).iteration
    if done:
        for shard in run.state.shards.shards(with_moments=True):
            for name, tensor in tensors_of(shard):
                layout = run.state.layouts[shard.name]
                for part in layout.global_slices(tensor, shard.slices):  # without padding
                    assert (part.tensor == done).all(), f"{name} is not of iteration {done}"
    if rank == 0:
        Path(record).write_text(f"{done}\n" + "\n".join(said))
    dist.barrier()
    if rank == victim:
        arm(path, kind, number)
    for iteration in itertools.count(done + 1):
        fill(run.state, iteration)
        if rank == victim and kind == "training" and iteration == done + 2:
            os.kill(os.getpid(), signal.SIGKILL)
        save = CheckpointSave(
            directory=Path(path),
            progress=Progress(iteration=iteration),
            provenance=RUN,
            save_retain_interval=3,
        )
        if in_background:
            pending = save.write_in_background(run.state)
            fill(run.state, -1)
            pending.finish()
        else:
            save.write(run.state)


def arm(path: str, kind: str, number: int) -> None:
    """Kill this process at that moment from now on."""
    countdown = itertools.count(number, -1)

    def count(this_kind: str) -> None:
        if this_kind == kind and next(countdown) == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple) -> None:
        # Removing a tree names its files relative to their folder.
        if event in FILE_EVENTS and (path in str(arguments[0]) or event.startswith("os.r")):
            count("file")

    write = ChecksummedFile.write

    def counted_write(self, data) -> int:
        count("write")
        return write(self, data)

    ChecksummedFile.write = counted_write
    sys.addaudithook(audit)


def require_whole(folder: Path) -> None:
    """Every byte of every file is as it was saved, and no file is missing."""
    checksums = Checksums.read(folder)
    files = {part.file for part in checksums.parts}
    assert files == {path.name for path in folder.iterdir()} - {CHECKSUMS}
    for part in checksums.parts:
        data = (folder / part.file).read_bytes()[part.offset :][: part.num_bytes]
        checksums.require(part, data)


def kill_often(tmp_path: Path, num_kills: int, seed: int) -> list[str]:
    """Kill and restart a run so often; what its loads have logged."""
    drawn, path, said, latest = random.Random(seed), tmp_path / "c", [], 0
    for number in range(num_kills):
        kind = drawn.choice(["training", "write", "file", "file"])
        moment = kind, drawn.randint(1, MOMENTS[kind])
        in_background = drawn.random() < 0.5
        victim, record = drawn.randrange(RANKS), tmp_path / f"record{number}"
        arguments = str(path), victim, *moment, str(record), in_background
        outputs = launch(
            save_until_killed, RANKS, tmp_path, *arguments, wait_for=[victim], timeout=100
        )
        place = f"kill {number} of seed {seed}: rank {victim} at {moment}"
        place += " in the background" * in_background
        assert record.exists(), f"{place}: not loaded\n{outputs}"
        # The others may fail in a collective with the victim, but it ends by SIGKILL alone.
        assert "Traceback" not in outputs[victim], f"{place}\n{outputs[victim]}"
        loaded, *lines = record.read_text().splitlines()
        assert int(loaded) == latest, place
        said += lines
        before, latest = latest, disk.latest_iteration(path) or 0
        assert latest >= before, place
        if latest:
            require_whole(disk.find_checkpoint(path))
    return said


def test_kills_at_random_moments(tmp_path, fault_seed):
    said = kill_often(tmp_path, 20, fault_seed)
    assert any("was not saved completely, and is skipped" in line for line in said)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_kills_at_random_moments(tmp_path, fault_seed):
    said = kill_often(tmp_path, 200, fault_seed)
    assert any("was not saved completely, and is skipped" in line for line in said)
    assert any("is skipped; --ckpt-step" in line for line in said), "none before the tracker moved"
