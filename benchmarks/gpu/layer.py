"""Parts: the time of one streamed layer under each setting, and of its copies to the host."""

import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.record import Record
from benchmarks.gpu.sizes import Sizes
from megatron_untied.api import StreamedLayers, streamed_layers
from megatron_untied.cli.arguments import parse_arguments
from megatron_untied.cli.planner_flags import complete
from megatron_untied.config import MemoryConfig
from megatron_untied.config.run import RunConfig
from megatron_untied.model import transformer_config
from megatron_untied.platform import device
from megatron_untied.streaming.host_arena import HostArena
from megatron_untied.training.initialize import make_groups

BASE = "one head per chunk"
SETTINGS: dict[str, dict[str, object]] = {
    BASE: {},
    "all heads in one chunk": {"heads_per_chunk": "all"},
    "without overlap": {"overlap": False},
    "full instead of selective": {"recompute_granularity": "full"},
}
REPEATED_SECONDS = 1.0
"""A step that is shorter is repeated twice more; the median counts."""


def start_one_rank(config: RunConfig) -> None:
    """Make the process groups of this process alone, which the layers take from megatron-core."""
    device.select_device(0)
    if not dist.is_initialized():
        dist.init_process_group(config.distributed.backend, store=dist.HashStore(), rank=0,
                                world_size=1)  # fmt: skip
    make_groups(config.parallel, config.distributed)


def config_of(sizes: Sizes) -> RunConfig:
    """The model of ``sizes`` with one layer."""
    flags = sizes.model.format(layers=1) + "--seq-length 1024"
    return parse_arguments(complete(flags.split()), world_size=1)


def layers_of(config: RunConfig, setting: dict[str, object], **memory: object) -> StreamedLayers:
    """One streamed layer with random weights on this device."""
    granularity = setting.get("recompute_granularity", "selective")
    chosen = MemoryConfig(
        recompute_granularity=granularity,
        sequence_tile_size=config.memory.sequence_tile_size,
        **memory,
    )
    core = transformer_config(config.model, config.parallel, config.precision)
    with torch.device(device.current_device()):
        layers = streamed_layers(
            core,
            heads_per_chunk=setting.get("heads_per_chunk", 1),
            overlap=setting.get("overlap", True),
            memory=chosen,
        )
    for weight in layers.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.02)
    return layers


def step_seconds(layers: StreamedLayers, tokens: int, hidden_size: int) -> float:
    """Median time of a forward and backward of ``tokens``; a long one is measured once."""
    shape, dtype = (tokens, 1, hidden_size), torch.bfloat16

    def random() -> Tensor:
        return torch.randn(shape, device=device.current_device(), dtype=dtype)

    seconds: list[float] = []
    while len(seconds) < 3 and (not seconds or seconds[0] < REPEATED_SECONDS):
        x, gradient = random(), random()
        device.synchronize()
        began = time.perf_counter()
        layers(x).backward(gradient)
        device.synchronize()
        seconds.append(time.perf_counter() - began)
        layers.zero_grad()
    return statistics.median(seconds)


def run_settings(record: Record, sizes: Sizes) -> None:
    """Time every setting at every length that budget and memory suffice for.

    One rank exchanges nothing, so the ratio "without overlap" is the noise of the measurement.
    """
    config = config_of(sizes)
    start_one_rank(config)
    last: dict[str, tuple[int, float]] = {}  # by setting: the length before, and its seconds
    for tokens in sizes.layer_lengths:
        base = None
        for name, setting in SETTINGS.items():
            row = {"tokens": tokens, "setting": name}
            before, seconds = last.get(name, (tokens, 0.0))
            expected = seconds * (tokens / before) ** 2  # attention, the largest part
            if 1.1 * expected > record.seconds_left:
                record.row("layer", **row, note=f"left out: {expected:.0f} s expected")
                continue
            layers = layers_of(config, setting)
            try:
                step_seconds(layers, sizes.layer_lengths[0], config.model.hidden_size)
                seconds = step_seconds(layers, tokens, config.model.hidden_size)
            except torch.OutOfMemoryError:
                record.row("layer", **row, note="out of memory")
                continue
            finally:
                del layers  # its buffers, before the next setting takes its own
            base = seconds if name == BASE else base
            last[name] = tokens, seconds
            record.row("layer", **row, seconds=seconds, ratio=seconds / base if base else None)


def run_offload(record: Record, sizes: Sizes) -> None:
    """Rates of copies, and what of a layer's copies is not hidden under its attention."""
    config, tokens = config_of(sizes), sizes.offload_length
    start_one_rank(config)
    rates = {kind: copy_rate(kind, sizes.copy_bytes) for kind in ("to the host", "from the host")}
    for kind, rate in rates.items():
        record.row("copies", direction=kind, **{"GB/s": rate / 1e9})
    seconds = []
    for num_offloaded in (0, 1):
        layers = layers_of(config, {}, cpu_offloading_num_layers=num_offloaded)
        step_seconds(layers, tokens, config.model.hidden_size)  # allocates and registers
        seconds.append(step_seconds(layers, tokens, config.model.hidden_size))
    kept, offloaded = seconds
    num_bytes = layers[0].streaming.store.arena.peak_used_bytes
    copying = sum(num_bytes / rate for rate in rates.values())
    numbers = {
        "MiB": num_bytes / 2**20,
        "seconds, kept on the device": kept,
        "seconds, on the host": offloaded,
        "seconds of copies": copying,
        # Copies this short do not show beside the spread of two steps.
        "share hidden": None if copying < 0.05 * kept else 1 - max(0.0, offloaded - kept) / copying,
    }
    record.row("offload of a layer", tokens=tokens, **numbers)


def copy_rate(kind: str, num_bytes: int) -> float:
    """Bytes per second of one large copy between the device and the host arena, the best of 3."""
    here = device.current_device()
    arena = HostArena.for_device(here)
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=here)
    slot = arena.reserve(tensor.shape, tensor.dtype)
    slot.write(tensor).wait()
    best = float("inf")
    for _ in range(3):
        device.synchronize()
        began = time.perf_counter()
        copy = slot.write(tensor) if kind == "to the host" else slot.read(tensor)
        copy.wait()
        device.synchronize()
        best = min(best, time.perf_counter() - began)
    return num_bytes / best
