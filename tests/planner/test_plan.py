"""Plans of whole runs: parts against the code they mirror, and what more or less memory does."""

import math
from dataclasses import replace

import pytest

from megatron_untied.config import AdaptationConfig, ParallelConfig
from megatron_untied.config.parameters import TRAIN_ALL, parameters
from megatron_untied.phases import MemoryCategory, Phase
from megatron_untied.planner.machine import read_gpus
from megatron_untied.planner.plan import Plan, longest
from megatron_untied.planner.search import search
from megatron_untied.planner.weights import num_parameters, parameter_units
from megatron_untied.platform.device import GIB
from megatron_untied.presets import preset_names, read_preset
from tests.support.planning import machine, run_config
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import make_model, tiny

LONG = (
    "--model llama3-8b --seq-length 1048576 --context-parallel-size 8 --bf16 --use-torch-fsdp2 "
    "--loss-chunk-size 8192 --cp-heads-per-chunk 8 --recompute-granularity selective "
    "--cpu-offloading-num-layers 32"
)


def plan(flags: str = "", **changes) -> Plan:
    return Plan(run_config(f"{LONG} {flags}"), machine(**changes))


@pytest.mark.parametrize("name", preset_names())
def test_parameters_of_published_models(name):
    model = run_config(f"--model {name} --seq-length 1024").model
    assert num_parameters(model) == read_preset(name).num_parameters


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"untie_embeddings_and_output_weights": False, "normalization": "LayerNorm"},
        {"add_bias_linear": True, "swiglu": False},
        {"add_qkv_bias": True, "qk_layernorm": True},
    ],
)
@pytest.mark.parametrize(
    "adaptation",
    [
        TRAIN_ALL,
        AdaptationConfig(lora_rank=3),
        AdaptationConfig(lora_rank=2, lora_targets=("q_proj", "v_proj", "down_proj")),
        AdaptationConfig(freeze=("embedding.*", "*.linear_proj.*", "decoder.layers.1.mlp.*")),
    ],
)
@pytest.mark.parametrize("num_tensor", [1, 2])
def test_parameters_are_those_of_the_built_model(changes, adaptation, num_tensor):
    config = tiny(**changes)
    found = run_on_ranks(parameters_of_model, num_tensor, config, adaptation)
    expected = {name: tuple(p) for name, p in parameters(config, num_tensor, adaptation).items()}
    assert found == [expected] * num_tensor
    units = parameter_units(config, num_tensor, adaptation)
    shapes = sorted(shape for unit in units.all for shape in unit.shapes)
    assert shapes == sorted(shape for shape, _ in expected.values())


def parameters_of_model(group, config, adaptation):
    parallel = ParallelConfig(tensor_model_parallel_size=group.size())
    model = make_model(config, parallel, adaptation=adaptation)
    return {name: (tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()}


def test_phases_are_in_the_order_of_a_step_and_the_peak_is_one_of_them():
    made = plan()
    some = Phase.ATTENTION_FORWARD, Phase.LOSS, Phase.OPTIMIZER
    assert [phase for phase in made.phases if phase in some] == list(some)
    assert made.phases[made.peak.phase].num_bytes == made.peak.num_bytes
    assert made.peak.num_bytes == max(m.num_bytes for m in made.phases.values())


@pytest.mark.parametrize(
    "flags", ["", "--recompute-num-layers 5", "--cpu-offloading-num-layers 13", "--no-cp-overlap",
              "--recompute-granularity full --recompute-num-layers 4"],
)  # fmt: skip
def test_a_quick_plan_has_the_same_peak(flags):
    made = plan(flags)
    assert replace(made, every_layer=False).peak.num_bytes == made.peak.num_bytes


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ("--cp-heads-per-chunk all", "--cp-heads-per-chunk 16"),
        ("--cp-heads-per-chunk 16", ""),
        ("--cp-overlap", "--no-cp-overlap"),
        ("--no-cp-overlap", "--no-cp-overlap --park-during-attention"),
        ("--cpu-offloading-num-layers 16", ""),
        ("--cpu-offloading-num-layers 0", "--cpu-offloading-num-layers 0 --recompute-num-layers 4"),
        ("--seq-length 2097152", ""),
    ],
)
def test_what_saves_device_memory(more, less):
    assert plan(less).peak.num_bytes < plan(more).peak.num_bytes


def test_what_the_host_takes():
    """H and O of 32 layers, log-sum-exps of 32 heads; two micro-batches ready by each worker."""
    made = plan()
    tokens, layers = 1048576 // 8, 32
    assert made.host[MemoryCategory.KEPT] == layers * tokens * (2 * 4096 * 2 + 32 * 4)
    assert made.host[MemoryCategory.LOADER] == 2 * (2 * 28 * 1048576 + (64 << 20))
    assert made.host[MemoryCategory.FILE_CACHE] == 4 * 4 * 1048576
    saving = plan("--save somewhere --save-interval 1")
    assert saving.host[MemoryCategory.FILE_CACHE] == 4 * 4 * 1048576 + GIB
    grouped = plan("--recompute-num-layers 8")
    assert grouped.host[MemoryCategory.KEPT] < 0.7 * made.host[MemoryCategory.KEPT]


def test_the_rank_that_needs_most_counts():
    """28 heads over 8 ranks: some have 3, some 4."""
    flags = "--model qwen2.5-7b --cpu-offloading-num-layers 28 --cp-heads-per-chunk all"
    made = plan(flags)
    from megatron_untied.planner.step import StreamedStep

    peaks = [
        max(m.num_bytes for m in StreamedStep(made.geometry, rank).snapshots()) for rank in range(8)
    ]
    assert min(peaks) < max(peaks) == made.peak.num_bytes


