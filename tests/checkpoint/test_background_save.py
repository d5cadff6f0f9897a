"""A save in the background has the bytes of a synchronous one, whatever training does meanwhile."""

import contextlib
import errno
import os
import threading
from pathlib import Path

import pytest

from megatron_untied.checkpoint import CheckpointConfig, Progress, Provenance, load_checkpoint
from megatron_untied.checkpoint.global_tensor import StagingWriter
from megatron_untied.checkpoint.save import CheckpointSave
from megatron_untied.phases import MemoryCategory
from megatron_untied.planner.machine import this_machine
from megatron_untied.planner.plan import Plan
from megatron_untied.training.initialize import UserError
from megatron_untied.training.metrics import read_metrics
from megatron_untied.training.reporting import Reporter
from tests.faults.test_failing_disks import FULL_BYTES, Fault, full_after
from tests.support.command_line import tiny_config
from tests.support.optimizer_run import Split, small_run
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import train, train_state_on

RUN = Provenance(run_id="a")


def save_to(path: str, iteration: int) -> CheckpointSave:
    return CheckpointSave(
        directory=Path(path), progress=Progress(iteration=iteration), provenance=RUN
    )


@contextlib.contextmanager
def held_back(monkeypatch):
    """Threads that write wait until the yielded event is set."""
    go_on, write = threading.Event(), StagingWriter.write

    def wait_and_write(self):
        assert go_on.wait(60)
        write(self)

    monkeypatch.setattr(StagingWriter, "write", wait_and_write)
    yield go_on


def save_both_ways(group, path, split):
    run = small_run(split)
    run.train(range(2))
    save_to(f"{path}/synchronous", 2).write(run.state)
    with pytest.MonkeyPatch.context() as patch, held_back(patch) as go_on:
        pending = save_to(f"{path}/background", 2).write_in_background(run.state)
        run.train(range(2, 5))
        assert not pending.has_ended()
        assert not (Path(path) / "background/latest_checkpointed_iteration.txt").exists()
        go_on.set()
        folder = pending.finish()
    run.train(range(5, 6))
    other = small_run(split, seed=3)
    assert load_checkpoint(CheckpointConfig(load=f"{path}/background"), other.state, seed=3) == (
        Progress(iteration=2)
    )
    return folder.name


@pytest.mark.parametrize(
    "split",
    [Split(), Split(tensor=2, bf16=True), Split(distributed_optimizer=False)],
    ids=["data-parallel", "tensor-parallel", "replicated"],
)
def test_every_file_equals_that_of_a_synchronous_save(tmp_path, split):
    assert run_on_ranks(save_both_ways, 2, str(tmp_path), split) == ["iter_0000002"] * 2
    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / kind / "iter_0000002").iterdir()}
        for kind in ("synchronous", "background")
    )
    assert first.keys() == second.keys()
    # The index names the attempt to save, and so has another checksum.
    different = {name for name in first if first[name] != second[name]}
    assert different <= {".metadata", "checksums.txt"}


def fail_in_background(group, path, faulty_rank, failing):
    run, fault = small_run(Split()), Fault()
    save_to(path, 1).write(run.state)
    is_faulty = group.rank() == faulty_rank
    with contextlib.ExitStack() as stack:
        if is_faulty and failing == "tensors":
            stack.enter_context(full_after(FULL_BYTES))
        elif is_faulty:
            stack.enter_context(fault.armed(failing, errno.ENOSPC))
        pending = save_to(path, 2).write_in_background(run.state)
        while not pending.has_ended():
            pass
        with pytest.raises(OSError, match=rf"\(rank {faulty_rank} on") as caught:
            pending.finish()
    group.barrier().wait()
    names = sorted(os.listdir(path))
    group.barrier().wait()  # the next save begins after both have listed
    save_to(path, 3).write_in_background(run.state).finish()
    return str(caught.value), names


