"""The longest context of a machine over all settings that trade time for memory.

Two steps. The first one finds the length, with the settings that take the least memory. The second
one keeps the length and takes each setting back to the fastest value that still fits.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from megatron_untied.config.run import OptimizationConfig, RunConfig
from megatron_untied.planner.automatic import legal_chunks
from megatron_untied.planner.plan import Plan, fits, length_step

_TILES = (8192, 2048)
"""Tokens of a tile: smaller ones save little and leave the GPU idle."""
_LOSS_CHUNKS = (8192, 2048, 512)
"""Tokens whose logits are alive at once."""
_LONGEST = 1 << 40

GPU, HOST, KERNEL = "GPU memory", "host memory", "the index limit of the attention kernel"


@dataclass(frozen=True)
class LongestContext:
    """A plan at the longest length that fits, and what a longer one would lack."""

    plan: Plan
    tokens: int
    limit: str


def limit_of(plan: Plan, tokens: int) -> str:
    """What a context longer than ``tokens`` lacks with the settings of ``plan`` as they are."""
    longer = plan.at_length(tokens + length_step(plan))
    try:
        lacking = [GPU] * (not longer.fits_device) + [HOST] * (not longer.fits_host)
    except ValueError:
        return KERNEL
    return " and ".join(lacking)


def longest_context(plans: list[Plan]) -> LongestContext | None:
    """The longest context of any of ``plans`` with its settings changed; None if nothing fits.

    Args:
        plans: one for each way to split ranks; lengths and searched settings of their
            configurations do not count.
    """
    best, tokens = None, 0
    for plan in plans:
        for candidate in _least_memory(replace(plan, every_layer=False)):
            longer = _longest(candidate, floor=tokens)
            if longer:
                best, tokens = candidate, longer
    if best is None:
        return None
    memory = best.config.memory
    between: Iterable[int] = ()
    if memory.recompute_granularity is not None:  # group sizes between those that were tried
        tried = sorted(_group_sizes(best.config))
        place = tried.index(memory.recompute_num_layers)
        between = range(tried[max(0, place - 1)] + 1, tried[min(place + 1, len(tried) - 1)])
    for num_layers in between:
        candidate = best.with_settings("memory", recompute_num_layers=num_layers)
        longer = _longest(candidate, floor=tokens)
        if longer:
            best, tokens = candidate, longer
    plan = replace(_fastest(best, tokens), every_layer=True)
    return LongestContext(plan, tokens, _limit_of_any_offload(best, tokens))


def _least_memory(plan: Plan) -> Iterator[Plan]:
    """All combinations that may be the longest, likely ones first; layers on the host are open.

    The smallest chunks, tiles and chunks of logits and no overlap take least of the GPU and no more
    of the host than their alternatives. So does full recomputation, except where layers are parked:
    there a layer that saved its attention output peaks lower, for more of the host.
    """
    config = plan.config
    overlaps = config.parallel.num_ulysses_and_ring[0] == 1  # one rank has nothing to overlap
    least = plan.with_settings(
        "parallel", heads_per_chunk=legal_chunks(config)[0], cp_overlap=overlaps
    ).with_settings("memory", loss_chunk_size=_LOSS_CHUNKS[-1], sequence_tile_size=_TILES[-1])
    for optimization in reversed(_optimizations(config)):
        sharded = replace(least, config=replace(least.config, optimization=optimization))
        for granularity, park in (("full", True), ("selective", True), ("full", False)):
            for num_layers in _group_sizes(config):
                yield sharded.with_settings(
                    "memory",
                    recompute_granularity=granularity,
                    park_during_attention=park,
                    recompute_num_layers=num_layers,
                )
        yield _without_streaming(sharded)


def _fastest(best: Plan, tokens: int) -> Plan:
    """``best`` at ``tokens`` with every setting as fast as still fits, one after the other."""
    plan = _with_fewest_on_host(best, tokens)
    assert plan is not None
    for setting in _SETTINGS:
        alternatives = _alternatives(plan, setting)
        # Stable: of equally fast values the first one, which is the simpler one.
        alternatives.sort(key=lambda other: round(other.at_length(tokens).time.seconds, 3))
        for other in alternatives:
            placed = _with_fewest_on_host(other, tokens)
            if placed is not None and placed.time.seconds <= plan.time.seconds:
                plan = placed
                break
    return plan


_SETTINGS = (
    "sharding",
    "streaming",
    "granularity",
    "parking",
    "group size",
    "overlap",
    "heads per chunk",
    "tile size",
    "loss chunk",
)
"""In the order in which they go back to fast values: what costs most time first."""


def _alternatives(plan: Plan, setting: str) -> list[Plan]:
    """``plan`` with other values of one of ``_SETTINGS``, simple ones first."""
    config = plan.config
    if setting == "sharding":
        return [
            replace(plan, config=replace(config, optimization=optimization))
            for optimization in _optimizations(config)
        ]
    if setting == "streaming":
        return [_without_streaming(plan)]
    overlaps = [True, False] if config.parallel.num_ulysses_and_ring[0] > 1 else [True]
    part, name, values = {
        "granularity": ("memory", "recompute_granularity", ["selective"]),
        "parking": ("memory", "park_during_attention", [False]),
        "group size": (
            "memory", "recompute_num_layers", range(1, config.memory.recompute_num_layers),
        ),
        "overlap": ("parallel", "cp_overlap", overlaps),
        "heads per chunk": ("parallel", "heads_per_chunk", legal_chunks(config)),
        "tile size": ("memory", "sequence_tile_size", _TILES),
        "loss chunk": ("memory", "loss_chunk_size", _LOSS_CHUNKS),
    }[setting]  # fmt: skip
    return [plan.with_settings(part, **{name: value}) for value in values]


def _longest(plan: Plan, floor: int) -> int:
    """The longest length above ``floor`` that fits with some layers on the host; 0 if none."""
    step = length_step(plan)
    low, high = floor // step, floor // step + 1
    while high * step < _LONGEST and _with_fewest_on_host(plan, high * step) is not None:
        low, high = high, 2 * high
    if low * step <= floor:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        placed = _with_fewest_on_host(plan, middle * step)
        low, high = (middle, high) if placed is not None else (low, middle)
    return low * step


def _with_fewest_on_host(plan: Plan, tokens: int) -> Plan | None:
    """``plan`` at that length with as few layers on the host as the GPU needs; None: none fits."""
    longer = plan.at_length(tokens)
    none = longer.with_settings("memory", cpu_offloading_num_layers=0)
    every = none
    if longer.geometry.is_streamed:
        layers = longer.geometry.num_layers
        every = longer.with_settings("memory", cpu_offloading_num_layers=layers)
    if not fits(every, with_host=False):
        return None
    if none.fits_device:
        return none if none.fits_host else None
    # ``more`` with ``high`` layers on the host fits the device, ``fewer`` with ``low`` does not.
    low, high, fewer, more = 0, longer.geometry.num_layers, none, every
    while high - low > 1:
        # The peak falls by the same for each layer as long as it stays in the same phase, so a
        # straight line finds the number in two plans, where bisection takes one per bit.
        excess = fewer.peak.num_bytes - plan.machine.device_bytes
        share = excess / (fewer.peak.num_bytes - more.peak.num_bytes)
        middle = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
        placed = longer.with_settings("memory", cpu_offloading_num_layers=middle)
        if placed.fits_device:
            high, more = middle, placed
        else:
            low, fewer = middle, placed
    return more if more.fits_host else None


def _limit_of_any_offload(plan: Plan, tokens: int) -> str:
    """What a context longer than ``tokens`` lacks, whatever layers are on the host."""
    longer = plan.at_length(tokens + length_step(plan))
    none, every = (
        longer.with_settings("memory", cpu_offloading_num_layers=number)
        for number in (0, longer.config.model.num_layers)
    )
    if not longer.geometry.is_streamed:
        every = none
    try:
        if not (none.fits_device or every.fits_device):
            return GPU
    except ValueError:
        return KERNEL
    return f"{GPU} and {HOST} together" if none.fits_host and not none.fits_device else HOST


def _optimizations(config: RunConfig) -> list[OptimizationConfig]:
    """As given, then what takes less of the device."""
    given = config.optimization
    if config.transformer_impl != "local":
        return [given]
    full = replace(given, use_torch_fsdp2=True, use_distributed_optimizer=False)
    both = replace(full, optimizer_cpu_offload=True)
    return list(dict.fromkeys([given, replace(full, optimizer_cpu_offload=False), both]))


def _group_sizes(config: RunConfig) -> list[int]:
    """Powers of two and all layers; the likely ones first."""
    layers = config.model.num_layers
    sizes = {2**power for power in range(layers.bit_length()) if 2**power <= layers} | {layers}
    return sorted(sizes, key=lambda size: abs(size - 8))


def _without_streaming(plan: Plan) -> Plan:
    """``plan`` without streamed layers."""
    return plan.with_settings(
        "memory",
        recompute_granularity=None,
        recompute_num_layers=1,
        park_during_attention=False,
        cpu_offloading_num_layers=0,
    )