def test_longest_sequences():
    made = plan()
    alone, with_host = (longest(made, with_host=each) for each in (False, True))
    assert with_host < alone
    assert made.at_length(with_host).fits
    assert not made.at_length(with_host + 8192).fits
    assert made.at_length(alone).fits_device
    assert not made.at_length(alone + 8192).fits_device


def test_nothing_fits_in_too_little():
    assert longest(plan(gpu_memory_gib=12), with_host=False) == 0


def test_search_says_what_would_fit():
    plain = Plan(
        run_config("--model llama3-8b --seq-length 1048576 --context-parallel-size 8 --bf16"),
        machine(),
    )
    assert not plain.fits
    flags, better = search(plain)
    assert better.fits
    assert any(flag.startswith("--recompute-granularity") for flag in flags)
    assert any(flag.startswith("--use-torch-fsdp2") for flag in flags)
    said = run_config(
        "--model llama3-8b --seq-length 1048576 --context-parallel-size 8 --bf16 " + " ".join(flags)
    )
    assert Plan(said, machine()).peak.num_bytes == better.peak.num_bytes


def test_search_finds_nothing_for_a_sequence_that_is_too_long():
    assert search(plan("--seq-length 16252928", gpu_memory_gib=20)) is None


def test_a_sequence_that_the_kernel_cannot_index_is_refused():
    with pytest.raises(ValueError, match="the kernel's limit is 2147483648; give .*ring ranks"):
        assert plan("--seq-length 134217728").peak
    assert longest(plan(gpu_memory_gib=10000), with_host=False) < 1 << 24


def test_roofline_is_near_the_published_speed_at_length():
    """98.25 tokens/s/GPU at 5 Mi tokens, 166.3 at 3 Mi (arXiv 2602.21196), full recomputation."""
    for millions, published in ((3, 166.3), (5, 98.25)):
        made = plan(f"--recompute-granularity full --seq-length {millions << 20}")
        assert made.time.tokens_per_second_per_gpu == pytest.approx(published, rel=0.05)


def test_keeping_attention_saves_its_share_of_a_step():
    """14 instead of 18 units of attention at length, a little less with all that is linear."""
    full, kept = (plan(f"--recompute-granularity {g} --seq-length 4194304") for g in
                  ("full", "selective"))  # fmt: skip
    assert 1.2 < full.time.seconds / kept.time.seconds < 18 / 14
    assert math.isclose(sum(kept.time.by_category.values()), kept.time.seconds)


def test_every_gpu_names_the_source_of_its_rates():
    for gpu in read_gpus().values():
        assert gpu.source
        for forward, backward in gpu.attention_fractions.values():
            assert 0 < backward <= forward < 1


def test_limits_leave_a_reserve():
    here = machine()
    assert here.device_bytes == 76 * GIB
    assert here.host_bytes == (2048 // 8 - 2) * GIB


SIZES = "--seq-length {1} --context-parallel-size 8 --bf16 --recompute-granularity full --model {0}"


@pytest.mark.parametrize(
    ("model", "tokens", "tile", "chunk", "overlap"),
    [
        ("llama3-8b", 5 << 20, 8192, 2048, False),
        ("llama3-8b", 1 << 19, 8192, 2048, True),
        ("qwen3-32b", 1 << 20, 4096, 2048, False),  # wide: half the tile
        ("llama3-8b --tensor-model-parallel-size 4 --context-parallel-size 2", 1 << 19, 8192, 8192,
         True),
        ("mistral-7b --window-size 4096,0", 1 << 20, 8192, 8192, True),  # attention is short
    ],
)  # fmt: skip
def test_sizes_that_are_not_given_are_those_that_long_runs_are_tuned_to(
    model, tokens, tile, chunk, overlap
):
    flags = SIZES.format(model, tokens)
    given = f" --sequence-tile-size {tile} --loss-chunk-size {chunk}"
    given += " --cp-overlap" if overlap else " --no-cp-overlap"
    free, tuned = (Plan(run_config(each), machine()) for each in (flags, flags + given))
    assert free.geometry.config == tuned.geometry.config
    assert free.peak.num_bytes == tuned.peak.num_bytes


def test_sizes_are_found_anew_at_every_length():
    """Overlap pays at 256K only, and the longest context of plans that leave it open has none."""
    made = plan("--seq-length 262144")
    assert made.geometry.schedule.overlap
    assert not made.at_length(2 << 20).geometry.schedule.overlap
    with_it, without = (
        longest(plan(f"--seq-length 262144 {flag}"), with_host=False)
        for flag in ("--cp-overlap", "--no-cp-overlap")
    )
    assert with_it < without == longest(made, with_host=False)


def test_a_ring_of_two_with_everything_on_the_host_takes_less_than_3_5_h():
    flags = (
        "--model qwen3-32b --seq-length 5242880 --bf16 --use-torch-fsdp2 --optimizer-cpu-offload "
        "--context-parallel-size 16 --cp-comm-type a2a+p2p --cp-heads-per-chunk 8 "
        "--hierarchical-context-parallel-sizes 8 2 --no-cp-overlap --loss-chunk-size 2048 "
        "--recompute-granularity selective --cpu-offloading-num-layers all --park-during-attention"
    )
    found = Plan(run_config(flags, world_size=16), machine(nodes=2))
    assert found.peak.num_bytes < 3.5 * found.geometry.residual_bytes
