"""The planner against the tracer, which runs the real step on tensors without memory.

Layers of Llama 3 8B's and other models' shape, few of them. The buffers of attention and the host
arena are planned from the same plans that the run takes them from: they agree to the byte, phase
by phase. The rest are closed forms: peak and host bytes agree within 1%.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import pytest

from megatron_untied.phases import MemoryCategory, Phase
from megatron_untied.planner.activations import memory_plan
from megatron_untied.planner.buffer_table import memories_of
from megatron_untied.planner.machine import read_gpus
from megatron_untied.planner.plan import Plan
from megatron_untied.planner.weights import ShardedWeights
from megatron_untied.streaming.memory_plan import MemoryPlan
from megatron_untied.tracing.step import StepTrace, trace_step
from tests.support.planning import machine, run_config

COMMON = (
    "--model llama3-8b --num-layers 4 --seq-length 131072 --bf16 --context-parallel-size 8 "
    "--loss-chunk-size 2048 --eval-iters 0 "
)
SHARDED = COMMON + "--use-torch-fsdp2 "
FULL, SELECTIVE = (
    SHARDED + f"--recompute-granularity {each} --cp-heads-per-chunk 8 "
    for each in ("full", "selective")
)
ON_HOST = SELECTIVE + "--no-cp-overlap --cpu-offloading-num-layers 4 "
TENSOR = "--context-parallel-size 4 --tensor-model-parallel-size 2 --cp-heads-per-chunk 4 "
FAST = {
    "selective, overlapped": SELECTIVE,
    "parked": ON_HOST + "--park-during-attention",
    "groups of full, some on the host": FULL
    + "--recompute-num-layers 3 --num-layers 6 --cpu-offloading-num-layers 4",
    "some outputs kept": ON_HOST
    + "--num-layers 6 --recompute-num-layers 4 --attention-output-layers 3",
    "plain": SHARDED + "--cp-heads-per-chunk 8",
    "adapters, parked": ON_HOST + "--park-during-attention --lora-rank 16",
    "two layers without a backward": SELECTIVE
    + "--recompute-num-layers 2 --cpu-offloading-num-layers 3 "
    "--freeze embedding.* decoder.layers.[01].*",
    "distributed optimizer": COMMON
    + "--use-distributed-optimizer --recompute-granularity selective --cp-heads-per-chunk 16",
}
SHORT = "--num-layers 2 --sequence-tile-size 2048 --loss-chunk-size 256 "
BY_KERNEL = {
    f"{kernel}, shared heads": SELECTIVE
    + SHORT
    + f"--cp-heads-per-chunk all --attention-backend {kernel}"
    for kernel in ("flash-attention-4", "flash-attention-2", "torch-flash", "fused")
}
"""Settings whose peak is in attention, where kernels differ."""
SLOW_BY_KERNEL = {
    name.replace("shared", more): flags + f" {added}"
    for name, flags in BY_KERNEL.items()
    for more, added in {
        "two samples, shared": "--micro-batch-size 2 --seq-length 65536",
        "recomputed, shared": "--recompute-granularity full --cp-heads-per-chunk 16",
        "single": "--cp-heads-per-chunk 8 --no-cp-overlap --cpu-offloading-num-layers 2",
    }.items()
}
SLOW = {
    "full, one exchange": FULL + "--cp-heads-per-chunk all",
    "selective on the host": ON_HOST,
    "optimizer on the host": ON_HOST + "--optimizer-cpu-offload --park-during-attention",
    "selective, 2 heads a rank": SELECTIVE + "--cp-heads-per-chunk 16",
    "full, parked, nothing kept on the host": FULL + "--park-during-attention",
    "groups of selective": SELECTIVE + "--recompute-num-layers 4 --num-layers 8",
    "groups, parked, some on the host": SELECTIVE
    + "--recompute-num-layers 3 --num-layers 6 --cpu-offloading-num-layers 4 "
    "--park-during-attention",
    "adapters, full": FULL + "--lora-rank 64 --lora-targets q_proj v_proj --recompute-num-layers 2",
    "adapters, sequence parallel": SELECTIVE + TENSOR + "--sequence-parallel --lora-rank 16",
    "adapters, optimizer on the host": ON_HOST
    + "--optimizer-cpu-offload --park-during-attention --lora-rank 16",
    "frozen ends": FULL + "--freeze embedding.* output_layer.*",
    "frozen MLP": SELECTIVE + "--freeze *.mlp.*",
    "frozen and tied": SELECTIVE + "--model llama3.2-1b --num-layers 4 --freeze embedding.*",
    "some outputs kept, parked": ON_HOST
    + "--num-layers 6 --recompute-num-layers 2 --attention-output-layers 3 --park-during-attention",
    "some outputs kept on the device": SELECTIVE
    + "--num-layers 7 --recompute-num-layers 3 --attention-output-layers 2 "
    "--cpu-offloading-num-layers 3",
    "sizes by default, long": SELECTIVE
    + "--seq-length 1048576 --loss-chunk-size auto --attention-output-layers 1",
    "long": ON_HOST + "--seq-length 1048576",
    "long, parked": ON_HOST + "--seq-length 1048576 --park-during-attention",
    "long, plain": SHARDED + "--seq-length 524288 --loss-chunk-size 256 --cp-heads-per-chunk all",
    "small tiles": ON_HOST + "--sequence-tile-size 512",
    "one tile": SELECTIVE + "--sequence-tile-size 65536",
    "two samples": SELECTIVE + "--micro-batch-size 2",
    "micro-batches": SELECTIVE + "--context-parallel-size 4 --global-batch-size 4",
    "ring": SELECTIVE + "--cp-comm-type p2p --cp-heads-per-chunk 4",
    "ring of groups": SELECTIVE
    + "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4 --no-cp-overlap",
    "ring of two, parked": ON_HOST
    + "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 2 --park-during-attention "
    "--seq-length 1048576",
    "ring of two, overlapped": SELECTIVE
    + "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 2 --seq-length 524288",
    "tensor parallel": SELECTIVE + TENSOR,
    "one rank": SELECTIVE + "--context-parallel-size 1 --cp-heads-per-chunk 4 --seq-length 16384",
    "tied": SELECTIVE + "--model llama3.2-1b --num-layers 4",
    "qkv bias, 28 heads": SELECTIVE + "--model qwen2.5-7b --num-layers 4",
    "query and key norms, wide heads": SELECTIVE
    + "--model qwen3-32b --num-layers 2 --cp-heads-per-chunk 16",
    "plain distributed optimizer": COMMON + "--use-distributed-optimizer --cp-heads-per-chunk 8",
    "no sharding": COMMON + "--recompute-granularity full --cp-heads-per-chunk 8",
}
SEQUENCE_PARALLEL = {
    "streamed": SELECTIVE + TENSOR + "--sequence-parallel --cpu-offloading-num-layers 2",
    "plain": SHARDED + TENSOR + "--sequence-parallel",
}


class Counted(NamedTuple):
    peak: int
    by_phase: dict[str, int]
    host: int
    workspace: dict[str, dict[str, int]]
    """By phase: the buffers that are alive at its highest moment, by memory."""


def trace_cases(cases: dict[str, str]) -> dict[str, Counted]:
    """In another process, which megatron-core may leave its buffers in."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(_trace_cases, cases).result()


