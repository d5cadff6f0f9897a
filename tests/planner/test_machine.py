"""Machines that are planned for: listed GPUs, any other GPU by flags, and the local one."""

from dataclasses import replace

import pytest

from megatron_untied.cli.planner_flags import machine_of, planner_parser
from megatron_untied.planner import machine as machine_module
from megatron_untied.planner.machine import read_gpus
from megatron_untied.planner.plan import Plan
from megatron_untied.planner.report import as_json, headline
from megatron_untied.platform import device
from megatron_untied.platform.device import GIB
from tests.support.planning import run_config
from tests.support.ranks import run_on_ranks

MINE = (
    "--gpu rtx-6000 --gpu-memory-gib 96 --gpu-tflops 503 --gpu-bandwidth-gb-per-second 1792 "
    "--gpu-host-link-gb-per-second 50 --host-memory-gib 512"
)
UNLISTED = device.GpuProperties(
    name="NVIDIA RTX A1000",
    memory_bytes=8 * GIB,
    capability=(8, 6),
    cycles_per_second=16 * 1.46e9,
    memory_bytes_per_second=192e9,
)


def machine_by(flags: str):
    return machine_of(planner_parser().parse_args(flags.split()))


def test_a_described_gpu_is_planned_for_as_described():
    machine = machine_by(MINE)
    gpu = machine.gpu
    assert (gpu.title, machine.gpu_memory_gib, machine.host_memory_gib) == ("rtx-6000", 96, 512)
    assert (gpu.bf16_tflops, gpu.memory_gb_per_second, gpu.pcie_gb_per_second) == (503, 1792, 50)
    assert gpu.nvlink_gb_per_second == 50
    assert "as to the host" in gpu.assumed
    plan = Plan(run_config("--model llama3-8b --bf16 --seq-length 8192"), machine)
    assert "8 rtx-6000:" in headline(plan)
    assert as_json(plan)["step"]["gpu"] == "rtx-6000"
    assert as_json(plan)["step"]["source_of_rates"] == "flags"


def test_speed_is_that_of_the_described_gpu():
    config = run_config("--model llama3-8b --bf16 --seq-length 65536")
    slow, fast = (
        Plan(config, machine_by(MINE.replace("503", tflops))).time for tflops in ("503", "1006")
    )
    assert fast.attention == pytest.approx(slow.attention / 2)


def test_a_listed_gpu_with_other_values_says_so():
    assert machine_by("--gpu h100-80 --gpu-memory-gib 79").gpu.title == "H100 SXM 80 GB"
    changed = machine_by("--gpu h100-80 --gpu-memory-gib 94 --gpu-tflops 835").gpu
    assert changed.title == "H100 SXM 80 GB with 94 GiB, 835 TFLOP/s"
    assert changed.bf16_tflops == 835
    assert "by flags" in changed.source


def test_host_memory_is_that_of_nodes_with_such_gpus():
    assert machine_by("--gpu a100-40").host_memory_gib == 1024
    assert machine_by("--gpu a100-40 --host-memory-gib 300").host_memory_gib == 300


def test_several_nodes_need_the_rate_between_them():
    with pytest.raises(ValueError, match="describe it: --gpu-network-gb-per-second missing"):
        machine_by(f"{MINE} --nodes 2")
    assert machine_by(f"{MINE} --nodes 2 --gpu-network-gb-per-second 12").nodes == 2


@pytest.mark.parametrize(
    "name", ["NVIDIA RTX A1000", "NVIDIA GH200 144G HBM3e", "NVIDIA H100 PCIe"]
)
def test_a_gpu_here_that_is_not_in_the_list_is_itself(monkeypatch, name):
    """Names that hold the name of another GPU are not taken for it."""
    properties = device.GpuProperties(
        name=name, memory_bytes=8 * GIB, capability=(8, 6), cycles_per_second=2.3e10,
        memory_bytes_per_second=192e9,
    )  # fmt: skip
    monkeypatch.setattr(device, "gpu_properties", lambda: properties)
    gpu = machine_module.this_gpu()
    assert (gpu.title, gpu.memory_gib) == (name, 8)
    assert gpu.bf16_tflops == pytest.approx(23.6, rel=0.01)
    assert gpu.memory_gb_per_second == 192
    assert f"{name} is not in the list of GPUs" in gpu.assumed


def test_what_the_driver_does_not_tell_is_assumed_and_said(monkeypatch):
    unknown = device.GpuProperties(
        name="NVIDIA X", memory_bytes=64 * GIB, capability=(99, 0), cycles_per_second=1e12,
        memory_bytes_per_second=0.0,
    )  # fmt: skip
    monkeypatch.setattr(device, "gpu_properties", lambda: unknown)
    gpu = machine_module.this_gpu()
    assert gpu.bf16_tflops == read_gpus()["a100-80"].bf16_tflops
    assert "312 TFLOP/s, as an A100, 2,039 GB/s of memory, as an A100" in gpu.assumed


def test_a_listed_gpu_here_has_the_memory_that_it_has(monkeypatch):
    found = device.GpuProperties(
        name="NVIDIA H200", memory_bytes=140 * GIB, capability=(9, 0), cycles_per_second=1e12,
        memory_bytes_per_second=1e12,
    )  # fmt: skip
    monkeypatch.setattr(device, "gpu_properties", lambda: found)
    gpu = machine_module.this_gpu()
    assert gpu == replace(read_gpus()["h200"], memory_gib=140, host_memory_gib=gpu.host_memory_gib)


def test_no_gpu_is_an_assumption_too():
    assert machine_module.this_gpu().assumed.startswith("there is no GPU here")


def unlike_ranks(group):
    """Rank 1 has a smaller and slower GPU."""
    rank = group.rank()
    properties = UNLISTED if rank else None
    before = device.gpu_properties
    device.gpu_properties = lambda: properties
    try:
        return machine_module.this_machine(None)
    finally:
        device.gpu_properties = before


def test_unlike_ranks_agree_on_the_smallest_and_slowest():
    machines = run_on_ranks(unlike_ranks, 2)
    assert machines[0] == machines[1]
    assert machines[0].gpu.title == "NVIDIA RTX A1000"
    assert machines[0].gpu_memory_gib == 8
