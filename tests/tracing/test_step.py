"""What a trace counts is what a real step takes, to the byte."""

import pytest

from megatron_untied.phases import MemoryCategory, Phase
from megatron_untied.tracing.step import StepTracer
from megatron_untied.training.initialize import make_groups
from tests.support.ranks import run_on_ranks
from tests.support.traces import config_of, trace_all

STREAMED = "--context-parallel-size 2 --cp-heads-per-chunk 2 --sequence-tile-size 100 "
CASES = {
    "plain": "--context-parallel-size 2 --loss-chunk-size 300",
    "plain, distributed optimizer": "--use-distributed-optimizer --global-batch-size 4",
    "full": STREAMED + "--recompute-granularity full --use-torch-fsdp2",
    "selective, ring": STREAMED.replace("2 --seq", "1 --seq")
    + "--cp-comm-type p2p --recompute-granularity selective --use-torch-fsdp2",
    "selective on the host": STREAMED + "--recompute-granularity selective --no-cp-overlap "
    "--cpu-offloading-num-layers 3 --use-torch-fsdp2 --loss-chunk-size 300",
    "groups, some on the host": STREAMED + "--recompute-granularity full --recompute-num-layers 2 "
    "--recompute-method uniform --cpu-offloading-num-layers 2 --use-distributed-optimizer",
    "parked, optimizer on the host": STREAMED + "--recompute-granularity selective "
    "--no-cp-overlap --cpu-offloading-num-layers 3 --park-during-attention "
    "--use-torch-fsdp2 --optimizer-cpu-offload --loss-chunk-size 300",
}


@pytest.fixture(scope="module")
def traces():
    return trace_all(CASES, world_size=2)


def count_real_step(group, flags):
    config = config_of(flags, group.size())
    groups = make_groups(config.parallel, config.distributed)
    return StepTracer(config, fake=False).run(groups)


@pytest.mark.parametrize("name", CASES)
def test_a_trace_counts_what_a_real_step_takes(traces, name):
    real, traced = run_on_ranks(count_real_step, 2, CASES[name])[0], traces[name]
    assert bytes_by_phase(traced) == bytes_by_phase(real)
    assert traced.peak.by_category == real.peak.by_category
    assert traced.model_state_bytes == real.model_state_bytes
    assert traced.host_bytes == real.host_bytes
    assert traced.attention_flops == real.attention_flops
    assert traced.exchange_bytes_per_layer == real.exchange_bytes_per_layer


def bytes_by_phase(trace):
    return {name: peak.num_bytes for name, peak in trace.peak_by_phase.items()}


def test_attention_runs_once_if_its_output_is_kept(traces):
    calls = {name: trace.attention_forward_calls_per_layer for name, trace in traces.items()}
    twice = {name for name in CASES if "full" in CASES[name] and "granularity" in CASES[name]}
    assert calls == {name: 2.0 if name in twice else 1.0 for name in CASES}


def test_exchanged_bytes_are_those_of_the_heads_that_travel(traces):
    """Forward q, k, v, o; backward do, o, q, k, v, dq, dk, dv. Ranks share a kv head."""
    heads, kv_heads, d, tokens, width = 6, 3 + 1, 8, 2048 // 2, 2
    sent = (2 * heads + 2 * kv_heads) + (4 * heads + 4 * kv_heads)
    kept = traces["selective on the host"]
    assert kept.exchange_bytes_per_layer == sent * d * tokens * width


def test_parked_no_phase_holds_a_residual(traces):
    """Nor its gradient: what autograd passes has one element of memory."""
    held = {
        name: {
            phase: peak.by_category.get(MemoryCategory.RESIDUAL, 0)
            for phase, peak in trace.peak_by_phase.items()
        }
        for name, trace in traces.items()
    }
    whole = held["selective on the host"][Phase.ATTENTION_BACKWARD]
    parked = held["parked, optimizer on the host"]
    assert max(parked.values()) < 16 < whole
    tiles = traces["parked, optimizer on the host"].peak_by_phase[Phase.MLP_BACKWARD].by_category
    rows, tile_rows = 2048 // 2, 100
    assert tiles["workspace: gradient_tiles"] * rows == whole * 2 * tile_rows


def test_the_peak_does_not_grow_with_layers_whose_stash_is_on_the_host():
    """Nor do parameters: they are on the host too."""
    flags = CASES["parked, optimizer on the host"].replace("-layers 3", "-layers {0}")
    cases = {n: flags.format(n) + f" --num-layers {n}" for n in ("3", "5", "8")}
    traces = trace_all(cases, world_size=2)
    few, more, many = (bytes_by_phase(traces[n]) for n in cases)
    for phases in (few, more, many):
        # Tokens, labels and masks alone: weights and moments are the host's from the start.
        assert phases[Phase.SETUP] < 24 * 2048 // 2
        del phases[Phase.OPTIMIZER]  # a few numbers a parameter, on the host
    assert few == more == many
    assert traces["3"].host_bytes < traces["5"].host_bytes < traces["8"].host_bytes