def _trace_cases(cases: dict[str, str]) -> dict[str, Counted]:
    found = {}
    for name, flags in cases.items():
        size = ranks_of(flags)
        trace = trace_step(run_config(flags, world_size=size), world_size=size)
        by_phase = {phase: peak.num_bytes for phase, peak in trace.peak_by_phase.items()}
        found[name] = Counted(trace.peak.num_bytes, by_phase, trace.host_bytes, workspace_of(trace))
    return found


def workspace_of(trace: StepTrace) -> dict[str, dict[str, int]]:
    prefix = "workspace: "
    return {
        phase: {
            category.removeprefix(prefix): num_bytes
            for category, num_bytes in peak.by_category.items()
            if category.startswith(prefix)
        }
        for phase, peak in trace.peak_by_phase.items()
    }


def _trace_evaluations(names: tuple[str, ...]) -> dict[str, int]:
    found = {}
    for name in names:
        size = ranks_of(FAST[name])
        config = run_config(FAST[name], world_size=size)
        found[name] = trace_step(config, world_size=size, evaluates=True).num_bytes
    return found


def ranks_of(flags: str) -> int:
    return 1 if "--context-parallel-size 1 " in flags else 8


def check(flags: str, traced: Counted) -> Plan:
    size = ranks_of(flags)
    config = run_config(flags, world_size=size)
    # The GPU does not matter to bytes, except that it must have the kernel.
    gpu = read_gpus()["b200" if "flash-attention-4" in flags else "h100-80"]
    plan = Plan(config, machine(gpus_per_node=size, gpu=gpu))
    assert plan.peak.num_bytes == pytest.approx(traced.peak, rel=0.01)
    geometry = plan.geometry
    host = ShardedWeights.of(geometry).on_host().total()
    if config.memory.recompute_granularity is not None:
        streamed = memory_plan(geometry, rank=0)
        host += streamed.host_arena().reserved_bytes
        check_workspace(streamed, traced)
    # The steps of an optimizer on the host are a number for each parameter.
    assert host == pytest.approx(traced.host, abs=1024)
    return plan


