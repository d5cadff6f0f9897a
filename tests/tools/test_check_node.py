import dataclasses
import re

import pytest

from megatron_untied.commands import check_node
from megatron_untied.commands.check_node import (
    DEVICE_RESERVE_GIB,
    GIB,
    HOST_RESERVE_GIB,
    NO_LIMIT,
    Node,
    needs_of,
    pinned_limit_bytes,
    plan_for,
    shortfalls,
)
from megatron_untied.platform.device import host_memory_bytes

NEEDED = Node(
    gpus=8,
    gpu_memory_gib=61.2,
    host_memory_gib=1830,
    pinned_gib=222,
    shared_memory_gib=6,
    activation_disk_gib=480,
)
H100_NODE = Node(
    gpus=8,
    gpu_memory_gib=79.6,
    host_memory_gib=1990.2,
    pinned_gib=NO_LIMIT,
    shared_memory_gib=1000,
    activation_disk_gib=4000,
)


def test_a_node_with_enough_of_everything_passes():
    assert list(shortfalls(NEEDED, H100_NODE)) == []
    assert list(shortfalls(NEEDED, NEEDED)) == []
    assert list(shortfalls(Node(), Node())) == []


def test_each_shortfall_has_both_numbers_and_what_to_do():
    small = Node(gpus=4, gpu_memory_gib=39.4, host_memory_gib=1007.5, shared_memory_gib=0.0625)
    lines = list(shortfalls(NEEDED, small))
    assert len(lines) == len(NEEDED.__slots__)
    for line, pattern in zip(
        lines,
        [
            "has 4 GPUs, and 8 are needed; set GPUS_PER_NODE",
            "has 39.4 GiB per GPU, and 61.2 are needed; --park-during-attention",
            "has 1,007.5 GiB of host memory, and 1,830 .* --recompute-granularity full",
            "warning: .* 0 GiB of pinned memory per process, and 222 .* ulimit -l unlimited",
            "has 0.1 GiB in /dev/shm, and 6 .* --ipc=host",
            "has 0 GiB for --activation-disk, and 480 are needed; give folders that exist",
        ],
        strict=True,
    ):
        assert re.search(pattern, line), line


def test_memory_of_gpus_that_are_not_there_is_no_shortfall_of_its_own():
    assert len(list(shortfalls(Node(gpus=8, gpu_memory_gib=61), Node()))) == 1


FLAGS = (
    "--model llama3-8b --seq-length 1048576 --context-parallel-size 8 --cp-heads-per-chunk 8 "
    "--bf16 --use-torch-fsdp2 --recompute-granularity selective --cpu-offloading-num-layers 32 "
    "--loss-chunk-size 8192 --micro-batch-size 1 --train-iters 1 --lr 1 "
    "--tokenizer-type NullTokenizer --mock-data"
).split()


def test_a_run_of_several_lengths_needs_what_its_largest_stage_does():
    staged = [word for word in FLAGS if word not in ("--seq-length", "1048576")]
    staged += ["--seq-length-schedule", "0:8192,1:1048576", "--train-iters", "2"]
    expected = needs_of(plan_for(FLAGS), on_cpus=False)
    assert needs_of(plan_for(staged), on_cpus=False) == expected


def test_what_is_needed_is_the_plan_and_its_reserves():
    plan = plan_for(FLAGS)
    needed = needs_of(plan, on_cpus=False)
    peak, host = plan.peak.num_bytes / GIB, plan.host.total() / GIB
    # Inputs and attention outputs of 32 layers, 1 GiB each, and log-sum-exps of 1/64 of that.
    assert 64 < needed.pinned_gib < 65
    assert needed.gpus == 8
    assert needed.gpu_memory_gib == peak + DEVICE_RESERVE_GIB
    assert needed.host_memory_gib == 8 * (host + HOST_RESERVE_GIB)
    assert 1 < needed.shared_memory_gib < 3
    on_cpus = needs_of(plan, on_cpus=True)
    assert on_cpus.host_memory_gib == pytest.approx(needed.host_memory_gib + 8 * peak)
    assert (on_cpus.gpus, on_cpus.gpu_memory_gib, on_cpus.pinned_gib) == (0, 0, 0)


