"""Settings that make a run fit: those for "auto", and flags that trade time for memory."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from megatron_untied.config import MemoryConfig
from megatron_untied.config.run import RunConfig
from megatron_untied.context_parallel.head_schedule import legal_heads_per_chunk
from megatron_untied.planner.machine import GIB, Machine
from megatron_untied.planner.plan import Plan, fits, peak_bytes


@dataclass(frozen=True, kw_only=True)
class Change:
    """Other values in one part of the configuration, and the flags that set them."""

    flags: str = ""
    """Empty for the values that are there already, and for those that "auto" finds."""
    part: str = "memory"
    values: dict[str, Any] = field(default_factory=dict)


_UNCHANGED = Change()


def search(plan: Plan) -> tuple[list[str], Plan] | None:
    """The flags to change and the fastest plan that fits with them; None if nothing does.

    Of equally fast plans it is the one with the fewest changes. A setting of ``plan`` that is
    "auto" stays so: the plan returned is the one that a run with these flags chooses.
    """
    options = _options(plan.config)
    quick = replace(plan, every_layer=False)
    candidates = []
    for places in itertools.product(*(range(len(changes)) for changes in options)):
        candidate, flags = quick, []
        for changes, place in zip(options, places, strict=True):
            change = changes[place]
            candidate = candidate.with_settings(change.part, **change.values)
            flags += [change.flags] if change.flags else []
        memory = candidate.config.memory
        if memory.recompute_granularity is not None or not needs_streamed_layers(memory):
            seconds = round(candidate.time.seconds, 3)
            candidates.append((seconds, len(flags), places, flags, candidate))
    too_large: list[tuple[int, ...]] = []
    for _, _, places, flags, candidate in sorted(candidates, key=lambda found: found[:3]):
        # The values of an option take less and less memory, so a candidate that is not further in
        # any option than one that did not fit does not fit either. Memory is the slow part.
        if any(all(map(int.__le__, places, failed)) for failed in too_large):
            continue
        if not fits(candidate, with_host=False):
            too_large.append(places)
        elif candidate.fits_host:
            return flags, choose(_with_auto_of(plan.config, candidate.config), plan.machine)
    return None


def _with_auto_of(given: RunConfig, found: RunConfig) -> RunConfig:
    """``found`` with "auto" wherever ``given`` has it."""
    parallel, memory = found.parallel, found.memory
    if given.parallel.heads_per_chunk == "auto":
        parallel = replace(parallel, heads_per_chunk="auto")
    if given.memory.recompute_granularity == "auto":
        memory = replace(memory, recompute_granularity="auto")
    return replace(found, parallel=parallel, memory=memory)


def needs_streamed_layers(memory: MemoryConfig) -> bool:
    """Whether ``memory`` has settings that only layers with recomputation take."""
    return bool(
        memory.cpu_offloading_num_layers
        or memory.park_during_attention
        or memory.recompute_num_layers > 1
    )


def legal_chunks(config: RunConfig) -> list[int]:
    """Every value of ``--cp-heads-per-chunk``, smallest first."""
    heads = config.model.num_attention_heads // config.parallel.tensor_model_parallel_size
    return legal_heads_per_chunk(heads, config.parallel.num_ulysses_and_ring[0])


def _options(config: RunConfig) -> list[list[Change]]:
    """By setting: the value that is there, then others that take less and less of the device."""
    memory, parallel, layers = config.memory, config.parallel, config.model.num_layers
    groups = [n for n in (2, 4, 8) if memory.recompute_num_layers < n <= layers]
    on_host = [n for n in (layers // 2, layers) if n > memory.cpu_offloading_num_layers]
    legal = legal_chunks(config)
    middle = legal[(len(legal) - 1) // 2]
    if parallel.heads_per_chunk == "auto":
        chunks = [
            Change(part="parallel", values={"heads_per_chunk": u})
            for u in sorted({legal[0], middle, legal[-1]}, reverse=True)
        ]
    else:
        current = legal[-1] if parallel.heads_per_chunk == "all" else parallel.heads_per_chunk
        smaller = sorted({u for u in (legal[0], middle) if u < current}, reverse=True)
        chunks = [_UNCHANGED] + [
            Change(
                part="parallel", values={"heads_per_chunk": u}, flags=f"--cp-heads-per-chunk {u}"
            )
            for u in smaller
        ]
    overlaps = parallel.cp_overlap and parallel.num_ulysses_and_ring[0] > 1
    loss_chunk = memory.loss_chunk_size or config.batch.seq_length
    options = [
        [_UNCHANGED] + [
            Change(part=part, values={name: value}, flags=flag.format(value)) for value in values
        ]
        for part, name, flag, values in (
            ("memory", "recompute_num_layers", "--recompute-num-layers {}", groups),
            ("memory", "cpu_offloading_num_layers", "--cpu-offloading-num-layers {}", on_host),
            ("memory", "park_during_attention", "--park-during-attention",
             [] if memory.park_during_attention else [True]),
            ("parallel", "cp_overlap", "--no-cp-overlap", [False] if overlaps else []),
            ("memory", "sequence_tile_size", "--sequence-tile-size {}",
             [2048] if memory.sequence_tile_size > 2048 else []),
            ("memory", "loss_chunk_size", "--loss-chunk-size {}",
             [n for n in (8192, 2048) if n < loss_chunk][-1:]),
        )
    ]  # fmt: skip
    sharding = [_UNCHANGED, *_more_sharding(config)]
    return [list(_granularities(memory)), *options, chunks, sharding]


def _granularities(memory: MemoryConfig) -> Iterator[Change]:
    """None only where it is given; "selective" before "full", which takes less of the device."""
    given = memory.recompute_granularity
    names = [None, "selective", "full"] if given in (None, "auto") else ["selective", "full"]
    for name in names:
        is_named = given not in (name, "auto")
        yield Change(
            values={"recompute_granularity": name},
            flags=f"--recompute-granularity {name}" if is_named else "",
        )


def _more_sharding(config: RunConfig) -> Iterator[Change]:
    """Full sharding, then the optimizer on the host too; neither with Megatron's own layers."""
    optimization = config.optimization
    if config.transformer_impl != "local":
        return
    values = {"use_torch_fsdp2": True, "use_distributed_optimizer": False}
    flags = "--use-torch-fsdp2"
    if optimization.use_distributed_optimizer:
        flags += " instead of --use-distributed-optimizer"
    if not optimization.use_torch_fsdp2:
        yield Change(part="optimization", values=values, flags=flags)
    if not optimization.optimizer_cpu_offload:
        offload = "--optimizer-cpu-offload"
        yield Change(
            part="optimization",
            values=values | {"optimizer_cpu_offload": True},
            flags=offload if optimization.use_torch_fsdp2 else f"{flags} {offload}",
        )


