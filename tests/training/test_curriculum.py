"""Runs whose sequence length changes: ``--seq-length-schedule``."""

import re

import pytest

import pretrain_gpt
from megatron_untied.checkpoint.run_config import model_config_of
from megatron_untied.training.metrics import read_metrics
from tests.support.corpus import random_documents, write_token_files
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import train, unevenly_masked_batch
from tests.training.test_loop import assert_refused, numbers, output_of, run, sample_ids

SCHEDULE = "0:64,3:128:rotary-base=5e4,1400tok:256:rotary-base=1e6"
ITERATIONS = 8
STREAMED = {
    "context_parallel_size": 2,
    "cp_heads_per_chunk": 4,
    "use_distributed_optimizer": True,
    "recompute_granularity": "selective",
    "cpu_offloading_num_layers": "all",
    "sequence_tile_size": 48,
    "loss_chunk_size": 40,
}


@pytest.fixture(scope="module")
def curriculum(tmp_path_factory) -> dict:
    """Flags of a run on a blend of two files, of which the first is read more than once."""
    folder = tmp_path_factory.mktemp("data")
    prefixes = [
        write_token_files(folder / str(seed), random_documents(n, vocab_size=250, eod=250, seed=n))
        for seed, n in enumerate((60, 300))
    ]
    return {
        "mock_data": None,
        "data_path": f"0.3 {prefixes[0]} 0.7 {prefixes[1]}",
        "split": "70,30",
        "train_iters": ITERATIONS,
        "eval_interval": 3,
        "eval_iters": 1,
        "lr_warmup_iters": 2,
    }


def in_stages(curriculum, **changes) -> dict:
    schedule = {"seq_length": None, "seq_length_schedule": SCHEDULE, "keep_batch_tokens": True}
    return curriculum | schedule | changes


def output_and_metrics(group, metrics, **flags) -> str:
    return output_of(group, metrics=metrics, **flags)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, curriculum):
    """An uninterrupted run on two ranks: its folder and what it said."""
    folder = tmp_path_factory.mktemp("whole")
    flags = in_stages(curriculum, save=folder / "c", save_interval=1, log_interval=2)
    said, _ = run_on_ranks(output_and_metrics, 2, folder / "m", **STREAMED, **flags)
    return folder, said


@pytest.mark.parametrize(
    "stop", [3, 4, 6, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (2, 5, 7))]
)
def test_stopped_before_at_and_after_each_border_it_goes_on_bit_for_bit(
    tmp_path, curriculum, whole, stop
):
    folder, _ = whole
    flags = in_stages(curriculum, load=folder / "c", ckpt_step=stop)
    resumed = run(2, tmp_path / "m", **STREAMED, **flags)
    expected = [each for each in read_metrics(folder / "m") if each["iteration"] > stop]
    assert numbers(resumed) == numbers(expected)


