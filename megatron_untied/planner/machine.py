"""The machines that a plan is for: how many GPUs of which kind, and how much memory."""

import importlib.resources
import json
from dataclasses import dataclass, replace

GIB = 1 << 30
DEVICE_RESERVE_GIB = 4
"""Of a GPU, for its context, NCCL, cuBLAS and what the allocator cannot use."""
HOST_RESERVE_GIB = 2
"""For each rank's process: Python, libraries, CUDA's part on the host."""
DEFAULT_GPU = "h100-80"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """What a kind of GPU can do; a line of ``gpus.json``. Rates are for one direction."""

    title: str
    memory_gib: float
    bf16_tflops: float
    """Peak, dense."""
    attention_forward_fraction: float
    """Of the peak, that the kernel reaches on long causal sequences."""
    attention_backward_fraction: float
    matmul_fraction: float
    memory_gb_per_second: float
    nvlink_gb_per_second: float
    """To the GPUs of the node."""
    network_gb_per_second: float
    """To other nodes."""
    pcie_gb_per_second: float
    """To the host."""
    host_memory_gib: float
    """Of the node that it is usually sold in."""
    source: str
    """Where the rates come from."""
    cuda_names: tuple[str, ...] = ()
    """What CUDA calls it."""
    assumed: str = ""
    """What of it is an assumption, for the user to check; empty if nothing is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Equal nodes of equal GPUs."""

    gpus_per_node: int = 8
    nodes: int = 1
    gpu: Gpu
    gpu_memory_gib: float
    host_memory_gib: float
    """Of one node."""

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.gpus_per_node * self.nodes

    @property
    def device_bytes(self) -> int:
        """What tensors of one rank may take on its GPU."""
        return int((self.gpu_memory_gib - DEVICE_RESERVE_GIB) * GIB)

    @property
    def host_bytes(self) -> int:
        """What tensors of one rank may take on the host."""
        return int((self.host_memory_gib / self.gpus_per_node - HOST_RESERVE_GIB) * GIB)


def read_gpus() -> dict[str, Gpu]:
    """Every GPU that the roofline knows, by name."""
    text = (importlib.resources.files(__package__) / "gpus.json").read_text()
    return {
        name: Gpu(**values | {"cuda_names": tuple(values["cuda_names"])})
        for name, values in json.loads(text).items()
    }


def described_gpu(
    title: str,
    *,
    memory_gib: float,
    bf16_tflops: float,
    memory_gb_per_second: float,
    pcie_gb_per_second: float,
    nvlink_gb_per_second: float,
    network_gb_per_second: float,
    host_memory_gib: float,
    source: str,
    assumed: str = "",
) -> Gpu:
    """A GPU that is not in the list; its kernels reach the fractions of an A100's peak."""
    fractions = "kernels reach the same fractions of the peak as on an A100"
    return replace(
        read_gpus()["a100-80"],
        title=title,
        memory_gib=memory_gib,
        bf16_tflops=bf16_tflops,
        memory_gb_per_second=memory_gb_per_second,
        pcie_gb_per_second=pcie_gb_per_second,
        nvlink_gb_per_second=nvlink_gb_per_second,
        network_gb_per_second=network_gb_per_second,
        host_memory_gib=host_memory_gib,
        source=source,
        cuda_names=(),
        assumed="; ".join(filter(None, (assumed, fractions))),
    )
