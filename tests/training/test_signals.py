"""Signals are noticed while the main thread is in C++, on whichever rank they arrive."""

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

import pretrain_gpt
from megatron_untied.training.exits import SignalWatch
from megatron_untied.training.metrics import read_metrics
from tests.support.command_line import command_line
from tests.support.launch import launch


def signal_soon(number: int) -> None:
    threading.Timer(0.2, os.kill, (os.getpid(), number)).start()


def wait_in_cpp(seconds: float) -> None:
    """As a collective does: no bytecode runs, so no handler is called."""
    with pytest.raises(dist.DistError):
        dist.HashStore().wait(["never"], timedelta(seconds=seconds))


def test_a_postponed_signal_is_announced_before_the_main_thread_returns():
    announced = []
    watch = SignalWatch(dist.HashStore(), 0, advice=str, announce=announced.append)
    with watch:
        signal_soon(signal.SIGTERM)
        seen = []
        threading.Timer(2.5, lambda: seen.extend(announced)).start()
        wait_in_cpp(4)
    assert seen == ["SIGTERM received on rank 0"]
    assert watch.postponed == signal.SIGTERM


def test_rank_0_announces_the_signal_of_another_rank_once():
    store, announced = dist.HashStore(), []
    with SignalWatch(store, 0, advice=str, announce=announced.append):
        other = SignalWatch(store, 3, advice=str, announce=pytest.fail)
        other._handle(signal.SIGTERM)
        other._handle(signal.SIGHUP)
        deadline = time.monotonic() + 20
        while not announced and time.monotonic() < deadline:
            time.sleep(0.05)
    assert announced == ["SIGTERM received on rank 3"]


def stuck_and_interrupted(rank: int) -> None:
    with SignalWatch(dist.HashStore(), rank, advice=lambda: "go on so"):
        signal_soon(signal.SIGINT)
        wait_in_cpp(60)


def test_an_interrupt_ends_a_process_that_is_stuck(tmp_path):
    began = time.monotonic()
    said = launch(stuck_and_interrupted, 1, tmp_path)
    assert said == ["SIGINT received on rank 0: exiting now; go on so\n"]
    assert time.monotonic() - began < 50


def train_until_signaled(rank: int, signaled: int, number: int, folder: str, flags: dict) -> None:
    """``signaled`` gets the signal in its second step."""
    forward_step, steps = pretrain_gpt.forward_step, []

    def signaled_step(*arguments):
        steps.append(None)
        if rank == signaled and len(steps) == 3:  # two micro-batches in a step
            os.kill(os.getpid(), number)
            time.sleep(3)  # the others wait in a collective
        return forward_step(*arguments)

    pretrain_gpt.forward_step = signaled_step
    shared = {"global_batch_size": 2, "context_parallel_size": 2, "log_interval": 1}
    sys.argv = ["pretrain_gpt.py", *command_line(**shared, save=folder, **flags)]
    pretrain_gpt.main()


def test_every_rank_saves_the_iteration_in_which_one_is_terminated(tmp_path):
    flags = {"exit_signal_handler": True, "train_iters": 9}
    folder = str(tmp_path / "c")
    said = launch(train_until_signaled, 2, tmp_path, 1, signal.SIGTERM, folder, flags)
    assert f"SIGTERM received on rank 1: finishing iteration 2, then saving to {folder}" in said[0]
    assert "exiting after iteration 2: SIGTERM" in said[0]
    assert f"the last checkpoint is {folder}/iter_0000002; --load {folder} resumes" in said[0]
    assert said[1] == ""
    assert [path.name for path in (tmp_path / "c").glob("iter_*")] == ["iter_0000002"]