def test_two_streamed_ranks_train_as_one_plain_one(tmp_path, curriculum, whole):
    """And each stage evaluates as a run of its length alone does."""
    found = read_metrics(whole[0] / "m")
    plain = run(1, tmp_path / "m", **in_stages(curriculum, save=tmp_path / "c", save_interval=3))
    for ours, theirs in zip(found, plain, strict=True):
        for name in {"lm_loss", "grad_norm", "validation_loss"} & ours.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=2e-5), (name, ours)
    losses = {each["iteration"]: each["validation_loss"] for each in plain if len(each) == 2}
    for iteration, length, base in ((3, 64, "1e4"), (6, 128, "5e4"), (8, 256, "1e6")):
        alone = curriculum | {"seq_length": length, "rotary_base": base, "skip_train": True}
        alone |= {"global_batch_size": 256 // length, "load": tmp_path / "c"}
        alone |= {"override_opt_param_scheduler": True}
        (evaluated,) = run(1, tmp_path / str(length), ckpt_step=iteration, **alone)
        assert evaluated["validation_loss"] == losses[iteration]
        stored = model_config_of(tmp_path / "c" / f"iter_{iteration:07}")
        assert stored.rotary.base == float(base)


def test_the_learning_rate_and_the_counts_go_by_iterations(tmp_path, curriculum, whole):
    steps = [each for each in read_metrics(whole[0] / "m") if "lm_loss" in each]
    constant = run(1, tmp_path / "m", **curriculum | {"eval_iters": 0})
    assert [x["learning_rate"] for x in steps] == [x["learning_rate"] for x in constant]
    # 256 tokens each: 4 x 64, then 2 x 128, then 1 x 256.
    counts = [4, 8, 12, 14, 16, 18, 19, 20]
    assert [each["consumed_samples"] for each in steps] == counts


def test_the_log_shows_the_stage(whole):
    said = " ".join(whole[1].split())
    stages = re.findall(r"stage: (\d/3 of \d+ tokens) \| consumed tokens: +(\d+)", said)
    # A line ends with its stage, also between two intervals.
    expected = [(2, "1/3 of 64"), (3, "1/3 of 64"), (4, "2/3 of 128"), (6, "2/3 of 128")]
    expected += [(8, "3/3 of 256")]
    assert stages == [(f"{stage} tokens", str(256 * n)) for n, stage in expected]
    for stage in ("after iteration 3: 2 x 128 tokens", "after iteration 6: 1 x 256 tokens"):
        assert len(re.findall(re.escape(stage), said)) == 2  # planned, and entered


def test_no_sample_is_read_twice_or_left_out(tmp_path, curriculum):
    """At any number of ranks the same samples are read."""
    flags = in_stages(curriculum, eval_iters=0, keep_batch_tokens=None)
    (one,) = run_on_ranks(sample_ids, 1, None, **flags)
    ranks = run_on_ranks(sample_ids, 2, None, **flags)
    assert len(one) == len(set(one)) == 4 * ITERATIONS
    assert sorted(one) == sorted(ranks[0] + ranks[1])


def test_another_schedule_is_refused_and_can_begin_anew(tmp_path, curriculum):
    """From a run of one length, whose samples are not those of a stage."""
    run(1, tmp_path / "m", save=tmp_path / "c", **curriculum | {"train_iters": 4, "eval_iters": 0})
    flags = in_stages(curriculum, eval_iters=0, override_opt_param_scheduler=True)
    said = ("another order: --seq-length: 64, here 4 x 64 tokens", "--reset-data-position")
    assert_refused(*said, load=tmp_path / "c", **flags)
    (seen,) = run_on_ranks(
        sample_ids, 1, tmp_path / "n", load=tmp_path / "c", save=tmp_path / "d", save_interval=5,
        reset_data_position=True, **flags,
    )  # fmt: skip
    assert len(seen) == 2 + 2 + 1 + 1  # iterations 5 to 8
    (then,) = run_on_ranks(sample_ids, 1, None, load=tmp_path / "d", ckpt_step=5, **flags)
    assert then == seen[2:]


@pytest.mark.parametrize(
    ("length", "changes", "texts"),
    [
        (24 << 20, {}, ["stage 2 of 2, after iteration 3: 4 x 25,165,824 tokens", "does not fit"]),
        (1 << 25, {}, ["--seq-length-schedule, stage 2: ", "the kernel's limit"]),
    ],
)
def test_a_stage_that_does_not_fit_is_refused_before_the_start(length, changes, texts):
    flags = {"seq_length": None, "seq_length_schedule": f"0:64,3:{length}"} | changes
    assert_refused("--seq-length-schedule", *texts, **flags)


def heads_and_buffers(group, **flags) -> list[tuple]:
    """Heads per exchange, bytes of the workspace and of the arena after every step."""
    seen, models = [], []

    def model_provider(config, groups, progress):
        models.append(pretrain_gpt.model_provider(config, groups, progress))
        return models[-1]

    def get_batch(samples, config, groups):
        (model,) = models
        context = model.attention_context
        seen.append((context.heads_per_chunk, model.store.arena.reserved_bytes))
        return unevenly_masked_batch(samples, config, groups)

    train(group, None, get_batch, model_provider=model_provider, **flags)
    return seen


def test_host_memory_is_that_of_the_stage(curriculum):
    """No more than a run of that length alone has, and no slot of the length before is left."""
    flags = curriculum | STREAMED | {"eval_iters": 0, "cp_heads_per_chunk": "auto"}
    flags |= {"use_torch_fsdp2": True, "use_distributed_optimizer": None}
    flags["lr_decay_iters"] = ITERATIONS
    staged = in_stages(flags, train_iters=5, seq_length_schedule="0:64,3:128:rotary-base=5e4")
    found, _ = run_on_ranks(heads_and_buffers, 2, **staged)
    assert [heads for heads, _ in found] == [8] * len(found)
    before = {n: [size for _, size in found][first] for n, first in ((64, 4), (128, 14))}
    entered = [size for _, size in found][12]
    assert entered == 0
    for length, size in before.items():
        alone = flags | {"seq_length": length, "train_iters": 2, "global_batch_size": 256 // length}
        expected, _ = run_on_ranks(heads_and_buffers, 2, **alone)
        assert size == expected[-1][1] > 0


@pytest.mark.slow
def test_saved_activations_are_on_the_disk_in_every_stage(tmp_path, curriculum, whole):
    """The same bits as on the host, also in a run that resumes at a border."""
    expected, on_disk = read_metrics(whole[0] / "m"), STREAMED | {"activation_disk": tmp_path}
    assert numbers(run(2, tmp_path / "m", **on_disk, **in_stages(curriculum))) == numbers(expected)
    flags = in_stages(curriculum, load=whole[0] / "c", ckpt_step=3)
    resumed = run(2, tmp_path / "n", **on_disk, **flags)
    assert numbers(resumed) == numbers([x for x in expected if x["iteration"] > 3])


@pytest.mark.slow
def test_adapters_are_trained_through_the_stages(tmp_path, curriculum, whole):
    lora = {"lora_rank": 3, "pretrained_checkpoint": whole[0] / "c"}
    flags = in_stages(curriculum, **lora)
    found = run(2, tmp_path / "m", save=tmp_path / "c", save_interval=1, **STREAMED, **flags)
    one = STREAMED | {"context_parallel_size": None, "use_distributed_optimizer": None}
    for ours, theirs in zip(found, run(1, tmp_path / "one", **one, **flags), strict=True):
        for name in {"lm_loss", "grad_norm", "validation_loss"} & ours.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=2e-5), (name, ours)
    for stop in (3, 5):
        flags = in_stages(curriculum, load=tmp_path / "c", ckpt_step=stop, **lora)
        resumed = run(2, tmp_path / str(stop), **STREAMED, **flags)
        assert numbers(resumed) == numbers([x for x in found if x["iteration"] > stop])


@pytest.mark.slow
def test_what_is_automatic_is_chosen_for_all_stages(tmp_path, curriculum, whole):
    left = {"cp_heads_per_chunk": "auto", "recompute_granularity": "auto"}
    given = {
        name: STREAMED[name] for name in ("context_parallel_size", "use_distributed_optimizer")
    }
    found = run(2, tmp_path / "m", **given, **left, **in_stages(curriculum))
    for ours, theirs in zip(found, read_metrics(whole[0] / "m"), strict=True):
        for name in {"lm_loss", "grad_norm", "validation_loss"} & ours.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=2e-5), (name, ours)
