"""Disks that are full, read-only or over quota: said once, and nothing already saved is harmed."""

import contextlib
import errno
import os
import sys
from pathlib import Path

import pytest

from megatron_untied.checkpoint import (
    CheckpointConfig,
    Progress,
    Provenance,
    load_checkpoint,
    save_checkpoint,
)
from megatron_untied.training.initialize import UserError
from megatron_untied.training.reporting import Reporter
from megatron_untied.training.saving import CheckpointSaver
from tests.support.full_disks import full_after
from tests.support.optimizer_run import Split, small_run
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import train

RUN = Provenance(run_id="a")
FULL_BYTES = 50_000
"""More than a file of random states has, and less than one of tensors."""


class Fault:
    """While armed, opening a file whose path contains ``words`` to write it fails with ``code``."""

    def __init__(self):
        self.words, self.code = None, 0
        sys.addaudithook(self._see)

    @contextlib.contextmanager
    def armed(self, words: str, code: int):
        self.words, self.code = words, code
        try:
            yield
        finally:
            self.words = None

    def _see(self, event: str, arguments: tuple) -> None:
        is_file = event in ("open", "os.mkdir") and self.words is not None
        if is_file and self.words in str(arguments[0]) and arguments[1] != "r":
            raise OSError(self.code, os.strerror(self.code), str(arguments[0]))


FAULTS = {
    "full disk, tensors": (None, errno.EFBIG),
    "full disk, random states": ("random_", errno.ENOSPC),
    "full disk, index": (".metadata", errno.ENOSPC),
    "full disk, state": ("state.json", errno.ENOSPC),
    "read-only folder": (".incomplete", errno.EROFS),
    "quota, tracker": ("latest_checkpointed_iteration", errno.EDQUOT),
}


def save_and_fail(group, path, words, code, faulty_rank):
    """Iteration 1, a save of iteration 2 that fails on one rank, iteration 3."""
    run, fault = small_run(Split()), Fault()
    run.train(range(1))
    save_checkpoint(path, run.state, Progress(iteration=1), provenance=RUN)
    before = snapshot(path)
    with contextlib.ExitStack() as stack:
        if group.rank() == faulty_rank:
            stack.enter_context(
                full_after(FULL_BYTES) if words is None else fault.armed(words, code)
            )
        with pytest.raises(OSError, match=r"\(rank \d") as caught:
            save_checkpoint(path, run.state, Progress(iteration=2), provenance=RUN)
    group.barrier().wait()
    assert snapshot(path) == before
    names = sorted(os.listdir(path))
    config = CheckpointConfig(load=path)
    assert load_checkpoint(config, run.state, seed=3).iteration == 1
    save_checkpoint(path, run.state, Progress(iteration=3), provenance=RUN)
    assert load_checkpoint(config, run.state, seed=3).iteration == 3
    return str(caught.value), names


def snapshot(path: str) -> dict[str, bytes]:
    """Content of the tracker and of iteration 1."""
    folder = Path(path)
    files = [*(folder / "iter_0000001").iterdir(), folder / "latest_checkpointed_iteration.txt"]
    return {file.name: file.read_bytes() for file in files}


@pytest.mark.parametrize("name", FAULTS)
def test_a_save_that_fails_harms_nothing(tmp_path, name):
    words, code = FAULTS[name]
    # Rank 0 alone makes the folder, the index, the state and the tracker.
    faulty_rank = 1 if name in ("full disk, tensors", "full disk, random states") else 0
    answers = run_on_ranks(save_and_fail, 2, str(tmp_path), words, code, faulty_rank)
    assert len({said for said, _ in answers}) == 1
    said, names = answers[0]
    assert os.strerror(code) in said
    assert f"(rank {faulty_rank}" in said
    if words is None:  # the error of a write within torch.save, not what torch makes of it
        assert said == f"[Errno {code}] {os.strerror(code)} (rank {faulty_rank})"
    complete = ["iter_0000001", "latest_checkpointed_iteration.txt"]
    if name == "quota, tracker":  # the folder is complete, and only its name is missing
        complete.insert(1, "iter_0000002")
    assert names == complete, "nothing is left that would fill the disk"


def train_on_a_full_disk(group, path, flags):
    """The second of three saves fails; what was printed, and the error if it ended the run."""
    out, fault, saves = [], Fault(), []
    save, say = CheckpointSaver.save, Reporter.say

    def failing_save(self, progress, **options):
        saves.append(progress.iteration)
        is_full = progress.iteration == flags["fails_at"] and group.rank() == 0
        with fault.armed(".metadata", errno.ENOSPC) if is_full else contextlib.nullcontext():
            save(self, progress, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointSaver, "save", failing_save)
        patch.setattr(Reporter, "say", lambda self, line: (out.append(line), say(self, line)))
        own = {name: value for name, value in flags.items() if name != "fails_at"}
        error = ""
        try:
            train(group, save=path, save_interval=1, train_iters=3, **own)
        except UserError as failed:
            error = str(failed)
    return [line for line in out if "warning" in line or line.startswith("saved")], error, saves


def test_a_run_stops_at_a_failed_save_with_one_line(tmp_path):
    folder = tmp_path / "c"
    for _, error, saves in run_on_ranks(train_on_a_full_disk, 2, str(folder), {"fails_at": 2}):
        assert error.startswith("error: the checkpoint of iteration 2 was not saved: ")
        assert "No space left on device" in error
        assert f"the last checkpoint is {folder}/iter_0000001; --load {folder} resumes" in error
        assert saves == [1, 2]


def test_a_run_goes_on_after_a_failed_save_if_told_to(tmp_path):
    folder = tmp_path / "c"
    flags = {"fails_at": 2, "no_exit_on_failed_save": True}
    (said, error, saves), _ = run_on_ranks(train_on_a_full_disk, 2, str(folder), flags)
    assert (error, saves) == ("", [1, 2, 3])
    assert [line.partition(":")[0] for line in said] == [
        f"saved {folder}/iter_0000001", "warning", f"saved {folder}/iter_0000003"
    ]  # fmt: skip
    assert "iteration 2 was not saved: " in said[1]


def test_the_last_save_of_a_run_must_not_fail(tmp_path):
    flags = {"fails_at": 3, "no_exit_on_failed_save": True}
    for _, error, _ in run_on_ranks(train_on_a_full_disk, 2, str(tmp_path / "c"), flags):
        assert "the checkpoint of iteration 3 was not saved" in error
