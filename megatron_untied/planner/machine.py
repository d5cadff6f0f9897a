"""The machine of a plan: how many GPUs of which kind, their rates, and how much memory."""

import importlib.resources
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_untied.context_parallel.kernels.split_calls import Limits
from megatron_untied.context_parallel.kernels.traced import SCRATCH
from megatron_untied.platform import device
from megatron_untied.platform.device import GIB
from megatron_untied.streaming.disk import free_bytes

DEVICE_RESERVE_GIB = 4
"""Per GPU, for its context, NCCL, cuBLAS and what the allocator cannot use."""
HOST_RESERVE_GIB = 2
"""Per rank, for its process: Python, libraries, CUDA's part on the host."""
DEFAULT_GPU = "h100-80"
DISK_GB_PER_SECOND = 4.0
"""Assumed of a local drive: what one for servers on PCIe 4 keeps on writing; it reads faster."""
_DISK_SHARE = 0.98
"""Of the free space that a plan takes: files are whole stripes, and file systems need some."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """What a kind of GPU can do; a line of ``gpus.json``. Rates are for one direction."""

    title: str
    memory_gib: float
    bf16_tflops: float
    """Peak, dense."""
    compute_capability: int
    """Its major number, by which kernels tell GPUs apart."""
    attention_fractions: dict[str, tuple[float, float]]
    """Of the peak, that a forward and a backward reach on long causal sequences, by kernel."""
    matmul_fraction: float
    memory_gb_per_second: float
    nvlink_gb_per_second: float
    """To the GPUs of the node."""
    network_gb_per_second: float
    """To other nodes."""
    pcie_gb_per_second: float
    """To the host."""
    host_memory_gib: float
    """Of the node that the GPU is usually sold in."""
    source: str
    """Where memory and rates come from."""
    cuda_names: tuple[str, ...] = ()
    """Names that CUDA gives it."""
    assumed: str = ""
    """Assumptions among the values, for the user to check; empty if there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Equal nodes of equal GPUs."""

    gpus_per_node: int = 8
    nodes: int = 1
    gpu: Gpu
    gpu_memory_gib: float
    host_memory_gib: float
    """Of one node."""
    kernels: dict[str, Limits] | None = None
    """Limits of the attention kernels that are installed, by name; None: all may be."""
    disk_gib: float = math.inf
    """Free in the folders of ``--activation-disk`` of one node."""
    disk_gb_per_second: float = DISK_GB_PER_SECOND
    """Of one of these folders."""

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.gpus_per_node * self.nodes

    @property
    def device_bytes(self) -> int:
        """Bytes per rank that tensors may take on its GPU."""
        return int((self.gpu_memory_gib - DEVICE_RESERVE_GIB) * GIB)

    @property
    def host_bytes(self) -> int:
        """Bytes per rank that tensors may take on the host."""
        return int((self.host_memory_gib / self.gpus_per_node - HOST_RESERVE_GIB) * GIB)

    @property
    def disk_bytes(self) -> float:
        """Bytes per rank that saved activations may take on its node's disks; may be infinite."""
        return _DISK_SHARE * self.disk_gib / self.gpus_per_node * GIB


def read_gpus() -> dict[str, Gpu]:
    """The GPUs with published rates, by name."""
    text = (importlib.resources.files(__package__) / "gpus.json").read_text()
    gpus = {}
    for name, values in json.loads(text).items():
        fractions = {kernel: tuple(pair) for kernel, pair in values["attention_fractions"].items()}
        values |= {"attention_fractions": fractions, "cuda_names": tuple(values["cuda_names"])}
        gpus[name] = Gpu(**values)
    return gpus


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRates:
    """What distinguishes a GPU that is not in the list; fields are those of :class:`Gpu`."""

    memory_gib: float
    bf16_tflops: float
    memory_gb_per_second: float
    pcie_gb_per_second: float
    nvlink_gb_per_second: float
    network_gb_per_second: float
    compute_capability: int = 8
    """Its kernels are those of an A100 where it is not known."""


def unlisted_gpu(
    title: str, rates: GpuRates, *, host_memory_gib: float, source: str, assumed: str = ""
) -> Gpu:
    """A GPU that is not in the list; its kernels reach the fractions of an A100's peak."""
    fractions = "kernels reach the same fractions of the peak as on an A100"
    return replace(
        read_gpus()["a100-80"],
        title=title,
        **asdict(rates),
        host_memory_gib=host_memory_gib,
        source=source,
        cuda_names=(),
        assumed="; ".join(filter(None, (assumed, fractions))),
    )


