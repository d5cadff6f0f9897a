"""Settings left to the planner: the fastest that fits, the same on every rank, said in one line."""

import contextlib
import io
import re
from dataclasses import replace

import pytest

from megatron_untied.context_parallel.kernels import Mask
from megatron_untied.context_parallel.kernels.flash_attention import (
    ALL_HEADS_IN_32_BITS,
    FlashAttention3,
    TorchFlash,
)
from megatron_untied.context_parallel.kernels.split_calls import Shape, split_calls
from megatron_untied.planner.automatic import candidates, choose, describe, is_automatic, nearest
from megatron_untied.planner.plan import Plan
from tests.support.planning import machine, run_config
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import train

LONG = (
    "--model llama3-8b --seq-length 1048576 --context-parallel-size 8 --bf16 --use-torch-fsdp2 "
    "--sequence-tile-size 8192 --loss-chunk-size 2048 --cp-heads-per-chunk auto "
    "--recompute-granularity auto"
)


def test_takes_the_fastest_that_fits():
    config = run_config(LONG + " --cpu-offloading-num-layers 32")
    chosen = choose(config, machine())
    assert chosen.fits
    assert not is_automatic(chosen.config)
    assert chosen.config.memory.recompute_granularity == "selective"
    for other in candidates(config, machine()):
        faster = Plan(other, machine())
        assert not faster.fits or faster.time.seconds >= chosen.time.seconds


def test_less_memory_means_smaller_chunks():
    config = run_config(LONG + " --cpu-offloading-num-layers 32 --no-cp-overlap")
    roomy, tight = (choose(config, machine(gpu_memory_gib=gib)) for gib in (139, 29))
    assert roomy.config.parallel.heads_per_chunk > tight.config.parallel.heads_per_chunk


def test_little_host_memory_means_that_attention_runs_twice():
    config = run_config(LONG + " --cpu-offloading-num-layers 32 --seq-length 3145728")
    assert choose(config, machine()).config.memory.recompute_granularity == "selective"
    poor = choose(config, machine(host_memory_gib=1024)).config
    assert poor.memory.recompute_granularity == "full"


def test_short_sequences_need_no_recomputation():
    config = run_config(LONG + " --seq-length 16384")
    assert choose(config, machine()).config.memory.recompute_granularity is None


def test_rejects_what_cannot_fit():
    config = run_config(LONG + " --seq-length 8388608")
    with pytest.raises(ValueError, match=r"no automatic setting fits: the nearest takes .* of 36"):
        choose(config, machine(gpu_memory_gib=40))


def test_the_nearest_lacks_least_of_gpu_and_host_together():
    """Less of the GPU does not count if the host then lacks far more."""
    little = machine(gpu_memory_gib=30, host_memory_gib=256)
    config = run_config(LONG + " --seq-length 2097152 --cpu-offloading-num-layers 32")
    plans = [Plan(each, little) for each in candidates(config, little)]
    found = nearest(plans)
    assert found.config.memory.recompute_granularity == "full"

    def lacking(plan: Plan) -> int:
        beyond = plan.peak.num_bytes - little.device_bytes, plan.host.total() - little.host_bytes
        return sum(max(0, num_bytes) for num_bytes in beyond)

    assert lacking(found) == min(map(lacking, plans)) > 0


def test_says_what_it_chose_in_one_line():
    config = run_config(LONG + " --cpu-offloading-num-layers 32")
    line = describe(choose(config, machine()))
    assert re.fullmatch(
        r"planned: --cp-heads-per-chunk \d+, --recompute-granularity selective \| "
        r"[\d.]+ of 76.0 GiB per GPU, [\d.]+ of 254.0 GiB of host memory per rank \| "
        r"assumed: .*matrix products reach 0.7 of the peak.*",
        line,
    )


def test_nothing_is_left_open_that_was_given():
    config = run_config(LONG)
    given = replace(config, parallel=replace(config.parallel, heads_per_chunk=8))
    assert {each.parallel.heads_per_chunk for each in candidates(given, machine())} == {8}


@pytest.mark.parametrize("tokens", [1 << 20, 4_194_304, 5 << 20])
@pytest.mark.parametrize(
    "kernels",
    [
        {"flash-attention-2": ALL_HEADS_IN_32_BITS},  # flash-attn before 2.8
        {"torch-flash": TorchFlash.limits},
        {"flash-attention-3": FlashAttention3.limits, "torch-flash": TorchFlash.limits},
        None,
    ],
)
def test_no_setting_is_chosen_that_its_kernel_refuses(tokens, kernels):
    flags = f"{LONG} --seq-length {tokens} --cpu-offloading-num-layers 32 --no-cp-overlap"
    large = machine(gpu_memory_gib=400, host_memory_gib=8192, kernels=kernels)
    chosen = choose(run_config(flags), large)
    kernel, geometry = chosen.geometry.kernel, chosen.geometry
    assert kernels is None or kernel.kind.name == next(iter(kernels))
    rows = geometry.n * geometry.num_ulysses
    for h, g in geometry.schedule.heads_of_calls:
        shape = Shape(num_queries=rows, num_keys=rows, b=1, h=h, g=g, d=geometry.d)
        split_calls(shape, Mask(), kernel.limits)  # raises if it is refused


def test_a_sequence_that_no_setting_makes_short_enough_is_refused_by_its_length():
    flags = f"{LONG} --seq-length {20 << 20} --cpu-offloading-num-layers 32 --no-cp-overlap"
    with pytest.raises(ValueError, match=r"20971648 rows x 128 channels x 1 heads .* more ring"):
        choose(run_config(flags), machine(gpu_memory_gib=1000, host_memory_gib=1 << 20))


def train_automatically(group, metrics):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train(group, metrics, train_iters=2, context_parallel_size=2, cp_heads_per_chunk="auto",
              recompute_granularity="auto")  # fmt: skip
    return said.getvalue()


def test_a_run_trains_with_what_was_chosen(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    said = run_on_ranks(train_automatically, 2, metrics)
    assert len(metrics.read_text().splitlines()) == 2
    lines = [line for text in said for line in text.splitlines() if "planned:" in line]
    assert len(lines) == 1
    assert "--cp-heads-per-chunk 8, no recomputation" in lines[0]