def test_the_tool_compares_this_machine(capsys, monkeypatch):
    monkeypatch.setattr(check_node, "this_node", lambda: H100_NODE)
    assert check_node.main(FLAGS) == 0
    said = capsys.readouterr()
    assert re.search(r"host memory +needed +53\d\S* +here +1,990.2\n", said.out)
    assert said.err == ""
    small = dataclasses.replace(H100_NODE, host_memory_gib=251.6)
    monkeypatch.setattr(check_node, "this_node", lambda: small)
    assert check_node.main(FLAGS) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: this node has 251.6 GiB of host memory, and 53.*\n", error)


def test_a_limit_on_locked_memory_does_not_keep_a_run_from_starting(capsys, monkeypatch):
    """Of a container or a user that cannot raise it; CUDA's driver does not ask it."""
    rented = dataclasses.replace(H100_NODE, pinned_gib=0.0625)
    monkeypatch.setattr(check_node, "this_node", lambda: rented)
    assert check_node.main(FLAGS) == 0
    warning = capsys.readouterr().err
    assert re.fullmatch(r"warning: this node has 0.1 GiB of pinned .*memlock=-1\n", warning)


def test_disks_for_activations_need_folders_with_room(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(check_node, "this_node", lambda: H100_NODE)
    small = ["--activation-disk", f"{tmp_path}", "--activation-disk-gib", "2"]
    folders = f"{tmp_path},{tmp_path}/missing"
    large = ["--activation-disk", folders, "--activation-disk-gib", "all"]
    assert check_node.main([*FLAGS, *small]) == 0
    assert re.search(r"GiB for --activation-disk +needed +16 +here", capsys.readouterr().out)
    assert check_node.main([*FLAGS, *large]) == 1
    assert re.search(
        r"has 0 GiB for --activation-disk, and 480 are needed; give folders that exist on larger",
        capsys.readouterr().err,
    )


def test_ranks_that_gloo_joins_need_no_gpus(capsys, monkeypatch):
    laptop = Node(host_memory_gib=30, pinned_gib=0.01, shared_memory_gib=15)
    monkeypatch.setattr(check_node, "this_node", lambda: laptop)
    assert check_node.main([*FLAGS, "--distributed-backend", "gloo"]) == 1
    said = capsys.readouterr()
    assert re.search(r"^GPUs +needed +0 ", said.out)
    assert re.fullmatch(r"error: this node has 30 GiB of host memory, and 7.*\n", said.err)


def test_settings_left_to_the_planner_are_planned(capsys, monkeypatch):
    monkeypatch.setattr(check_node, "this_node", lambda: H100_NODE)
    assert check_node.main([*FLAGS, "--recompute-granularity", "auto"]) == 0


def test_flags_that_cannot_be_are_one_message(capsys):
    assert check_node.main([*FLAGS, "--gpus-per-node", "6"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: 6 ranks are not a multiple of tensor parallel"
    )


def test_this_machine_can_be_measured():
    node = check_node.this_node()
    assert node.host_memory_gib > 0
    assert node.shared_memory_gib > 0


@pytest.fixture
def machine(tmp_path):
    """A machine's files under ``tmp_path``, as a function of a path and its text."""

    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("proc/meminfo", "MemTotal: 2000 kB\nMemAvailable: 1000 kB\n")
    write("proc/self/cgroup", "3:cpu:/other\n0::/job/step\n")
    return write


def test_host_memory_without_limits_is_what_the_machine_has(machine, tmp_path):
    assert host_memory_bytes(tmp_path) == 1000 * 1024
    machine("sys/fs/cgroup/job/memory.max", "max\n")
    assert host_memory_bytes(tmp_path) == 1000 * 1024


@pytest.mark.parametrize("group", ["", "job/", "job/step/"])
def test_host_memory_is_what_the_tightest_limit_leaves(machine, tmp_path, group):
    machine(f"sys/fs/cgroup/{group}memory.max", "9000\n")
    machine(f"sys/fs/cgroup/{group}memory.current", "3000\n")
    machine(f"sys/fs/cgroup/{group}memory.stat", "active_file 7\ninactive_file 500\n")
    assert host_memory_bytes(tmp_path) == 9000 - 3000 + 500


def test_the_capability_to_lock_memory_has_no_limit(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(check_node.resource, "getrlimit", lambda _: (8192, 8192))
    machine("proc/self/status", "Name:\tpython\nCapEff:\t0000000000000000\n")
    assert pinned_limit_bytes(tmp_path) == 8192
    machine("proc/self/status", f"CapEff:\t{1 << check_node.CAP_IPC_LOCK:016x}\n")
    assert pinned_limit_bytes(tmp_path) == NO_LIMIT