_BF16_FLOPS_PER_CYCLE = {
    (8, 0): 2048,
    (8, 6): 1024,
    (8, 9): 1024,
    (9, 0): 4096,
    (10, 0): 8192,
    (10, 3): 8192,
    (12, 0): 1024,
    (12, 1): 1024,
}
"""Of one multiprocessor's tensor cores, dense, by compute capability."""


def this_machine(groups: ProcessGroupCollection, disks: Sequence[str] = ()) -> Machine:
    """Memory and number of GPUs of the smallest node, rates of the slowest GPU; collective.

    ``disks``: folders of ``--activation-disk``, whose free space counts.

    Without GPUs it is the machine that the planner assumes without machine flags, so that "auto"
    becomes the same on CPUs as in a plan.
    """
    world_size = dist.get_world_size()
    gpu = this_gpu()
    here = device.current_device()
    found = {kind.name: kind().limits for kind in SCRATCH if not kind.missing(here)}
    free_gib = free_bytes(disks) / GIB if disks else math.inf
    mine = gpu, device.num_devices() or min(world_size, 8), found or None, free_gib
    gathered: list[tuple[Gpu, int, dict[str, Limits] | None, float]] = [mine] * world_size
    dist.all_gather_object(gathered, mine)
    gpus, counts, installed, free = zip(*gathered, strict=True)
    kernels = installed[0]
    for others in installed[1:]:
        # What all ranks have, with the limits of the rank that indexes least.
        kernels = (
            kernels
            and others
            and {
                name: max(limits, others[name], key=lambda each: each.indexes_calls_in_32_bits)
                for name, limits in kernels.items()
                if name in others
            }
        )
    # Equal nodes: the largest number of GPUs that every node has and that divides the ranks.
    most = min(*counts, world_size)
    gpus_per_node = next(size for size in range(most, 0, -1) if world_size % size == 0)
    return Machine(
        gpus_per_node=gpus_per_node,
        nodes=world_size // gpus_per_node,
        gpu=min(gpus, key=lambda gpu: (gpu.bf16_tflops, gpu.title)),
        gpu_memory_gib=min(gpu.memory_gib for gpu in gpus),
        host_memory_gib=min(gpu.host_memory_gib for gpu in gpus),
        kernels=kernels,
        disk_gib=min(free),
    )


def this_gpu() -> Gpu:
    """This rank's GPU and its host's memory.

    Rates are those of the list where it has CUDA's name of the GPU. Otherwise they come from the
    properties that CUDA gives; it does not give the rates of links.
    """
    gpus, properties = read_gpus(), device.gpu_properties()
    if properties is None:
        default = gpus[DEFAULT_GPU]
        assumed = (
            f"there is no GPU here, so the plan is for {default.title} in nodes of "
            f"{default.host_memory_gib:,} GiB"
        )
        return replace(default, assumed=assumed)
    memory_gib, host_gib = properties.memory_bytes / GIB, device.host_memory_bytes() / GIB
    # Whole names only: "NVIDIA H100 PCIe" is slower than the H100 of the list.
    listed = next((gpu for gpu in gpus.values() if properties.name in gpu.cuda_names), None)
    if listed is not None:
        return replace(listed, memory_gib=memory_gib, host_memory_gib=host_gib)

    a100 = gpus["a100-80"]
    link, network = a100.pcie_gb_per_second, a100.network_gb_per_second
    per_cycle = _BF16_FLOPS_PER_CYCLE.get(properties.capability, 0)
    tflops = per_cycle * properties.cycles_per_second / 1e12
    bandwidth = properties.memory_bytes_per_second / 1e9
    assumed = []
    if not tflops:
        assumed.append(f"{a100.bf16_tflops:,.0f} TFLOP/s, as an A100")
    if not bandwidth:
        assumed.append(f"{a100.memory_gb_per_second:,.0f} GB/s of memory, as an A100")
    assumed.append(
        f"{link} GB/s to the host and to other GPUs of the node, {network} to other nodes"
    )
    rates = GpuRates(
        memory_gib=memory_gib,
        bf16_tflops=tflops or a100.bf16_tflops,
        memory_gb_per_second=bandwidth or a100.memory_gb_per_second,
        pcie_gb_per_second=link,
        nvlink_gb_per_second=link,
        network_gb_per_second=network,
        compute_capability=properties.capability[0],
    )
    return unlisted_gpu(
        properties.name,
        rates,
        host_memory_gib=host_gib,
        source=f"properties that CUDA gives of {properties.name}, which is not in the list",
        assumed=f"{properties.name} is not in the list of GPUs: {', '.join(assumed)}",
    )
