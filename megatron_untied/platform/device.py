"""Functions that differ between a machine with GPUs and one without."""

import resource
from dataclasses import dataclass
from pathlib import Path

import torch

GIB = 1 << 30
"""Bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProperties:
    """Properties of a GPU, as CUDA reports them."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    """Compute capability: major, minor."""
    cycles_per_second: float
    """Sum over all multiprocessors, at the highest clock."""
    memory_bytes_per_second: float
    """Peak bandwidth; 0 if the driver does not report it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Memory of one rank's GPU, in bytes. Peaks are since the last reset."""

    allocated_bytes: int
    """Peak of live tensors, each rounded up to what the allocator gives it."""
    reserved_bytes: int
    """Peak of what the allocator took from CUDA, free blocks included."""
    free_bytes: int
    """Of the whole GPU, now: without CUDA's context, NCCL's buffers and other processes."""
    total_bytes: int


def current_device() -> torch.device:
    """This rank's device: the CUDA device set by :func:`select_device`, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def select_device(local_rank: int) -> torch.device:
    """Bind this process to GPU ``local_rank`` of its node, if there are GPUs.

    fp32 matrix products are fp32 from here on.
    """
    # NVIDIA's images set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which makes TF32 the initial precision:
    # ten bits of mantissa in whatever is fp32, without a word.
    torch.set_float32_matmul_precision("highest")
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    return current_device()


def use_in_this_thread(device: torch.device) -> None:
    """Select ``device`` in this thread: CUDA's current device is per thread, at first GPU 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def default_backend() -> str:
    """The collective library of this machine: nccl with CUDA, gloo without.

    Raises:
        ValueError: there are GPUs, and torch cannot use them.
    """
    if torch.cuda.is_available():
        return "nccl"
    # NVML counts GPUs without CUDA. torch only warns of an old driver, and a run would be on CPUs.
    if torch.version.cuda is not None and (gpus := torch.cuda.device_count()):
        raise ValueError(
            f"this machine has {gpus} GPUs that torch's CUDA {torch.version.cuda} cannot use: "
            "its driver is probably too old (CUDA 13 needs 580 or newer, see nvidia-smi); "
            "--distributed-backend gloo trains on CPUs"
        )
    return "gloo"


def slow_flops_per_second() -> float:
    """A lower bound for one rank in 16-bit attention, for timeouts.

    FlashAttention-2 on an A100; Hopper's kernels are two to three times as fast. For a CPU, one
    slow core.
    """
    return 2e14 if torch.cuda.is_available() else 1e10


def num_devices() -> int:
    """Number of GPUs of this node."""
    return torch.cuda.device_count()


def gpu_properties() -> GpuProperties | None:
    """Properties of this rank's GPU; None without GPUs."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(current_device())
    return GpuProperties(
        name=found.name,
        memory_bytes=found.total_memory,
        capability=(found.major, found.minor),
        cycles_per_second=1e3 * found.clock_rate * found.multi_processor_count,
        # clock_rate in kHz, bus width in bits; memory transfers twice per cycle.
        memory_bytes_per_second=2e3 * found.memory_clock_rate * found.memory_bus_width / 8,
    )


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that can still be had: the machine's, or what a container's limits leave of it.

    Limits are those of control groups, version 2. Page cache that counts against them gives way.
    ``root`` is where /proc and /sys are.
    """
    found = int(fields_of(root / "proc/meminfo")["MemAvailable:"]) * 1024
    group = Path((root / "proc/self/cgroup").read_text().rpartition("0::/")[-1].strip())
    for folder in (root / "sys/fs/cgroup" / part for part in (group, *group.parents)):
        limit = folder / "memory.max"
        if limit.is_file() and limit.read_text().strip() != "max":
            used = int((folder / "memory.current").read_text())
            cached = int(fields_of(folder / "memory.stat")["inactive_file"])
            found = min(found, int(limit.read_text()) - used + cached)
    return found


def fields_of(file: Path) -> dict[str, str]:
    """First and second word of each line that has them, as files of /proc have."""
    words = (line.split() for line in file.read_text().splitlines())
    return {line[0]: line[1] for line in words if len(line) > 1}


def synchronize() -> None:
    """Wait for all work queued on this rank's device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def record_event() -> torch.cuda.Event | None:
    """An event after all work queued so far on this rank's device; None if all is done."""
    # Called for every chunk of heads. is_available() would call the driver each time.
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def peak_device_bytes() -> int:
    """Peak bytes of live tensors since the last reset; on a CPU the peak RSS of the process.

    The latter cannot be reset.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports KiB


def device_memory() -> DeviceMemory | None:
    """Memory of this rank's GPU; None without GPUs."""
    if not torch.cuda.is_available():
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return DeviceMemory(
        allocated_bytes=torch.cuda.max_memory_allocated(),
        reserved_bytes=torch.cuda.max_memory_reserved(),
        free_bytes=free_bytes,
        total_bytes=total_bytes,
    )


def release_cached_memory() -> None:
    """Give memory that no tensor uses back to the device, for tensors of other sizes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def reset_peak_device_bytes() -> None:
    """Reset :func:`peak_device_bytes`; on a CPU it has no effect."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
