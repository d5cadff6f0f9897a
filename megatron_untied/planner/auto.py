"""Settings that a run leaves to the planner: the fastest that fits."""

from collections.abc import Iterator
from dataclasses import replace

from megatron_untied.context_parallel.head_schedule import legal_heads_per_chunk
from megatron_untied.planner.machine import GIB, Machine
from megatron_untied.planner.plan import Plan
from megatron_untied.training.config import RunConfig


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
