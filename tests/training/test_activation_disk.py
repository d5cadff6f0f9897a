"""Runs whose saved activations go to disks: the same losses, and no training on wrong bytes."""

import contextlib
import errno
import io
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

import pretrain_gpt
from megatron_untied.phases import Phase
from megatron_untied.planner.machine import HOST_RESERVE_GIB, this_machine
from megatron_untied.planner.plan import Plan
from megatron_untied.step_progress import StepProgress
from megatron_untied.streaming.disk import ActivationDisk
from megatron_untied.training import exits
from megatron_untied.training.initialize import UserError, initialize
from megatron_untied.training.metrics import read_metrics
from megatron_untied.training.state import build_train_state
from megatron_untied.training.step import train_step
from tests.support.command_line import command_line, tiny_config
from tests.support.full_disks import mounted
from tests.support.late_device import late_device
from tests.support.late_threads import LateThreads
from tests.support.launch import launch
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import batch_of, launch_of, train

LAYERS = 4
RUN = {
    "num_layers": LAYERS,
    "train_iters": 2,
    "context_parallel_size": 2,
    "cp_heads_per_chunk": 2,
    "sequence_tile_size": 7,
    "loss_chunk_size": 13,
    "recompute_granularity": "selective",
    "cpu_offloading_num_layers": LAYERS,
}
KINDS = {
    "selective": {},
    "parked": {"park_during_attention": True},
    "full": {"recompute_granularity": "full"},
    "parked groups": {
        "recompute_method": "uniform", "recompute_num_layers": 3, "park_during_attention": True
    },
    "groups of which one recomputes attention": {
        "recompute_method": "uniform", "recompute_num_layers": 2, "attention_output_layers": 3
    },
}  # fmt: skip
PART_GIB = 2.5e-5
"""Room for some of the layers."""
SMALL_HOST_GIB = 165_000 / 2**30
"""Per rank: all layers take 193 kB, and 144 with everything on disks that goes there."""


def train_on_disks(group, metrics, seed, flags):
    """Bytes that went to the disks; requests are done late, in an order of ``seed``, if given."""
    opened, disks = ActivationDisk.open, []

    def open_late(self, *args):
        self._threads = self._threads if seed is None else LateThreads(seed)
        disks.append(self)
        return opened(self, *args)

    with mock.patch.object(ActivationDisk, "open", open_late):
        train(group, metrics, **RUN | flags)
    return (disks[0].reserved_bytes, disks[0].read_bytes) if disks else (0, 0)


def curve(folder: Path, seed: int | None, flags: dict) -> tuple[list, list]:
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    used = run_on_ranks(train_on_disks, 2, metrics, seed, flags)
    return [(step["lm_loss"], step["grad_norm"]) for step in read_metrics(metrics)], used


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "parked")) for kind in KINDS],
)
def test_losses_are_those_without_disks_bit_for_bit(tmp_path, kind):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    both = {"activation_disk": ",".join(map(str, folders)), **KINDS[kind]}
    plain, _ = curve(tmp_path, None, KINDS[kind])
    everything, all_used = curve(tmp_path, None, both)
    part, part_used = curve(tmp_path, 0, both | {"activation_disk_gib": PART_GIB})
    late, _ = curve(tmp_path, 1, both | {"no_activation_disk_checksums": True})
    assert plain == everything == part == late
    assert min(read for _, read in all_used) > 0
    if kind in ("selective", "parked", "parked groups"):  # others save so little that it has room
        assert 0 < max(read for _, read in part_used) < min(read for _, read in all_used)
    assert max(kept for kept, _ in part_used) <= PART_GIB * 2**30
    assert [list(folder.iterdir()) for folder in folders] == [[], []]


def train_on_a_small_host(group, metrics, folder, host_gib):
    def small(*args):
        return replace(this_machine(*args), host_memory_gib=host_gib)

    with (
        mock.patch("megatron_untied.training.setup.this_machine", small),
        contextlib.redirect_stdout(io.StringIO()) as said,
    ):
        flags = KINDS["parked"] | {"activation_disk": folder, "activation_disk_gib": "auto"}
        used = train_on_disks(group, metrics, None, flags)
    return used, said.getvalue()


def test_a_run_takes_from_disks_what_the_host_does_not_hold(tmp_path):
    plain, _ = curve(tmp_path, None, KINDS["parked"])
    metrics = tmp_path / "auto.jsonl"
    host_gib = 2 * (HOST_RESERVE_GIB + SMALL_HOST_GIB)
    results = run_on_ranks(train_on_a_small_host, 2, metrics, tmp_path, host_gib)
    assert plain == [(step["lm_loss"], step["grad_norm"]) for step in read_metrics(metrics)]
    assert all(reserved > 0 and read > 0 for (reserved, read), _ in results)
    assert "saved activations on disk:" in results[0][1]
    assert "TB a day" in results[0][1]