@pytest.mark.parametrize(
    ("faulty_rank", "failing", "text"),
    [
        (1, "tensors", "File too large"),
        (0, ".metadata", "No space left on device"),
        (0, "state.json", "No space left on device"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(tmp_path, faulty_rank, failing, text):
    first, second = run_on_ranks(fail_in_background, 2, str(tmp_path), faulty_rank, failing)
    assert first == second
    assert text in first[0]
    assert first[1] == ["iter_0000001", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "iter_0000003").is_dir()


def staged_bytes(pending) -> int:
    """Bytes of the copies that are not written yet."""
    return sum(copy.nbytes for copy in pending._staged.writer._staged.values())


def staged_and_planned(group, path, flags) -> tuple[int, int]:
    flags |= {"async_save": True, "save": path}
    state = train_state_on(group, **flags)
    with pytest.MonkeyPatch.context() as patch, held_back(patch) as go_on:
        pending = save_to(path, 1).write_in_background(state.checkpoint_state)
        staged = staged_bytes(pending)
        go_on.set()
        pending.finish()
        assert staged_bytes(pending) == 0
    plan = Plan(tiny_config(group.size(), **flags), this_machine(state.groups))
    return staged, plan.host[MemoryCategory.CHECKPOINT]


@pytest.mark.parametrize(
    "flags",
    [
        {"use_distributed_optimizer": True, "bf16": True},
        {"use_torch_fsdp2": True},
        {"context_parallel_size": 2, "use_distributed_optimizer": True},
        {"tensor_model_parallel_size": 2},
    ],
    ids=["zero1", "fsdp2", "context", "tensor"],
)
def test_the_planner_counts_the_copy_on_the_host(tmp_path, flags):
    for staged, planned in run_on_ranks(staged_and_planned, 2, str(tmp_path), flags):
        # DCP evens out what several ranks hold by whole slices.
        assert 0.8 * planned <= staged <= 1.2 * planned


FLAGS = {"context_parallel_size": 2, "global_batch_size": 2, "log_interval": 1}


def said_while_training(group, path, metrics, fails_at, flags):
    """What rank 0 prints about checkpoints, and the error that ends the run."""
    out, say, fault, begun = [], Reporter.say, Fault(), []
    write = StagingWriter.write

    def faulty_write(self):
        begun.append(None)
        is_faulty = len(begun) == fails_at and group.rank() == 1
        with fault.armed(".distcp", errno.ENOSPC) if is_faulty else contextlib.nullcontext():
            write(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagingWriter, "write", faulty_write)
        patch.setattr(Reporter, "say", lambda self, line: (out.append(line), say(self, line)))
        error = ""
        try:
            train(group, metrics, save=path, save_interval=1, train_iters=4, **FLAGS, **flags)
        except UserError as failed:
            error = str(failed)
    return [line for line in out if line.startswith(("saved", "warning"))], error


@pytest.mark.parametrize("sharding", ["use_distributed_optimizer", "use_torch_fsdp2"])
def test_a_run_saves_what_it_saves_synchronously(tmp_path, sharding):
    metrics = [tmp_path / "synchronous.jsonl", tmp_path / "background.jsonl"]
    folder, flags = str(tmp_path / "c"), {sharding: True, "async_save": True}
    (said, error), _ = run_on_ranks(said_while_training, 2, folder, metrics[1], None, flags)
    assert error == ""
    assert said == [f"saved {folder}/iter_{iteration:07d}" for iteration in (1, 2, 3, 4)]
    run_on_ranks(
        train, 2, metrics[0], train_iters=4, save=tmp_path / "s", **FLAGS, **{sharding: True}
    )
    losses = [[step["lm_loss"] for step in read_metrics(path)] for path in metrics]
    assert losses[0] == losses[1]
    for file in (tmp_path / "s/iter_0000004").glob("*.distcp"):
        assert file.read_bytes() == (tmp_path / "c/iter_0000004" / file.name).read_bytes()


def test_a_run_goes_on_after_an_error_in_the_background_if_told_to(tmp_path):
    folder, flags = str(tmp_path / "c"), {"async_save": True, "no_exit_on_failed_save": True}
    (said, error), _ = run_on_ranks(said_while_training, 2, folder, None, 2, flags)
    assert error == ""
    assert len(said) == 4
    assert said[1].startswith("warning: the checkpoint of iteration 2 was not saved: ")
    assert "(rank 1" in said[1]
    assert [line for line in said if line.startswith("saved")] == [
        f"saved {folder}/iter_{iteration:07d}" for iteration in (1, 3, 4)
    ]


def test_a_run_stops_after_an_error_in_the_background(tmp_path):
    answers = run_on_ranks(
        said_while_training, 2, str(tmp_path / "c"), None, 2, {"async_save": True}
    )
    for _, error in answers:
        assert error.startswith("error: the checkpoint of iteration 2 was not saved: ")
