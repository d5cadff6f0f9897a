"""Flags that make a run fit, and the longest context that any flags allow."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_untied.config.run import OptimizationConfig, RunConfig
from megatron_untied.planner.automatic import (
    OPEN,
    choose,
    fits_somehow,
    flags_of,
    is_automatic,
    nearest,
    opened,
    ranked,
    seconds_of,
    settings,
    sizes,
    use_of_least,
    ways_to_save,
)
from megatron_untied.planner.geometry import by_sizes
from megatron_untied.planner.machine import Machine
from megatron_untied.planner.plan import Plan, fits, length_step

_LONGEST = 1 << 40
_AS_FAST = 1.01
"""Times the fastest step that a plan with fewer changes may take."""

GPU, HOST, KERNEL = "GPU memory", "host memory", "the index limit of the attention kernel"


def search(plan: Plan) -> tuple[list[str], Plan] | None:
    """The flags to change and the fastest plan that fits with them; None if nothing does.

    What changes little is left as it is. A setting of ``plan`` that is "auto" stays so: the plan
    returned is the one that a run with these flags chooses.
    """
    given, best = plan.config, None
    for optimization in optimizations(given):
        other = opened(replace(given, optimization=optimization))
        below = math.inf if best is None else seconds_of(best)
        best = next(iter(ranked(other, plan.machine, only_fastest=True, below=below)), best)
    if best is None:
        return None
    quick, most = replace(best, every_layer=False), _AS_FAST * best.time.seconds
    fields, before = list(OPEN), by_sizes(given)
    while fields:
        part, name = fields.pop()
        value = getattr(getattr(before, part), name)
        if value in ("auto", getattr(getattr(quick.config, part), name)):
            continue
        back = quick.with_settings(part, **{name: value})
        if _is_valid(back.config) and fits(back) and back.time.seconds <= most:
            quick, fields = back, list(OPEN)  # others may follow now
    found = _with_auto_of(given, quick.config)
    changed = [
        (part, name)
        for part, name in OPEN
        if getattr(getattr(found, part), name) != getattr(getattr(before, part), name)
        and getattr(getattr(found, part), name) != "auto"
    ]
    return [*_flags(found, changed), *_more_sharding(given, found)], choose(found, plan.machine)


def _is_valid(config: RunConfig) -> bool:
    """Whether flags can say it: without streamed layers they have no settings, and "full" no O."""
    memory = config.memory
    if memory.recompute_granularity == "selective":
        return True
    plain = memory.recompute_num_layers == 1 and not (
        memory.cpu_offloading_num_layers or memory.park_during_attention
    )
    return memory.attention_output_layers is None and (
        memory.recompute_granularity is not None or plain
    )


def _flags(config: RunConfig, fields: list[tuple[str, str]]) -> list[str]:
    """The words that set ``fields``, a flag with its value in one."""
    return [" ".join(words) for field in fields if (words := flags_of(config, [field]))]


def _with_auto_of(given: RunConfig, found: RunConfig) -> RunConfig:
    """``found`` with "auto" wherever ``given`` has it, but for sizes that had to be changed."""
    settled = by_sizes(given)
    for part, name in OPEN:
        was, start, is_now = (getattr(getattr(x, part), name) for x in (given, settled, found))
        if was == "auto" and start in ("auto", is_now):
            found = replace(found, **{part: replace(getattr(found, part), **{name: "auto"})})
    return found


def _more_sharding(given: RunConfig, found: RunConfig) -> Iterator[str]:
    before, after = given.optimization, found.optimization
    if after.use_torch_fsdp2 and not before.use_torch_fsdp2:
        instead = " instead of --use-distributed-optimizer" * before.use_distributed_optimizer
        yield f"--use-torch-fsdp2{instead}"
    if after.optimizer_cpu_offload and not before.optimizer_cpu_offload:
        yield "--optimizer-cpu-offload"


def optimizations(config: RunConfig) -> list[OptimizationConfig]:
    """As given, then what takes less of the device; only that with Megatron's own layers."""
    given = config.optimization
    if config.transformer_impl != "local":
        return [given]
    full = replace(given, use_torch_fsdp2=True, use_distributed_optimizer=False)
    both = replace(full, optimizer_cpu_offload=True)
    less = [both] if given.optimizer_cpu_offload else [full, both]
    return list(dict.fromkeys([given, *less]))


@dataclass(frozen=True)
class LongestContext:
    """A plan at the longest length that fits, and what a longer one would lack."""

    plan: Plan
    tokens: int
    limit: str