def is_automatic(config: RunConfig) -> bool:
    """Whether a value is left to the planner."""
    return "auto" in (config.parallel.heads_per_chunk, config.memory.recompute_granularity)


def choose(config: RunConfig, machine: Machine) -> Plan:
    """The plan of ``config`` with the fastest values that fit in place of "auto".

    Raises:
        ValueError: if none fits, with the smallest peak and the memory that there is.
    """
    chosen = fastest(config, machine)
    if fits(chosen):
        return chosen
    raise ValueError(
        f"no automatic setting fits: the nearest takes {chosen.peak.num_bytes / GIB:.1f} of "
        f"{machine.device_bytes / GIB:.1f} GiB per GPU and {chosen.host.total() / GIB:.1f} of "
        f"{machine.host_bytes / GIB:.1f} GiB of host memory per rank; tools/plan_memory.py lists "
        "other flags that make it fit"
    )


def fastest(config: RunConfig, machine: Machine) -> Plan:
    """The fastest plan that fits with a value in place of each "auto"; if none fits, the nearest.

    A sequence that the kernel cannot index does not fit.
    """
    plans = [Plan(each, machine, every_layer=False) for each in candidates(config, machine)]
    fitting = (plan for plan in sorted(plans, key=lambda plan: plan.time.seconds) if fits(plan))
    return replace(next(fitting, None) or nearest(plans), every_layer=True)