def check_workspace(plan: MemoryPlan, traced: Counted) -> None:
    """Every phase's buffers are those of some layer, to the byte."""
    planned: dict[str, list[dict[str, int]]] = {}
    for phase, _, held in plan.workspace():
        sizes = {name: buffer.num_bytes for name, buffer in held.items() if buffer.num_bytes}
        planned.setdefault(phase, []).append(sizes)
    for phase, layers in planned.items():
        assert traced.workspace[phase] in layers, phase


@pytest.fixture(scope="module")
def traces():
    return trace_cases(FAST)


@pytest.mark.parametrize("name", FAST)
def test_peak_and_host_bytes_are_those_of_the_traced_step(traces, name):
    check(FAST[name], traces[name])


def test_the_peak_of_an_evaluation_is_that_of_the_traced_forward():
    names = "selective, overlapped", "parked", "distributed optimizer"
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        traced = executor.submit(_trace_evaluations, names).result()
    for name in names:
        plan = Plan(run_config(FAST[name]), machine())
        assert plan.evaluation_peak.num_bytes == pytest.approx(traced[name], rel=0.01), name
        assert plan.evaluation_peak.num_bytes < 0.7 * plan.peak.num_bytes


@pytest.fixture(scope="module")
def traces_by_kernel():
    return trace_cases(BY_KERNEL)


@pytest.mark.parametrize("name", BY_KERNEL)
def test_peak_bytes_are_those_of_the_traced_step_whatever_the_kernel(traces_by_kernel, name):
    check_attention(BY_KERNEL[name], traces_by_kernel[name])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_peak_bytes_of_more_runs_whatever_the_kernel():
    for name, traced in trace_cases(SLOW_BY_KERNEL).items():
        check_attention(SLOW_BY_KERNEL[name], traced)


def check_attention(flags: str, traced: Counted) -> None:
    """The whole step, and both phases in which a kernel allocates."""
    plan = check(flags, traced)
    # Where a forward allocates nothing in its kernel, a chunk's projection is its highest moment,
    # of which the planner's form is a little too high.
    for phase, rel in ((Phase.ATTENTION_FORWARD, 0.03), (Phase.ATTENTION_BACKWARD, 0.01)):
        assert plan.phases[phase].num_bytes == pytest.approx(traced.by_phase[phase], rel=rel)


@pytest.fixture(scope="module")
def more_traces():
    return trace_cases(SLOW)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SLOW)
def test_peak_and_host_bytes_of_more_runs(more_traces, name):
    check(SLOW[name], more_traces[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SEQUENCE_PARALLEL)
def test_peak_and_host_bytes_with_sequence_parallelism(name):
    flags = SEQUENCE_PARALLEL[name]
    check(flags, trace_cases({name: flags})[name])


@pytest.mark.parametrize("name", ["selective, overlapped", "parked"])
def test_the_table_of_buffers_lists_what_the_tracer_counts(traces, name):
    """In backward, where every phase holds what phases before it left."""
    memories = memories_of(Plan(run_config(FAST[name]), machine()))
    outside = {"residual", "kernel_fp32_dq", "dk_dv"}  # not in the workspace
    for phase in (Phase.MLP_BACKWARD, Phase.ATTENTION_BACKWARD, Phase.QKV_BACKWARD):
        listed = {
            memory: each.bytes_by_phase[phase]
            for memory, each in memories.items()
            if phase in each.bytes_by_phase and memory not in outside
        }
        assert listed == traces[name].workspace[phase], phase


def test_a_wrong_form_would_be_noticed(traces):
    """A tenth of the largest category of a small step is more than the tolerance."""
    plan = Plan(run_config(FAST["parked"]), machine())
    assert plan.peak.by_category[MemoryCategory.TILES] > 0.1 * plan.peak.num_bytes
    assert plan.peak.num_bytes == pytest.approx(traces["parked"].peak, rel=0.001)