def longest_context(plans: list[Plan]) -> LongestContext | None:
    """The longest context of any of ``plans`` with all settings open; None if nothing fits.

    Args:
        plans: one for each way to split ranks; lengths and searched settings of their
            configurations do not count.
    """
    every = [
        replace(plan, config=opened(replace(plan.config, optimization=each)), every_layer=False)
        for plan in plans
        for each in reversed(optimizations(plan.config))
    ]
    tokens, best = longest_open(every)
    if best is None:
        return None
    # At this length the fastest of all that fit; other ways to shard seldom do.
    machine, fastest = best.machine, None
    for each in sorted(every, key=lambda plan: plan is not best):
        if tokens % length_step(each):
            continue
        below = math.inf if fastest is None else seconds_of(fastest)
        found = ranked(each.at_length(tokens).config, machine, only_fastest=True, below=below)
        fastest = next(iter(found), fastest)
    assert fastest is not None
    return LongestContext(fastest, tokens, limit_of(every, tokens))


def longest_open(plans: list[Plan]) -> tuple[int, Plan | None]:
    """The longest sequence that one of ``plans`` fits with any values for "auto", and that plan."""
    best, tokens = None, 0
    for plan in plans:
        # The last ways save least: others then are seldom more than one plan.
        for number in reversed(range(len(ways_to_save(plan)))):
            found = _longest_of_way(plan, number, tokens)
            best, tokens = (plan, found) if found > tokens else (best, tokens)
    return tokens, best


def _longest_of_way(plan: Plan, number: int, known: int) -> int:
    """The longest sequence above ``known`` tokens that a way to save fits; ``known``: none.

    Memory grows nearly by a straight line, which tells where to look: a few lengths instead of one
    for every bit.
    """
    step = length_step(plan)

    def use(length: int) -> tuple[bool, float]:
        return use_of_least(ways_to_save(plan.at_length(length * step))[number])

    low, high = known // step + 1, _LONGEST // step  # in steps
    fits_now, share = use(low)
    if not fits_now:
        return known
    before, last, near = (0, 0.0), (low, share), 1
    while high - low > 1:
        slope = (last[1] - before[1]) / (last[0] - before[0])
        guess = low + (high - low) // 2
        if 0 < slope < math.inf:
            guess = int(last[0] + (1 - last[1]) / slope)
        if not low < guess < high:
            # Close to the end that the line points to, and farther every time.
            away = min(near, (high - low) // 2)
            guess, near = low + away if guess <= low else high - away, 4 * near
        fits_now, share = use(guess)
        low, high = (guess, high) if fits_now else (low, guess)
        before, last = last, (guess, share)
    return low * step


def limit_of(plans: list[Plan], tokens: int) -> str:
    """What a context longer than ``tokens`` lacks, whatever of ``plans`` and of "auto" it takes."""

    def longer_fits(**more: float) -> bool:
        return any(
            fits_somehow(
                replace(plan, machine=replace(plan.machine, **more)).at_length(
                    (tokens // length_step(plan) + 1) * length_step(plan)
                )
            )
            for plan in plans
        )

    gpu, host = {"gpu_memory_gib": 1e9}, {"host_memory_gib": 1e9}
    if not longer_fits(**gpu, **host):
        return KERNEL
    lacking = [GPU] * longer_fits(**gpu) + [HOST] * longer_fits(**host)
    # Either would do: settings trade one for the other.
    return (
        f"{' and '.join(lacking)} together"
        if len(lacking) == 2
        else (lacking[0] if lacking else f"{GPU} and {HOST}")
    )


def with_unlimited_host(plan: Plan) -> Plan:
    """``plan`` on a machine whose host has no limit."""
    machine: Machine = replace(plan.machine, host_memory_gib=1e9)
    return replace(plan, machine=machine)


def plan_stages(config: RunConfig, machine: Machine) -> list[Plan]:
    """A plan for every stage of a run; where nothing fits the one that lacks least.

    What is left to the planner is chosen for the longest stage, as it is built into the model, and
    the others have the same. Heads per exchange are chosen for each.
    """

    def plan(stage: RunConfig) -> Plan:
        if not is_automatic(stage):
            return Plan(by_sizes(stage), machine)
        found = ranked(stage, machine, only_fastest=True)
        return found[0] if found else nearest(stage, machine)

    stages = [config.in_stage(number) for number in range(len(config.stages))]
    longest = by_sizes(plan(max(stages, key=lambda each: each.batch.seq_length)).config)
    return [
        plan(
            replace(
                stage,
                memory=longest.memory,
                parallel=replace(longest.parallel, heads_per_chunk=stage.parallel.heads_per_chunk),
            )
        )
        for stage in stages
    ]


def describe_stage(plan: Plan, number: int) -> str:
    """One line on stage ``number``, from 0, of the run that ``plan`` is a stage of."""
    stages, batch = plan.config.stages, plan.config.batch
    return (
        f"stage {number + 1} of {len(stages)}, after iteration {stages[number].first_iteration}: "
        f"{batch.global_batch_size} x {batch.seq_length:,} tokens, {settings(plan)} | {sizes(plan)}"
    )
