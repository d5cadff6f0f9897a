"""Check that this machine has what a run needs of each node.

    python tools/check_node.py --nodes 1 --gpus-per-node 8 FLAGS

FLAGS are those of pretrain_gpt.py and plan_memory.py. What is needed comes from the plan; what is
here is what this process may use: a container's limits and shares, not its host's. Exit status 1 if
something falls short, 2 for flags that are not valid. A limit on locked memory is only warned of.
"""

import os
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_untied.cli.planner_flags import parse_plan_request
from megatron_untied.commands import documentation
from megatron_untied.phases import MemoryCategory
from megatron_untied.planner.automatic import choose, is_automatic
from megatron_untied.planner.machine import DEVICE_RESERVE_GIB, HOST_RESERVE_GIB
from megatron_untied.planner.plan import Plan, peak_bytes
from megatron_untied.planner.search import plan_stages
from megatron_untied.platform import device
from megatron_untied.platform.device import GIB
from megatron_untied.streaming.disk import free_bytes

NO_LIMIT = float("inf")
CAP_IPC_LOCK = 14
"""A bit of Linux' capabilities."""
SHARED_RESERVE_GIB = 1
"""Of /dev/shm, for NCCL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What a node has, or what a run needs of it; memory in GiB."""

    gpus: int = 0
    gpu_memory_gib: float = 0.0
    """Of the smallest GPU."""
    host_memory_gib: float = 0.0
    pinned_gib: float = 0.0
    """That one process may lock in memory. CUDA's driver pins without asking this limit
    (``os_lock_user_pages`` in open-gpu-kernel-modules); InfiniBand's verbs ask it."""
    shared_memory_gib: float = 0.0
    """/dev/shm: samples of the data loader's workers, and NCCL's transport between processes."""
    activation_disk_gib: float = 0.0
    """Free in the folders of ``--activation-disk``."""


AMOUNTS = {
    "gpus": ("GPUs", "set GPUS_PER_NODE for fewer, with a --context-parallel-size to fit"),
    "gpu_memory_gib": (
        "GiB per GPU",
        "--park-during-attention and --optimizer-cpu-offload take less",
    ),
    "host_memory_gib": (
        "GiB of host memory",
        "--recompute-granularity full --recompute-num-layers 4 keeps less there",
    ),
    "pinned_gib": (
        "GiB of pinned memory per process",
        "CUDA pins beyond this limit, InfiniBand does not: ulimit -l unlimited, or docker run "
        "--ulimit memlock=-1",
    ),
    "shared_memory_gib": ("GiB in /dev/shm", "docker run --ipc=host, or --num-workers 0"),
    "activation_disk_gib": (
        "GiB for --activation-disk",
        "give folders that exist on larger disks, or a smaller --activation-disk-gib",
    ),
}
"""By field of :class:`Node`: its name in messages, and the remedy if there is too little."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        plan = plan_for(argv)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # A machine without GPUs is an error unless the flag states that the run needs none.
    words = " ".join(argv).replace("--distributed-backend=", "--distributed-backend ")
    on_cpus = "--distributed-backend gloo" in words
    needed, found = needs_of(plan, on_cpus=on_cpus), this_node()
    if plan.activation_disk is not None:
        disk = plan.activation_disk
        needed = replace(needed, activation_disk_gib=disk.node_bytes / GIB)
        found = replace(found, activation_disk_gib=free_bytes(disk.folders) / GIB)
    print("\n".join(table(needed, found)))
    lines = list(shortfalls(needed, found))
    # After the table, so that a log has the amounts above the errors.
    print("\n".join(lines), end="\n" * bool(lines), file=sys.stderr)
    return 1 if any(line.startswith("error:") for line in lines) else 0


def plan_for(argv: Sequence[str]) -> Plan:
    """The plan of the run that the flags describe, or of its stage that takes most of a GPU."""
    request = parse_plan_request(argv, documentation(__doc__))
    if request.config.stages:
        return max(plan_stages(request.config, request.machine), key=peak_bytes)
    planned = choose if is_automatic(request.config) else Plan
    return planned(request.config, request.machine)


def needs_of(plan: Plan, *, on_cpus: bool) -> Node:
    """What a plan takes per node, with reserves; on CPUs device memory is the host's."""
    ranks, peak = plan.machine.gpus_per_node, plan.peak.num_bytes / GIB
    host, loader = plan.host.total() / GIB, plan.host[MemoryCategory.LOADER] / GIB
    cached = plan.host[MemoryCategory.FILE_CACHE] / GIB
    if on_cpus:
        return Node(
            host_memory_gib=ranks * (peak + host + HOST_RESERVE_GIB),
            shared_memory_gib=ranks * loader,
        )
    return Node(
        gpus=ranks,
        gpu_memory_gib=peak + DEVICE_RESERVE_GIB,
        host_memory_gib=ranks * (host + HOST_RESERVE_GIB),
        pinned_gib=host - loader - cached,  # workers' samples are in shared memory instead
        shared_memory_gib=ranks * loader + SHARED_RESERVE_GIB,
    )


def table(needed: Node, found: Node) -> Iterator[str]:
    """A line per amount, needed and found."""
    for name, (label, _) in AMOUNTS.items():
        need, have = getattr(needed, name), getattr(found, name)
        yield f"{label:32} needed {_number(need):>9}  here {_number(have):>9}"


def shortfalls(needed: Node, found: Node) -> Iterator[str]:
    """A line for each amount that falls short, with the remedy: an error, or a warning."""
    for name, (label, remedy) in AMOUNTS.items():
        need, have = getattr(needed, name), getattr(found, name)
        has_no_gpu = name == "gpu_memory_gib" and not found.gpus  # reported by the line before
        if have < need and not has_no_gpu:
            kind = "warning" if name == "pinned_gib" else "error"
            yield (
                f"{kind}: this node has {_number(have)} {label}, and {_number(need)} are needed; "
                f"{remedy}"
            )


def _number(amount: float) -> str:
    return "no limit" if amount == NO_LIMIT else f"{amount:,.1f}".removesuffix(".0")


def this_node() -> Node:
    """The resources that this process may use now."""
    gpus = torch.cuda.device_count()
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(gpus)]
    shared = os.statvfs("/dev/shm")
    return Node(
        gpus=gpus,
        gpu_memory_gib=min(sizes, default=0) / GIB,
        host_memory_gib=device.host_memory_bytes() / GIB,
        pinned_gib=pinned_limit_bytes(Path("/")) / GIB,
        # Not f_bfree, which counts what is reserved for root.
        shared_memory_gib=shared.f_bavail * shared.f_frsize / GIB,
    )


def pinned_limit_bytes(root: Path) -> float:
    """Bytes that this process may lock: no limit with the capability, else ``ulimit -l``."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    may_lock = int(device.fields_of(root / "proc/self/status")["CapEff:"], 16) >> CAP_IPC_LOCK & 1
    return NO_LIMIT if may_lock or limit == resource.RLIM_INFINITY else limit
