"""Settings left to the planner: the fastest that fits, the same on every rank, said in one line."""

import contextlib
import io
import re
from dataclasses import replace
from itertools import product

import pytest

from megatron_untied.context_parallel.kernels import Mask
from megatron_untied.context_parallel.kernels.flash_attention import (
    ALL_HEADS_IN_32_BITS,
    FlashAttention3,
    TorchFlash,
)
from megatron_untied.context_parallel.kernels.split_calls import Shape, split_calls
from megatron_untied.planner.automatic import (
    choose,
    describe,
    is_automatic,
    nearest,
    opened,
    ranked,
    ways_to_save,
)
from megatron_untied.planner.plan import Plan
from tests.support.planning import machine, run_config
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import train

LONG = (
    "--model llama3-8b --seq-length 1048576 --context-parallel-size 8 --bf16 --use-torch-fsdp2 "
    "--sequence-tile-size 8192 --loss-chunk-size 2048 --cp-heads-per-chunk auto "
    "--recompute-granularity auto"
)
SMALL = (
    "--num-layers 3 --hidden-size 512 --num-attention-heads 4 --swiglu --disable-bias-linear "
    "--normalization RMSNorm --bf16 --context-parallel-size 2 --vocab-size 8000 --use-torch-fsdp2 "
    "--cp-heads-per-chunk auto --recompute-granularity auto "
)


