"""Settings left to the planner ("auto"): the fastest that fit the memory of a machine.

Tile, chunk of the loss and overlap alone need no machine: :func:`.geometry.by_sizes`.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_untied.config import MemoryConfig
from megatron_untied.config.run import RunConfig
from megatron_untied.context_parallel.head_schedule import legal_heads_per_chunk
from megatron_untied.planner.geometry import by_sizes
from megatron_untied.planner.machine import GIB, Machine
from megatron_untied.planner.plan import Plan, fits, peak_bytes

OPEN = (
    ("parallel", "heads_per_chunk"),
    ("parallel", "cp_overlap"),
    ("memory", "recompute_granularity"),
    ("memory", "sequence_tile_size"),
    ("memory", "loss_chunk_size"),
)
"""Parts and fields of a configuration that may be "auto"."""


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


def is_automatic(config: RunConfig) -> bool:
    """Whether a value is left to the planner."""
    return "auto" in (config.parallel.heads_per_chunk, config.memory.recompute_granularity)


def choose(config: RunConfig, machine: Machine) -> Plan:
    """The plan of ``config`` with the fastest values that fit in place of "auto".

    Raises:
        ValueError: if none fits, with the smallest peak and the memory that there is.
    """
    plans = [Plan(each, machine, every_layer=False) for each in candidates(config, machine)]
    # A sequence that the kernel cannot index with these heads per chunk does not fit either.
    fitting = (plan for plan in sorted(plans, key=lambda plan: plan.time.seconds) if fits(plan))
    chosen = next(fitting, None)
    if chosen is not None:
        return replace(chosen, every_layer=True)
    least = nearest(plans)
    raise ValueError(
        f"no automatic setting fits: the nearest takes {least.peak.num_bytes / GIB:.1f} of "
        f"{machine.device_bytes / GIB:.1f} GiB per GPU and {least.host.total() / GIB:.1f} of "
        f"{machine.host_bytes / GIB:.1f} GiB of host memory per rank; tools/plan_memory.py lists "
        "other flags that make it fit"
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
        yield by_sizes(
            replace(
                config,
                parallel=replace(parallel, heads_per_chunk=heads_per_chunk),
                memory=replace(memory, recompute_granularity=granularity),
            )
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
