"""Device memory of a step beside the plan's: one line for all ranks, and warnings."""

from collections.abc import Sequence

import torch.distributed as dist

from megatron_untied.planner.machine import DEVICE_RESERVE_GIB
from megatron_untied.platform.device import GIB, DeviceMemory

TOLERANCE = 0.01
"""Of the plan, that tensors may take beyond it: planner and tracer agree within so much."""


def memory_against_plan(planned_bytes: int, measured: DeviceMemory) -> list[str]:
    """Lines that compare the rank with the most memory with the plan; collective over all ranks.

    Args:
        planned_bytes: the plan's peak, of the rank whose peak is highest.
        measured: this rank's memory, after a step.
    """
    ranks = [measured] * dist.get_world_size()
    dist.all_gather_object(ranks, measured)
    return describe(planned_bytes, ranks)


def describe(planned_bytes: int, ranks: Sequence[DeviceMemory]) -> list[str]:
    """One line on the rank that reserves most, and a warning for each way to exceed the plan."""
    worst = max(range(len(ranks)), key=lambda rank: ranks[rank].reserved_bytes)
    memory = ranks[worst]
    fragmentation = 1 - memory.allocated_bytes / memory.reserved_bytes
    lines = [
        f"memory: planned {_gib(planned_bytes)} | allocated {_gib(memory.allocated_bytes)} | "
        f"reserved {_gib(memory.reserved_bytes)} ({fragmentation:.1%} fragmentation) | free "
        f"{_gib(memory.free_bytes)} of {_gib(memory.total_bytes)} | rank {worst}, the highest of "
        f"{len(ranks)}"
    ]
    most = max(range(len(ranks)), key=lambda rank: ranks[rank].allocated_bytes)
    excess_bytes = ranks[most].allocated_bytes - planned_bytes
    if excess_bytes > TOLERANCE * planned_bytes:
        lines.append(
            f"warning: tensors on rank {most} take {_gib(excess_bytes)} more than planned; "
            "--profile and benchmarks/memory_trace.py with the same flags show the phase"
        )
    used = [memory.total_bytes - memory.free_bytes for memory in ranks]
    fullest = max(range(len(ranks)), key=used.__getitem__)
    beside_bytes = used[fullest] - planned_bytes
    if beside_bytes > DEVICE_RESERVE_GIB * GIB:
        lines.append(
            f"warning: {_gib(used[fullest])} of the GPU of rank {fullest} are in use, "
            f"{_gib(beside_bytes)} beside the plan, which reserves {DEVICE_RESERVE_GIB} GiB for "
            "CUDA, NCCL and fragmentation; check for other processes on the GPU, and set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True"
        )
    return lines


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