def every_plan(config, here):
    """All settings that flags can say, by steps."""
    for chunk, overlap, part in product((2, 4), (True, False), (1, 4)):
        parallel = replace(config.parallel, heads_per_chunk=chunk, cp_overlap=overlap)
        sizes = {"sequence_tile_size": 8192 // part, "loss_chunk_size": 32768 // part}
        plain = replace(config.memory, recompute_granularity=None, attention_output_layers=None,
                        recompute_num_layers=1, cpu_offloading_num_layers=0,
                        park_during_attention=False, **sizes)  # fmt: skip
        memories = [plain] + [
            replace(plain, recompute_granularity="selective", attention_output_layers=kept,
                    recompute_num_layers=size, cpu_offloading_num_layers=on_host,
                    park_during_attention=park)
            for kept, size, on_host, park in product(range(4), (1, 2, 3), range(4), (False, True))
        ]  # fmt: skip
        for memory in memories:
            yield Plan(replace(config, parallel=parallel, memory=memory), here, every_layer=False)


@pytest.mark.parametrize(
    ("tokens", "gpu_memory_gib", "host_memory_gib"),
    [(1 << 20, 13, 2048), (1 << 20, 8.5, 11), (1 << 18, 7, 5)],
)
def test_no_setting_that_fits_is_faster(tokens, gpu_memory_gib, host_memory_gib):
    """Against every combination; the time may differ by what sizes and copies cost, 1%."""
    config = run_config(f"{SMALL} --seq-length {tokens}", world_size=2)
    here = machine(gpus_per_node=2, gpu_memory_gib=gpu_memory_gib, host_memory_gib=host_memory_gib)
    every = [plan for plan in every_plan(config, here) if plan.fits]
    chosen = choose(config, here)
    assert chosen.fits
    assert every
    assert chosen.time.seconds <= 1.01 * min(plan.time.seconds for plan in every)


def test_takes_the_fastest_that_fits():
    config = run_config(LONG + " --cpu-offloading-num-layers 32")
    chosen = choose(config, machine())
    assert chosen.fits
    assert not is_automatic(chosen.config)
    assert chosen.config.memory.recompute_granularity == "selective"
    assert chosen.config.memory.cpu_offloading_num_layers == 32  # as given
    others = ranked(config, machine())
    assert others[0].config == chosen.config
    assert [plan.time.seconds for plan in others] == sorted(plan.time.seconds for plan in others)
    assert len({plan.config.memory for plan in others}) == len(others) > 5


def test_less_memory_means_smaller_chunks():
    config = run_config(LONG + " --cpu-offloading-num-layers 32 --no-cp-overlap")
    roomy, tight = (choose(config, machine(gpu_memory_gib=gib)) for gib in (139, 29))
    assert roomy.config.parallel.heads_per_chunk > tight.config.parallel.heads_per_chunk


def test_less_host_memory_means_that_attention_runs_twice_in_more_layers():
    """8B at 5M tokens in 2, 1 and 0.63 TiB; no memory stays unused, no layer more would fit."""
    config = run_config(LONG + " --cpu-offloading-num-layers 32 --seq-length 5242880")
    plans = [choose(config, machine(host_memory_gib=gib)) for gib in (2048, 1024, 640)]
    memories = [plan.config.memory for plan in plans]
    assert memories[0].recompute_granularity == memories[1].recompute_granularity == "selective"
    kept = [32 - memory.first_kept_output(32) for memory in memories]
    assert 32 == kept[0] > kept[1] > kept[2]
    assert not plans[1].with_settings("memory", attention_output_layers=kept[1] + 1).fits


def test_disks_take_what_the_host_does_not_hold():
    """8B at 5M tokens in 1 TiB: more outputs are kept the more a disk holds, and none is wasted."""
    flags = f"{LONG} --cpu-offloading-num-layers 32 --seq-length 5242880 --park-during-attention"
    flags += " --recompute-num-layers 4"
    one, disks = run_config(flags), run_config(f"{flags} --activation-disk /a,/b")
    without = choose(one, machine(host_memory_gib=1024))
    some, much = (choose(disks, machine(host_memory_gib=1024, disk_gib=x)) for x in (400, 9000))
    kept = [32 - x.config.memory.first_kept_output(32) for x in (without, some, much)]
    assert kept[0] < kept[1] < kept[2] == 32
    for plan in (some, much):
        used = plan.config.memory.activation_disk_gib * 2**30
        assert plan.fits
        assert 0 < plan.activation_disk.rank_bytes <= used <= plan.machine.disk_bytes
        assert not plan.with_settings("memory", activation_disk_gib=0.98 * used / 2**30).fits_host
    line = describe(much)
    assert f"--activation-disk-gib {much.config.memory.activation_disk_gib} |" in line
    assert re.search(
        r"GiB on disks \| saved activations on disk: .* writing needs .* TB a day", line
    )


def test_disks_are_not_used_where_they_are_not_needed_or_too_slow():
    flags = f"{LONG} --cpu-offloading-num-layers 32 --park-during-attention --activation-disk /a"
    roomy = choose(run_config(flags), machine(host_memory_gib=4096))
    assert roomy.config.memory.activation_disk_gib == 0
    assert "none, the host holds all of them" in describe(roomy)
    slow, fast = (
        choose(run_config(flags), machine(host_memory_gib=300, disk_gb_per_second=x))
        for x in (0.01, 10)
    )
    assert slow.config.memory.activation_disk_gib == 0 < fast.config.memory.activation_disk_gib
    assert slow.geometry.recomputed > fast.geometry.recomputed == 0
    assert slow.time.seconds < replace(fast, machine=slow.machine).time.seconds


def test_a_plan_is_refused_by_the_room_on_disks():
    flags = f"{LONG} --cpu-offloading-num-layers 32 --seq-length 5242880 --activation-disk /a"
    given = Plan(run_config(f"{flags} --activation-disk-gib 100"), machine(disk_gib=400))
    settled = choose(given.config, replace(given.machine, disk_gib=1000))
    assert settled.config.memory.activation_disk_gib == 100
    assert not replace(settled, machine=given.machine).fits


def test_smaller_tiles_and_chunks_of_the_loss_take_longer():
    config = run_config(LONG + " --recompute-granularity full --cp-heads-per-chunk 8")
    large = Plan(config, machine())
    for name in ("sequence_tile_size", "loss_chunk_size"):
        small = large.with_settings("memory", **{name: 512})
        assert small.time.seconds > large.time.seconds
    sums = large.time.by_category["sums of weight gradients"]
    # 16 tiles of 32 layers of 218M weights, 12 bytes each, and 64 chunks of 525M, 8 bytes each.
    expected = 16 * 32 * 218_112_000 * 12 + 64 * 128_256 * 4096 * 8
    assert sums == pytest.approx(expected / 3.35e12, rel=1e-3)


def test_short_sequences_need_no_recomputation():
    config = run_config(LONG + " --seq-length 16384")
    assert choose(config, machine()).config.memory.recompute_granularity is None


def test_rejects_what_cannot_fit():
    config = run_config(LONG + " --seq-length 8388608")
    with pytest.raises(ValueError, match=r"no automatic setting fits: the nearest takes .* of 36"):
        choose(config, machine(gpu_memory_gib=40, host_memory_gib=512))


def test_the_nearest_lacks_least_of_gpu_and_host_together():
    """Less of the GPU does not count if the host then lacks far more."""
    little = machine(gpu_memory_gib=30, host_memory_gib=256)
    config = run_config(LONG + " --seq-length 2097152 --cpu-offloading-num-layers 32")
    found = nearest(config, little)
    assert found.config.memory.recompute_granularity == "full"
    assert found.host.total() > little.host_bytes
    assert not found.fits


def test_says_what_it_chose_in_one_line():
    config = run_config(LONG + " --cpu-offloading-num-layers 32")
    line = describe(choose(config, machine()))
    assert re.fullmatch(
        r"planned: --cp-heads-per-chunk \d+ --(no-)?cp-overlap --sequence-tile-size 8192 "
        r"--loss-chunk-size 2048 --recompute-granularity selective --recompute-num-layers 1 "
        r"--cpu-offloading-num-layers 32 \| "
        r"[\d.]+ of 76.0 GiB per GPU, [\d.]+ of 254.0 GiB of host memory per rank \| "
        r"assumed: .*matrix products reach 0.7 of the peak.*",
        line,
    )


def test_nothing_is_left_open_that_was_given():
    config = run_config(LONG)
    given = replace(config, parallel=replace(config.parallel, heads_per_chunk=8))
    found = ranked(given, machine())
    assert {plan.config.parallel.heads_per_chunk for plan in found} == {8}
    assert {plan.config.memory.sequence_tile_size for plan in found} == {8192}
    parked = run_config(LONG + " --park-during-attention --recompute-num-layers 4")
    ways = ways_to_save(Plan(parked, machine()))
    assert {way.config.memory.recompute_num_layers for way in ways} == {4}
    assert {way.config.memory.park_during_attention for way in ways} == {True}
    assert is_automatic(opened(given))


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
    assert "--cp-heads-per-chunk 8 --cp-overlap --loss-chunk-size" in lines[0]
    assert ", no recomputation | " in lines[0]