def planned_and_used(group, flags):
    config = tiny_config(group.size(), **RUN | flags)
    groups = initialize(config, launch_of(group))
    state = build_train_state(pretrain_gpt.model_provider, config, groups, StepProgress())
    batches = [batch_of(groups, seed=number) for number in range(2)]
    forward_step = pretrain_gpt.forward_step
    train_step(state, batches, num_samples=8, forward_step=forward_step)
    plan, store = Plan(config, this_machine(groups)), state.model.module.store
    found = store.arena.reserved_bytes, state.disk.reserved_bytes
    return found, (plan._arenas[0].reserved_bytes, plan.activation_disk.rank_bytes), [
        (state.disk.written_bytes, plan.activation_disk.written_bytes),
        (state.disk.read_bytes, plan.activation_disk.read_bytes),
    ]  # fmt: skip


@pytest.mark.parametrize("part", [None, PART_GIB])
@pytest.mark.parametrize("kind", KINDS)
def test_host_and_disk_take_what_is_planned(tmp_path, kind, part):
    flags = KINDS[kind] | {"activation_disk": tmp_path, "activation_disk_gib": part}
    flags |= {"global_batch_size": 8, "micro_batch_size": 4}
    for used, planned, moved in run_on_ranks(planned_and_used, 2, flags):
        assert used == planned
        assert all(found == expected for found, expected in moved)


REQUESTS_OF_A_STEP = 80
"""Four micro-batches write and read two layers: an input and four chunks of heads each."""


def waits_of_a_step(group, folder, late_read):
    """Of a step on a device that ends nothing before it is waited for; copies take a second."""
    flags = RUN | {"park_during_attention": True, "activation_disk": folder}
    config, read, reads = tiny_config(group.size(), **flags), os.preadv, []
    with late_device() as device:
        groups = initialize(config, launch_of(group))
        state = build_train_state(pretrain_gpt.model_provider, config, groups, StepProgress())

        def late(*arguments):
            reads.append(state.progress.current_phase)
            if len(reads) == late_read:
                device.engines[0].streams.clock += 1000
            return read(*arguments)

        with mock.patch.object(os, "preadv", late):
            forward_step = pretrain_gpt.forward_step
            train_step(state, [batch_of(groups, seed=0)], num_samples=4, forward_step=forward_step)
        return state.waits.take(), reads[-1:]


def test_a_late_read_is_charged_to_the_phase_that_waited_for_it(tmp_path):
    usual = run_on_ranks(waits_of_a_step, 2, str(tmp_path), None)
    for (plain, read_in), (late, _) in zip(
        usual, run_on_ranks(waits_of_a_step, 2, str(tmp_path), 1), strict=True
    ):
        assert read_in == [Phase.MLP_BACKWARD]  # it was started in the layer after
        assert {wait.source for wait in plain} == {"host", "disk"}
        assert {wait.phase for wait in plain} >= {Phase.ATTENTION_FORWARD, Phase.QKV_BACKWARD}
        longer = {wait: late[wait] - plain[wait] for wait in late if late[wait] != plain[wait]}
        assert longer == {("disk", Phase.MLP_BACKWARD): 1000.0}


MICRO_BATCHES = 4


def error_and_calls(group, flags):
    """Of a run that fails: its line, and how many micro-batches began."""
    calls, forward_step = [], pretrain_gpt.forward_step

    def counted(*arguments):
        calls.append(1)
        return forward_step(*arguments)

    with (
        mock.patch.object(pretrain_gpt, "forward_step", counted),
        mock.patch.object(exits, "LISTEN_SECONDS", 0.05),
    ):
        try:
            train(group, **RUN | flags)
        except UserError as error:
            return str(error), len(calls)


def fail_in_step_two(group, folder, what, after):
    """:func:`error_and_calls` of a run whose disk fails on rank 1 after so many requests."""
    calls = []

    def failing(call, writes: bool):
        def request(descriptor, parts, offset):
            calls.append(offset)
            fails = group.rank() == 1 and len(calls) > after and writes == (what == "write")
            if fails and what == "short":
                return 0
            if fails and what != "bit":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            count = call(descriptor, parts, offset)
            if fails:
                parts[0][0] ^= 1
            return count

        return request

    with (
        mock.patch.object(os, "pwritev", failing(os.pwritev, True)),
        mock.patch.object(os, "preadv", failing(os.preadv, False)),
    ):
        saves = {"save": f"{folder}/saved", "save_interval": 1}
        return error_and_calls(group, {"activation_disk": folder, **saves})


@pytest.mark.parametrize("what", ["write", "read", "bit", "short"])
def test_a_failing_disk_ends_the_run_where_it_is(tmp_path, what):
    """In the first micro-batch of the second step."""
    answers = run_on_ranks(fail_in_step_two, 2, str(tmp_path), what, REQUESTS_OF_A_STEP + 3)
    assert one_line(answers, tmp_path).count("(rank 1 on ") == 1
    said = {"write": "failed to write", "read": "failed to read", "bit": "crc32 differs"}
    assert said.get(what, "the file ends after 0 of") in answers[0][0]
    tracker = tmp_path / "saved/latest_checkpointed_iteration.txt"
    assert tracker.read_text().strip() == "1"


