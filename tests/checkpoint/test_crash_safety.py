"""Stop a save at each of its steps on the file system: what loads is always a whole checkpoint.

An audit hook sees every open, rename, mkdir and removal below the checkpoint directory; from the
k-th on it raises, which ends the save as a killed process would.
"""

import contextlib
import os
import sys

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_untied.checkpoint import (
    CheckpointConfig,
    Progress,
    load_checkpoint,
    save_checkpoint,
)
from tests.support.optimizer_run import Split, small_run
from tests.support.ranks import RankFailure, run_on_ranks
from tests.support.whole_model import gather_state

REMOVALS = {"os.rmdir", "os.remove"}
EVENTS = {"open", "os.rename", "os.mkdir"} | REMOVALS


class Crash(BaseException):
    """Nothing may catch it and go on."""


class CrashPoint:
    """Fails from the k-th step below ``directory`` on, while armed."""

    def __init__(self, directory):
        self.directory, self.remaining = directory, None
        sys.addaudithook(self._see)

    def arm(self, step):
        self.remaining = step

    def disarm(self):
        """Whether the step was reached."""
        reached, self.remaining = self.remaining <= 0, None
        return reached

    def _see(self, event, arguments):
        if self.remaining is None or event not in EVENTS:
            return
        # Removing a tree names its files relative to their folder.
        is_ours = str(arguments[0]).startswith(self.directory) or event in REMOVALS
        self.remaining -= is_ours
        if is_ours and self.remaining <= 0:
            raise Crash


def save(run, path, iteration, **options):
    save_checkpoint(path, run.state, Progress(iteration=iteration), **options)


def crash_everywhere(group, path, iteration, retain):
    """Stop at every step of saving another state; the names in the directory after each."""
    old, new, restarted = (small_run(Split()) for _ in range(3))
    old.train(range(1))
    new.train(range(4))
    states, names = {False: gather_state(old.state), True: gather_state(new.state)}, []
    crash, step, reached, is_new = CrashPoint(path), 0, True, True
    while reached:
        if is_new:  # else what the last crash has left stays in the way
            save(old, path, 2)
        crash.arm(step := step + 1)
        with contextlib.suppress(Crash, CheckpointException):  # DCP wraps what it is stopped by
            save(new, path, iteration, save_retain_interval=retain)
        reached = crash.disarm()
        names.append(sorted(os.listdir(path)))
        progress = load_checkpoint(CheckpointConfig(load=path), restarted.state, seed=3)
        found, key = gather_state(restarted.state), "model.output_layer.weight"
        is_new = torch.equal(found[key], states[True][key])
        assert all(torch.equal(found[name], states[is_new][name]) for name in found)
        assert progress.iteration == (iteration if is_new else 2)
    assert is_new
    return names


@pytest.mark.parametrize("iteration", [4, 2], ids=["the-next", "the-same-again"])
def test_a_crash_at_any_step_leaves_a_whole_checkpoint(tmp_path, iteration):
    (names,) = run_on_ranks(crash_everywhere, 1, str(tmp_path), iteration, 10)
    assert len(names) > 12  # folder, random states, tensors, index, two JSON files, tracker...
    assert any(name.endswith(".incomplete") for at_step in names for name in at_step)
    assert names[-1] == [f"iter_000000{iteration}", "latest_checkpointed_iteration.txt"]


def save_twice(group, path, dying_rank):
    run = small_run(Split(context=2))
    run.train(range(1))
    save(run, path, 1)
    if group.rank() == dying_rank:
        sys.addaudithook(die_while_writing_tensors)
    save(run, path, 2)


def die_while_writing_tensors(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".distcp"):
        os._exit(1)


def loaded_iteration(group, path):
    run = small_run(Split(context=2))
    return load_checkpoint(CheckpointConfig(load=path), run.state, seed=3).iteration


@pytest.mark.parametrize("dying_rank", [0, 1])
def test_a_rank_that_dies_leaves_the_checkpoint_before(tmp_path, dying_rank):
    with pytest.raises(RankFailure, match=f"rank {dying_rank} died"):
        run_on_ranks(save_twice, 2, str(tmp_path), dying_rank)
    assert run_on_ranks(loaded_iteration, 2, str(tmp_path)) == [1, 1]