def plan_stages(config: RunConfig, machine: Machine) -> list[Plan]:
    """A plan for every stage of a run, the fastest that fits where one does.

    Heads per exchange may be others in each stage. The recompute granularity is the same in all,
    because it decides what the layers are.
    """
    counts = [count for _, count in config.batches(0, config.loop.train_iters)]
    found = []
    for memory in dict.fromkeys(each.memory for each in candidates(config, machine)):
        stages = [
            fastest(replace(config.in_stage(number), memory=memory), machine)
            for number in range(len(config.stages))
        ]
        num_unfit = sum(not fits(plan) for plan in stages)
        seconds = sum(p.time.seconds * n for p, n in zip(stages, counts, strict=True))
        found.append((num_unfit, seconds, stages))
    return min(found, key=itemgetter(0, 1))[2]


def describe_stage(plan: Plan, number: int) -> str:
    """One line on stage ``number``, from 0, of the run that ``plan`` is a stage of."""
    stages, batch = plan.config.stages, plan.config.batch
    return (
        f"stage {number + 1} of {len(stages)}, after iteration {stages[number].first_iteration}: "
        f"{batch.global_batch_size} x {batch.seq_length:,} tokens, {settings(plan)} | {sizes(plan)}"
    )


def nearest(plans: Sequence[Plan]) -> Plan:
    """Of plans that do not fit, the one that lacks the fewest bytes of GPU and host together."""

    def lacking(plan: Plan) -> float:
        on_host = plan.host.total() - plan.machine.host_bytes
        return max(0, peak_bytes(plan) - plan.machine.device_bytes) + max(0, on_host)

    return min(plans, key=lambda plan: (lacking(plan), peak_bytes(plan)))


def candidates(config: RunConfig, machine: Machine) -> Iterator[RunConfig]:
    """``config`` with every value that "auto" may become; larger chunks first."""
    parallel, memory = config.parallel, config.memory
    chunks, granularities = [parallel.heads_per_chunk], [memory.recompute_granularity]
    if chunks == ["auto"]:
        chunks = legal_chunks(config)[::-1]
    if granularities == ["auto"]:
        plain = [] if needs_streamed_layers(memory) else [None]
        granularities = [*plain, "selective", "full"]
    for granularity, heads_per_chunk in itertools.product(granularities, chunks):
        yield replace(
            config,
            parallel=replace(parallel, heads_per_chunk=heads_per_chunk),
            memory=replace(memory, recompute_granularity=granularity),
        )


def describe(plan: Plan) -> str:
    """One line on what was chosen, in flags."""
    found = "planned" if plan.fits else "no automatic setting fits, the nearest is"
    assumed = f" | assumed: {plan.machine.gpu.assumed}" if plan.machine.gpu.assumed else ""
    return f"{found}: {settings(plan)} | {sizes(plan)}{assumed}"


def settings(plan: Plan) -> str:
    """The settings that may be automatic."""
    granularity = plan.config.memory.recompute_granularity
    recompute = f"--recompute-granularity {granularity}" if granularity else "no recomputation"
    return f"--cp-heads-per-chunk {plan.config.parallel.heads_per_chunk}, {recompute}"


def sizes(plan: Plan) -> str:
    """The peak and the host memory, with what there is after the reserve."""
    machine = plan.machine
    return (
        f"{plan.peak.num_bytes / GIB:.1f} of {machine.device_bytes / GIB:.1f} GiB per GPU, "
        f"{plan.host.total() / GIB:.1f} of {machine.host_bytes / GIB:.1f} GiB of host memory per "
        "rank"
    )