def train_until_terminated(rank: int, at: str, times: int, folder: str, flags: dict) -> None:
    """Rank 1 gets SIGTERM ``times`` times: in a training step ("step 1"), or in an evaluation."""
    forward_step, steps = pretrain_gpt.forward_step, []

    def signaled_step(model, *arguments):
        steps.append("evaluation" if not model.training else f"step {1 + len(steps) // 2}")
        if rank == 1 and steps[-1] == at and steps.count(at) == 1:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(3)  # the others wait in a collective
        return forward_step(model, *arguments)

    pretrain_gpt.forward_step = signaled_step
    shared = {"global_batch_size": 2, "context_parallel_size": 2, "log_interval": 1}
    flags = shared | {"exit_signal_handler": True, "train_iters": 5} | flags
    sys.argv = ["pretrain_gpt.py", *command_line(**flags, save=folder, load=folder)]
    pretrain_gpt.main()


EVALUATES = {"eval_interval": 1, "eval_iters": 1}
DROPS = {"save_on_signal_now": True}


@pytest.mark.parametrize(
    ("at", "times", "flags", "iteration"),
    [
        ("step 1", 1, {}, 1),
        ("step 2", 2, {}, 2),
        pytest.param("evaluation", 1, EVALUATES, 1, marks=pytest.mark.slow),
        pytest.param("step 1", 1, DROPS, None, marks=pytest.mark.slow),
        ("step 2", 2, DROPS, 1),
        pytest.param("evaluation", 1, EVALUATES | DROPS, 1, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_save_one_iteration_and_exit_with_0(tmp_path, at, times, flags, iteration):
    folder = tmp_path / "c"
    said = launch(train_until_terminated, 2, tmp_path, at, times, str(folder), flags)
    assert f"exiting after iteration {iteration or 0}: SIGTERM" in said[0], said[0]
    assert said[1] == ""  # launch() would print the status of a SystemExit
    saved = [f"iter_{iteration:07d}"] if iteration else []
    assert [path.name for path in folder.glob("iter_*")] == saved
    if "save_on_signal_now" in flags:
        name = "evaluation after iteration 1" if at == "evaluation" else f"iteration {at[5:]}"
        assert f"rank 1: dropping {name}, then saving what was done before to {folder}" in said[0]


HEADS = {"num_attention_heads": 5, "num_query_groups": 5, "hidden_size": 40, "kv_channels": 8}
STREAMED = {"recompute_granularity": "full", "sequence_tile_size": 16, "cp_heads_per_chunk": 2}


@pytest.mark.parametrize(
    "flags",
    [
        # One rank has no heads in the last chunk.
        pytest.param(HEADS | STREAMED | {"use_distributed_optimizer": True}, id="zero1"),
        pytest.param(
            {"use_torch_fsdp2": True, "recompute_granularity": "selective"},
            id="fsdp2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_dropped_step_leaves_no_trace(tmp_path, flags):
    """The run that continues has the losses of one that was never stopped, digit for digit."""
    flags, losses = flags | {"train_iters": 3}, {}
    for kind, at in (("whole", "never"), ("parts", "step 2"), ("parts", "never")):
        metrics = tmp_path / f"{kind}.jsonl"
        own = flags | DROPS | {"metrics_jsonl": metrics}
        said = launch(train_until_terminated, 2, tmp_path, at, 1, str(tmp_path / kind), own)
        if at != "never":
            assert "exiting after iteration 1: SIGTERM" in said[0], said[0]
        losses[kind] = [(step["iteration"], step["lm_loss"]) for step in read_metrics(metrics)]
    assert losses["parts"] == losses["whole"]
    assert len(losses["whole"]) == 3


@pytest.mark.parametrize(
    ("number", "flags"),
    [(signal.SIGINT, {"exit_signal_handler": True}), (signal.SIGTERM, {})],
    ids=["Ctrl-C", "SIGTERM without the flag"],
)
def test_otherwise_a_signal_ends_the_run_in_one_line(tmp_path, number, flags):
    folder = str(tmp_path / "c")
    flags |= {"train_iters": 9, "save_interval": 1}
    said = launch(
        train_until_signaled, 2, tmp_path, 1, number, folder, flags, wait_for=[1], timeout=60
    )
    line = f"{number.name} received on rank 1: exiting now; the last checkpoint is {folder}/"
    assert said[1].splitlines() == [
        f"{line}iter_0000001; --load {folder} resumes",
        str(128 + number),
    ]
