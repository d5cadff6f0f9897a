"""The longest context of a machine over all settings that trade time for memory.

Two steps. The first looks for the length, with the values of the least memory where a value costs
nothing else. The second keeps the length and takes each setting back to the fastest value that
still fits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_untied.config.run import OptimizationConfig, RunConfig
from megatron_untied.context_parallel.head_schedule import legal_heads_per_chunk
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
    limit: str

    @property
    def tokens(self) -> int:
        """The length."""
        return self.plan.config.batch.seq_length


def limit_of(plan: Plan) -> str:
    """What keeps ``plan`` from one step of length more."""
    longer = plan.at_length(plan.config.batch.seq_length + length_step(plan))
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
        for setting in _settings(replace(plan, every_layer=False)):
            found = _longest(setting, floor=tokens)
            if found:
                best, tokens = setting, found
    if best is None:
        return None
    for setting in _between(best):
        found = _longest(setting, floor=tokens)
        if found:
            best, tokens = setting, found
    limit = _limit(best, tokens)
    return LongestContext(replace(_fastest(best, tokens), every_layer=True), limit)


def _settings(plan: Plan) -> Iterator[Plan]:
    """All combinations that may be the longest, likely ones first; layers on the host are open.

    The smallest chunks, tiles and chunks of logits, no overlap and full recomputation take least of
    the GPU and no more of the host than their alternatives.
    """
    least = _with(plan, "parallel", heads_per_chunk=_chunks(plan.config)[0])
    least = _with(least, "parallel", cp_overlap=_overlaps(plan.config)[-1])
    least = _with(least, "memory", loss_chunk_size=_LOSS_CHUNKS[-1], sequence_tile_size=_TILES[-1])
    for optimization in reversed(_optimizations(plan.config)):
        shared = replace(least, config=replace(least.config, optimization=optimization))
        for park in (True, False):
            for num_layers in _group_sizes(plan.config):
                yield _with(
                    shared, "memory", recompute_granularity="full", park_during_attention=park,
                    recompute_num_layers=num_layers,
                )  # fmt: skip
        yield _plain(shared)


def _between(best: Plan) -> Iterator[Plan]:
    """``best`` with the group sizes between those that were tried."""
    if best.config.memory.recompute_granularity is None:
        return
    tried, now = sorted(_group_sizes(best.config)), best.config.memory.recompute_num_layers
    place = tried.index(now)
    low, high = tried[max(0, place - 1)], tried[min(place + 1, len(tried) - 1)]
    for num_layers in range(low + 1, high):
        yield _with(best, "memory", recompute_num_layers=num_layers)


def _fastest(best: Plan, tokens: int) -> Plan:
    """``best`` at ``tokens`` with every setting as fast as still fits, one after the other."""
    now = _placed(best, tokens)
    assert now is not None
    for options in (
        lambda plan: [
            replace(plan, config=replace(plan.config, optimization=each))
            for each in _optimizations(plan.config)
        ],
        lambda plan: [_plain(plan)],
        lambda plan: [_with(plan, "memory", recompute_granularity="selective")],
        lambda plan: [_with(plan, "memory", park_during_attention=False)],
        lambda plan: [
            _with(plan, "memory", recompute_num_layers=each)
            for each in range(1, plan.config.memory.recompute_num_layers)
        ],
        lambda plan: [_with(plan, "parallel", cp_overlap=each) for each in _overlaps(plan.config)],
        lambda plan: [
            _with(plan, "parallel", heads_per_chunk=each) for each in _chunks(plan.config)
        ],
        lambda plan: [_with(plan, "memory", sequence_tile_size=each) for each in _TILES],
        lambda plan: [_with(plan, "memory", loss_chunk_size=each) for each in _LOSS_CHUNKS],
    ):
        # Stable: of equally fast ones the first, which is the simpler one.
        others = sorted(
            options(now), key=lambda plan: round(plan.at_length(tokens).time.seconds, 3)
        )
        for other in others:
            placed = _placed(other, tokens)
            if placed is not None and placed.time.seconds <= now.time.seconds:
                now = placed
                break
    return now


def _longest(plan: Plan, floor: int) -> int:
    """The longest length above ``floor`` that fits with some layers on the host; 0 if none."""
    step = length_step(plan)
    low, high = floor // step, floor // step + 1
    while high * step < _LONGEST and _placed(plan, high * step) is not None:
        low, high = high, 2 * high
    if low * step <= floor:
        return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _placed(plan, middle * step) else (low, middle)
    return low * step


def _placed(plan: Plan, tokens: int) -> Plan | None:
    """``plan`` at that length with as few layers on the host as the GPU needs; None: none fits."""
    longer = _with(plan.at_length(tokens), "memory", cpu_offloading_num_layers=0)
    if fits(longer, with_host=False):
        return longer if longer.fits_host else None
    layers, is_streamed = longer.geometry.num_layers, longer.config.memory.recompute_granularity
    if not (is_streamed and fits(_offloaded(longer, layers), with_host=False)):
        return None
    low, high = 0, layers
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _offloaded(longer, middle).fits_device else (middle, high)
    placed = _offloaded(longer, high)
    return placed if placed.fits_host else None


def _limit(plan: Plan, tokens: int) -> str:
    """What a longer context lacks, wherever layers keep what they keep."""
    longer = plan.at_length(tokens + length_step(plan))
    none, every = (_offloaded(longer, n) for n in (0, longer.config.model.num_layers))
    if plan.config.memory.recompute_granularity is None:
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


def _overlaps(config: RunConfig) -> list[bool]:
    return [True, False] if config.parallel.num_ulysses_and_ring[0] > 1 else [True]


def _chunks(config: RunConfig) -> list[int]:
    heads = config.model.num_attention_heads // config.parallel.tensor_model_parallel_size
    return legal_heads_per_chunk(heads, config.parallel.num_ulysses_and_ring[0])


def _group_sizes(config: RunConfig) -> list[int]:
    """Powers of two and all layers; the likely ones first."""
    layers = config.model.num_layers
    sizes = {2**power for power in range(layers.bit_length()) if 2**power <= layers} | {layers}
    return sorted(sizes, key=lambda size: abs(size - 8))


def _offloaded(plan: Plan, num_layers: int) -> Plan:
    return _with(plan, "memory", cpu_offloading_num_layers=num_layers)


def _plain(plan: Plan) -> Plan:
    """``plan`` without streamed layers."""
    return _with(
        plan, "memory", recompute_granularity=None, recompute_num_layers=1,
        park_during_attention=False, cpu_offloading_num_layers=0,
    )  # fmt: skip


def _with(plan: Plan, part: str, **values: Any) -> Plan:
    changed = replace(getattr(plan.config, part), **values)
    return replace(plan, config=replace(plan.config, **{part: changed}))


def _written(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag] if value else []
    if value is None:
        return []
    return [flag, *map(str, value if isinstance(value, tuple) else [value])]
