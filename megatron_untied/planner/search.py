"""Which flags would make a run fit: a search over those that trade memory for time."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_untied.config.run import RunConfig
from megatron_untied.context_parallel.head_schedule import legal_heads_per_chunk
from megatron_untied.planner.machine import GIB, Machine
from megatron_untied.planner.plan import Plan


@dataclass(frozen=True)
class Change:
    """One flag set to another value; ``flag`` is empty for the value that is there already."""

    flag: str
    apply: Callable[[RunConfig], RunConfig]


def search(plan: Plan) -> tuple[list[str], Plan] | None:
    """The flags to change and the fastest plan that fits with them; None if nothing does.

    Of equally fast ones it is that with the fewest changes.
    """
    options = list(_options(plan.config))
    tried = []
    for places in itertools.product(*(range(len(each)) for each in options)):
        changes = [option[place] for option, place in zip(options, places, strict=True)]
        config = plan.config
        for change in changes:
            config = change.apply(config)
        flags = [change.flag for change in changes if change.flag]
        if _makes_sense(config):
            candidate = Plan(config, plan.machine, every_layer=False)
            tried.append((round(candidate.time.seconds, 3), len(flags), places, flags, candidate))
    too_large: list[tuple[int, ...]] = []
    for _, _, places, flags, candidate in sorted(tried, key=lambda each: each[:3]):
        if any(all(map(int.__le__, places, other)) for other in too_large):
            continue  # it saves less in every respect than one that did not fit
        if not candidate.fits_device:
            too_large.append(places)
        elif candidate.fits_host:
            return flags, replace(candidate, every_layer=True)
    return None


def _makes_sense(config: RunConfig) -> bool:
    """Flags of streamed layers need them."""
    memory = config.memory
    asks = (
        memory.cpu_offloading_num_layers
        or memory.park_during_attention
        or memory.recompute_num_layers > 1
    )
    return memory.recompute_granularity is not None or not asks


def _options(config: RunConfig) -> Iterator[list[Change]]:
    """By flag: the value that is there, then others that take less and less of the device."""
    memory, parallel, layers = config.memory, config.parallel, config.model.num_layers
    yield _values(
        "memory", "recompute_granularity", "--recompute-granularity", ["selective", "full"], memory
    )
    groups = [n for n in (2, 4, 8) if memory.recompute_num_layers < n <= layers]
    yield _values("memory", "recompute_num_layers", "--recompute-num-layers", groups, memory)
    offloaded = [n for n in (layers // 2, layers) if n > memory.cpu_offloading_num_layers]
    yield _values(
        "memory", "cpu_offloading_num_layers", "--cpu-offloading-num-layers", offloaded, memory
    )
    parks = [] if memory.park_during_attention else [True]
    yield _values("memory", "park_during_attention", "--park-during-attention", parks, memory)
    heads = config.model.num_attention_heads // parallel.tensor_model_parallel_size
    legal = legal_heads_per_chunk(heads, parallel.num_ulysses_and_ring[0])
    now = legal[-1] if parallel.heads_per_chunk == "all" else parallel.heads_per_chunk
    smaller = sorted({u for u in (legal[0], legal[(len(legal) - 1) // 2]) if u < now}, reverse=True)
    yield _values("parallel", "heads_per_chunk", "--cp-heads-per-chunk", smaller, parallel)
    overlaps = [False] if parallel.cp_overlap and parallel.num_ulysses_and_ring[0] > 1 else []
    yield _values("parallel", "cp_overlap", "--no-cp-overlap", overlaps, parallel)
    tiles = [2048] if memory.sequence_tile_size > 2048 else []
    yield _values("memory", "sequence_tile_size", "--sequence-tile-size", tiles, memory)
    chunk = memory.loss_chunk_size or config.batch.seq_length
    chunks = [n for n in (8192, 2048) if n < chunk][-1:]
    yield _values("memory", "loss_chunk_size", "--loss-chunk-size", chunks, memory)
    yield [_KEEP, *_sharding(config)]


def _sharding(config: RunConfig) -> Iterator[Change]:
    optimization = config.optimization
    if config.transformer_impl != "local":
        return
    full = {"use_torch_fsdp2": True, "use_distributed_optimizer": False}
    instead = " instead of --use-distributed-optimizer"
    note = instead if optimization.use_distributed_optimizer else ""
    if not optimization.use_torch_fsdp2:
        yield Change(f"--use-torch-fsdp2{note}", _replacing("optimization", full))
    if not optimization.optimizer_cpu_offload:
        sharded = "" if optimization.use_torch_fsdp2 else f"--use-torch-fsdp2{note} "
        both = full | {"optimizer_cpu_offload": True}
        yield Change(f"{sharded}--optimizer-cpu-offload", _replacing("optimization", both))


def _values(part: str, name: str, flag: str, values: list, holder: Any) -> list[Change]:
    values = [value for value in values if value != getattr(holder, name)]
    written = [flag if isinstance(value, bool) else f"{flag} {value}" for value in values]
    changes = (_replacing(part, {name: value}) for value in values)
    return [_KEEP, *map(Change, written, changes)]


def _replacing(part: str, values: dict[str, Any]) -> Callable[[RunConfig], RunConfig]:
    def apply(config: RunConfig) -> RunConfig:
        return replace(config, **{part: replace(getattr(config, part), **values)})

    return apply


_KEEP = Change("", lambda config: config)


def is_automatic(config: RunConfig) -> bool:
    """Whether a value is left to the planner."""
    return "auto" in (config.parallel.heads_per_chunk, config.memory.recompute_granularity)


def choose(config: RunConfig, machine: Machine) -> Plan:
    """The plan of ``config`` with the fastest values that fit in place of "auto".

    Raises:
        ValueError: if none fits, with the smallest peak and what it is short of.
    """
    plans = [Plan(each, machine, every_layer=False) for each in candidates(config, machine)]
    fitting = (plan for plan in sorted(plans, key=lambda plan: plan.time.seconds) if plan.fits)
    chosen = next(fitting, None)
    if chosen is not None:
        return replace(chosen, every_layer=True)
    least = min(plans, key=lambda plan: plan.peak.num_bytes)
    raise ValueError(
        f"no automatic setting fits: the smallest takes {least.peak.num_bytes / GIB:.1f} of "
        f"{machine.device_bytes / GIB:.1f} GiB on a GPU and {least.host.total() / GIB:.1f} of "
        f"{machine.host_bytes / GIB:.1f} GiB a rank on the host; tools/plan_memory.py says which "
        "other flags would"
    )


def candidates(config: RunConfig, machine: Machine) -> Iterator[RunConfig]:
    """``config`` with every value that "auto" may become; larger chunks first."""
    parallel, memory = config.parallel, config.memory
    heads = config.model.num_attention_heads // parallel.tensor_model_parallel_size
    chunks, granularities = [parallel.heads_per_chunk], [memory.recompute_granularity]
    if chunks == ["auto"]:
        chunks = legal_heads_per_chunk(heads, parallel.num_ulysses_and_ring[0])[::-1]
    if granularities == ["auto"]:
        needs_streaming = (
            memory.cpu_offloading_num_layers
            or memory.park_during_attention
            or memory.recompute_num_layers > 1
        )
        granularities = ["selective", "full"] if needs_streaming else [None, "selective", "full"]
    for granularity in granularities:
        for heads_per_chunk in chunks:
            yield replace(
                config,
                parallel=replace(parallel, heads_per_chunk=heads_per_chunk),
                memory=replace(memory, recompute_granularity=granularity),
            )


def describe(plan: Plan) -> str:
    """One line on what was chosen, in flags."""
    config, machine = plan.config, plan.machine
    granularity = config.memory.recompute_granularity
    recompute = f"--recompute-granularity {granularity}" if granularity else "no recomputation"
    assumed = f" | assumed: {machine.gpu.assumed}" if machine.gpu.assumed else ""
    return (
        f"planned: --cp-heads-per-chunk {config.parallel.heads_per_chunk}, {recompute} | "
        f"{plan.peak.num_bytes / GIB:.1f} of {machine.device_bytes / GIB:.1f} GiB on a GPU, "
        f"{plan.host.total() / GIB:.1f} of {machine.host_bytes / GIB:.1f} GiB a rank on the host"
        + assumed
    )