def one_line(answers: list[tuple[str, int]], folder: Path, steps_before: int = 1) -> str:
    """The line that all ranks end with, in the first or second micro-batch of a step."""
    lines, calls = zip(*answers, strict=True)
    assert len(set(lines)) == 1
    assert lines[0].startswith(f"error: --activation-disk {folder}")
    assert "\n" not in lines[0]
    assert all(0 < each - steps_before * MICRO_BATCHES <= 2 for each in calls)
    return lines[0]


def fill(group, folder, limit):
    """:func:`error_and_calls` on a disk of so many bytes; None: on that of the folder."""
    if limit is None:
        return error_and_calls(group, {"activation_disk": folder})
    write = os.pwritev

    def limited(descriptor, parts, offset):
        if offset + len(parts[0]) > limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, parts, offset)

    refused = mock.patch.object(os, "posix_fallocate", side_effect=OSError(errno.EOPNOTSUPP, ""))
    with refused, mock.patch.object(os, "pwritev", limited):
        return error_and_calls(group, {"activation_disk": folder})


@pytest.mark.parametrize("kind", ["tmpfs", "ext2", "double"])
def test_a_disk_that_fills_up_ends_the_run(tmp_path, kind):
    """At its start if space can be reserved, else at the write for which there is none."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = {"tmpfs": 1 << 16, "ext2": 1 << 16, "double": 1 << 14}[kind]
    with contextlib.nullcontext() if kind == "double" else mounted(kind, folder, size):
        answers = run_on_ranks(fill, 2, str(folder), size if kind == "double" else None)
    if kind == "tmpfs":
        assert all("has no room for" in said and calls == 0 for said, calls in answers)
    said = answers[0][0] if kind == "tmpfs" else one_line(answers, folder, steps_before=0)
    assert "No space left on device" in said


def start(group, flags, full_rank):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if group.rank() == full_rank else None
    with mock.patch.object(os, "posix_fallocate", side_effect=error):
        try:
            train(group, **RUN | flags)
        except UserError as error:
            return str(error)


def test_a_disk_without_room_ends_the_start(tmp_path):
    answers = run_on_ranks(start, 2, {"activation_disk": tmp_path}, 1)
    assert len(set(answers)) == 1
    assert f"error: --activation-disk {tmp_path} has no room for" in answers[0]
    assert "No space left on device (rank 1 on " in answers[0]


def test_a_folder_that_is_not_there_ends_the_start(tmp_path):
    answers = run_on_ranks(start, 2, {"activation_disk": f"{tmp_path},{tmp_path}/x"}, None)
    missing = f"error: --activation-disk {tmp_path}/x is not a folder on this node"
    assert all(answer.startswith(missing) for answer in answers)


KILLED = RUN | {"train_iters": 4, "save_interval": 2}


def run_and_die(rank: int, folder: Path, dies: bool) -> None:
    read, reads = ActivationDisk.read, []

    def dying(self, *args):
        reads.extend([1] if self._files else [])  # not those that a plan counts
        if dies and rank == 1 and len(reads) == 90:  # in a backward of the third step
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, *args)

    ActivationDisk.read = dying
    flags = KILLED | {"activation_disk": folder / "disk", "metrics_jsonl": folder / "metrics.jsonl"}
    flags |= {"save": folder / "saved"} | ({} if dies else {"load": folder / "saved"})
    sys.argv = ["pretrain_gpt.py", *command_line(**flags)]
    pretrain_gpt.main()


def test_after_a_kill_nothing_is_left_and_the_run_goes_on(tmp_path):
    (tmp_path / "disk").mkdir()
    launch(run_and_die, 2, tmp_path, tmp_path, True, wait_for=[1], timeout=400)
    assert list((tmp_path / "disk").iterdir()) == []
    tracker = tmp_path / "saved/latest_checkpointed_iteration.txt"
    assert tracker.read_text().strip() == "2"
    launch(run_and_die, 2, tmp_path, tmp_path, False, timeout=400)
    assert list((tmp_path / "disk").iterdir()) == []
    resumed = read_metrics(tmp_path / "metrics.jsonl")[-2:]
    (tmp_path / "other").mkdir()
    whole = uninterrupted(tmp_path / "other")[-2:]
    assert [step["iteration"] for step in resumed] == [3, 4]
    assert [step["lm_loss"] for step in resumed] == [step["lm_loss"] for step in whole]


def uninterrupted(folder: Path) -> list[dict]:
    run_on_ranks(train, 2, folder / "metrics.jsonl", get_batch=pretrain_gpt.get_batch,
                 **KILLED | {"save_interval": None})  # fmt: skip
    return read_metrics(folder / "metrics.jsonl")
