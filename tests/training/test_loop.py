import contextlib
import io
import sys
import time

import pytest

import pretrain_gpt
from megatron_untied.checkpoint.run_config import read_provenance
from megatron_untied.data import indexed_files
from megatron_untied.training.loop import pretrain
from megatron_untied.training.metrics import read_metrics
from tests.support.command_line import command_line, tiny_config
from tests.support.corpus import random_documents, write_token_files
from tests.support.launch import launch
from tests.support.ranks import RankFailure, run_on_ranks
from tests.support.tiny_run import launch_of, train


def run(world_size: int, path, **flags) -> list[dict]:
    run_on_ranks(train, world_size, path, **flags)
    return read_metrics(path)


def numbers(steps: list[dict]) -> list[tuple]:
    """Everything in a metrics file but times and memory."""
    names = ("iteration", "consumed_samples", "lm_loss", "grad_norm", "learning_rate",
             "valid_tokens", "validation_loss")  # fmt: skip
    return [tuple(step.get(name) for name in names) for step in steps]


def test_a_run_repeats_bit_for_bit(tmp_path):
    first, second = (run(1, tmp_path / name, train_iters=4) for name in ("a", "b"))
    assert numbers(first) == numbers(second)
    assert len(first) == 4
    other_seed = run(1, tmp_path / "c", train_iters=4, seed=5)
    assert numbers(first) != numbers(other_seed)


def test_progress_is_counted_and_speed_is_of_the_whole_batch(tmp_path):
    steps = run(2, tmp_path / "metrics.jsonl", train_iters=3)
    assert [step["iteration"] for step in steps] == [1, 2, 3]
    assert [step["consumed_samples"] for step in steps] == [4, 8, 12]
    for step in steps:
        tokens_per_second = 4 * 64 / step["step_seconds"] / 2
        assert step["tokens_per_second_per_gpu"] == pytest.approx(tokens_per_second)
        assert step["peak_device_bytes"] > 0


def test_evaluates_at_the_interval_and_at_the_end(tmp_path):
    flags = {"train_iters": 5, "eval_interval": 2, "eval_iters": 2}
    steps = run(1, tmp_path / "metrics.jsonl", **flags)
    evaluations = [step for step in steps if "validation_loss" in step]
    assert [step["iteration"] for step in evaluations] == [2, 4, 5]
    assert [len(step) for step in evaluations] == [2, 2, 2]
    # Evaluating does not disturb training.
    without = run(1, tmp_path / "other.jsonl", train_iters=5)
    assert numbers(step for step in steps if "lm_loss" in step) == numbers(without)


SAVE = {"train_iters": 6, "eval_interval": 2, "eval_iters": 1, "lr_warmup_iters": 2}


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, {}),
        (1, {"bf16": True}),
        (2, {"context_parallel_size": 2, "use_distributed_optimizer": True, "bf16": True}),
    ],
)
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, world_size, flags):
    flags = SAVE | flags
    whole = run(world_size, tmp_path / "whole.jsonl", **flags)
    parts, folder = tmp_path / "parts.jsonl", tmp_path / "checkpoints"
    run(world_size, parts, save=folder, exit_interval=3, **flags)
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "3"
    resumed = run(world_size, parts, load=folder, **flags)
    assert numbers(resumed) == numbers(whole)


def test_a_run_can_be_prolonged_when_its_schedule_was_longer(tmp_path):
    flags, folder = {"lr_decay_iters": 6}, tmp_path / "checkpoints"
    whole = run(1, tmp_path / "whole.jsonl", train_iters=6, **flags)
    run(1, tmp_path / "parts.jsonl", train_iters=3, save=folder, **flags)
    parts = run(1, tmp_path / "parts.jsonl", train_iters=6, load=folder, **flags)
    assert numbers(parts) == numbers(whole)


@pytest.mark.parametrize("blend", [False, True])
def test_a_longer_run_reads_on_where_a_shorter_one_ended(tmp_path, blend):
    """The shorter one needs two epochs of the file, the longer one four."""
    prefixes = [
        write_token_files(tmp_path / name, random_documents(20, vocab_size=250, eod=250, seed=seed))
        for seed, name in enumerate(("a", "b"))
    ]
    data = f"0.3 {prefixes[0]} 0.7 {prefixes[1]}" if blend else prefixes[0]
    flags = {"mock_data": None, "data_path": data, "split": "1", "lr_decay_iters": 6}
    whole = run(2, tmp_path / "whole.jsonl", train_iters=6, **flags)
    folder = tmp_path / "checkpoints"
    run(2, tmp_path / "parts.jsonl", train_iters=3, save=folder, **flags)
    parts = run(2, tmp_path / "parts.jsonl", train_iters=6, load=folder, **flags)
    assert numbers(parts) == numbers(whole)


def test_saves_at_the_interval_and_at_the_end(tmp_path):
    run(1, tmp_path / "m", train_iters=5, save=tmp_path / "c", save_interval=2)
    saved = sorted(path.name for path in (tmp_path / "c").glob("iter_*"))
    assert saved == ["iter_0000002", "iter_0000004", "iter_0000005"]


def test_finetuning_takes_the_weights_and_the_architecture_alone(tmp_path):
    run(1, tmp_path / "m", train_iters=3, save=tmp_path / "c")
    architecture = ("num_layers", "hidden_size", "num_attention_heads", "group_query_attention",
                    "num_query_groups", "kv_channels", "ffn_hidden_size", "swiglu",
                    "normalization", "disable_bias_linear",
                    "untie_embeddings_and_output_weights")  # fmt: skip
    tuned = run(
        1, tmp_path / "tuned", load=tmp_path / "c", finetune=True, use_checkpoint_args=True,
        train_iters=1, seed=99, eval_iters=1, **dict.fromkeys(architecture),
    )  # fmt: skip
    evaluated = run(1, tmp_path / "e", load=tmp_path / "c", skip_train=True, eval_iters=1,
                    no_load_optim=True, train_iters=3)  # fmt: skip
    assert (tuned[0]["iteration"], tuned[0]["consumed_samples"]) == (1, 4)
    assert tuned[0]["lm_loss"] < 5.5  # below the untrained 5.53: the weights came along
    assert [step["iteration"] for step in evaluated] == [3]


def refusal(group, **changes) -> str:
    with pytest.raises(SystemExit) as exit_:
        train(group, **changes)
    return str(exit_.value)


@pytest.mark.parametrize(
    ("flag", "words"),
    [("save", "--save"), ("metrics", "--metrics-jsonl"), ("tensorboard_dir", "--tensorboard-dir")],
)
def test_a_place_that_cannot_be_written_to_stops_every_rank_before_training(tmp_path, flag, words):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "below"
    for message in run_on_ranks(refusal, 2, **{flag: place, "context_parallel_size": 2}):
        assert message.startswith(f"error: {words} {place}")
        assert "; give a f" in message


def test_a_file_of_another_kind_does_not_become_the_metrics(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("remember\n")
    (message,) = run_on_ranks(refusal, 1, metrics=path)
    assert message == (
        f"error: --metrics-jsonl {path} exists and is not a metrics file; give another path"
    )
    assert path.read_text() == "remember\n"


def assert_refused(*texts: str, **changes) -> None:
    """Both ranks end with the same line."""
    message, other = run_on_ranks(refusal, 2, context_parallel_size=2, **changes)
    assert message.startswith("error: ")
    assert "\n" not in message
    for text in texts:
        assert text in message
    assert other == message


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with iteration 3 of a run with mock data and a constant learning rate."""
    folder = tmp_path_factory.mktemp("trained")
    run(1, folder / "m", train_iters=3, save=folder / "c", **CONSTANT)
    return folder / "c"


CONSTANT = {"lr_decay_style": "constant"}


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        ({"seed": 5}, ["--seed: 1234, here 5", "--reset-data-position", "--finetune"]),
        ({"seq_length": 32}, ["--seq-length: 64, here 32"]),
        ({"lr": 2e-3}, ["max_lr 0.001, here 0.002", "--override-opt_param-scheduler"]),
    ],
)
def test_what_goes_on_otherwise_than_it_began_is_refused(trained, flags, texts):
    assert_refused(*texts, load=trained, **CONSTANT | flags)


@pytest.mark.parametrize("flag", ["finetune", "no_load_optim"])
def test_loading_nothing_where_something_is_meant_stops_every_rank(tmp_path, flag):
    flags = {"load": tmp_path / "nowhere", flag: True}
    assert_refused("nowhere has no checkpoint", **flags)


def test_a_second_run_into_the_same_folder_is_refused(trained):
    before = sorted(trained.iterdir())
    assert_refused("holds checkpoints already (iter_0000003", save=trained, seed=5)
    assert sorted(trained.iterdir()) == before


def test_a_constant_rate_can_be_prolonged(tmp_path, trained):
    whole = run(1, tmp_path / "whole", train_iters=6, **CONSTANT)
    resumed = run(1, tmp_path / "parts", train_iters=6, load=trained, **CONSTANT)
    assert numbers(resumed) == numbers(whole)[3:]


def sample_ids(group, path, **changes) -> list[list[int]]:
    """Train, and give the numbers of the samples of every micro-batch.

    Mock documents count upwards from a start of their own, so that samples differ.
    """
    seen = []

    def get_batch(samples, config, groups):
        seen.append([hash(tuple(tokens.tolist())) for tokens in samples["tokens"]])
        return pretrain_gpt.get_batch(samples, config, groups)

    pretrain(
        tiny_config(group.size(), metrics_jsonl=path, **changes),
        launch_of(group),
        model_provider=pretrain_gpt.model_provider,
        datasets_provider=pretrain_gpt.datasets_provider,
        get_batch=get_batch,
        forward_step=pretrain_gpt.forward_step,
    )
    return [number for batch in seen for number in batch]


@pytest.mark.parametrize("batch", [2, 8])
def test_another_batch_size_repeats_and_misses_no_sample(tmp_path, batch):
    prefix = write_token_files(
        tmp_path / "a", random_documents(20, vocab_size=250, eod=250, seed=0)
    )
    flags = CONSTANT | {"mock_data": None, "data_path": prefix, "split": "1"}
    (expected,) = run_on_ranks(sample_ids, 1, tmp_path / "m", train_iters=9, **flags)
    assert len(set(expected)) > 9 * 3  # the file is read more than once
    folder = tmp_path / "c"
    (first,) = run_on_ranks(sample_ids, 1, None, train_iters=3, save=folder, **flags)
    changed = flags | {"global_batch_size": batch, "lr": 2e-3, "load": folder}
    (then,) = run_on_ranks(
        sample_ids, 1, tmp_path / "n", train_iters=6,
        **{"override_opt_param_scheduler": True} | changed,
    )  # fmt: skip
    assert len(then) == 3 * batch
    assert first + then == expected[: 12 + 3 * batch]
    steps = read_metrics(tmp_path / "n")
    assert [step["consumed_samples"] for step in steps] == [12 + batch * n for n in (1, 2, 3)]
    assert {step["learning_rate"] for step in steps} == {2e-3}


def test_resetting_the_data_position_begins_the_samples_anew(tmp_path, trained):
    flags = CONSTANT | {"seed": 5, "load": trained, "train_iters": 5}
    (seen,) = run_on_ranks(sample_ids, 1, tmp_path / "m", reset_data_position=True, **flags)
    (fresh,) = run_on_ranks(sample_ids, 1, None, **CONSTANT | {"seed": 5, "train_iters": 2})
    assert seen == fresh
    assert [step["iteration"] for step in read_metrics(tmp_path / "m")] == [4, 5]


def output_of(group, **changes) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        train(group, **changes)
    return text.getvalue()


def test_says_what_was_loaded_and_that_nothing_is_left_to_train(trained):
    flags = CONSTANT | {"load": trained, "train_iters": 2}
    (text,) = run_on_ranks(output_of, 1, **flags)
    text = " ".join(text.split())
    loaded = f"loaded {trained}/iter_0000003: iteration 3, 12 samples consumed; weights, optimizer"
    assert f"{loaded}, schedule, random states" in text
    assert (
        "the checkpoint is of iteration 3 and --train-iters is 2; "
        "give a larger --train-iters to continue" in text
    )


def test_restarts_are_one_run_whose_checkpoints_may_be_deleted(tmp_path, trained):
    folder = tmp_path / "c"
    flags = CONSTANT | {"save_retain_interval": 100, "train_iters": 8}
    run(1, tmp_path / "m", save=folder, load=trained, exit_interval=4, **flags)
    first = read_provenance(folder / "iter_0000004")
    run(1, tmp_path / "m", save=folder, load=folder, **flags)
    assert [path.name for path in folder.glob("iter_*")] == ["iter_0000008"]
    last = read_provenance(folder / "iter_0000008")
    assert last == first
    assert last.run_id != read_provenance(trained / "iter_0000003").run_id
    assert last.samples.order == {"--seed": 1234, "--seq-length": 64, "--mock-data": True}


def refusal_with_few_tokens_checked(group, **changes) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_files, "_TOKENS_CHECKED", 10)
        return refusal(group, **changes)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, {}),
        (2, {}),  # data parallel: one rank alone reads the bad sample
        (2, {"tensor_model_parallel_size": 2}),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (2, {"skip_train": True, "eval_iters": 10, "split": "0,1"}),
    ],
)
def test_a_token_out_of_the_vocabulary_ends_every_rank_with_its_place(tmp_path, world_size, flags):
    """In a row of padding, and where its own label is masked: nothing in the step would notice."""
    documents = [[*range(70), 250] for _ in range(20)]  # read twice
    documents[13][5] = 253  # the tokenizer has 251, the model 256 rows and more
    prefix = write_token_files(tmp_path / "data", documents)
    changes = {"mock_data": None, "data_path": prefix, "split": "1", "eod_mask_loss": True} | flags
    said = run_on_ranks(refusal_with_few_tokens_checked, world_size, **changes)
    message, *others = said
    assert message.startswith(f"error: --data-path {prefix} holds token 253, the tokenizer has")
    assert f"token 5 of document 13 of {prefix}.bin" in message
    assert "\n" not in message
    assert others == [message] * (world_size - 1)


def main_with_few_tokens_checked(rank: int, flags: dict) -> None:
    indexed_files._TOKENS_CHECKED = 10
    sys.argv = ["pretrain_gpt.py", *command_line(**flags)]
    pretrain_gpt.main()


def test_so_does_one_that_a_worker_of_one_rank_reads(tmp_path):
    prefix = write_token_files(tmp_path / "data", [[*range(70), 250]] * 20 + [[253]])
    flags = {"mock_data": None, "data_path": prefix, "split": "1", "num_workers": 1}
    first, second = launch(main_with_few_tokens_checked, 2, tmp_path, flags)
    (line,) = [line for line in first.splitlines() if "error" in line]
    assert line.startswith(f"error: --data-path {prefix} holds token 253")
    assert second.strip() == "1"  # the exit status; the message is printed once


def said_while_building(group) -> str:
    def slowly(config, start):
        time.sleep(0.5)
        return pretrain_gpt.datasets_provider(config, start)

    with contextlib.redirect_stdout(io.StringIO()) as said:
        pretrain(
            tiny_config(train_iters=1, heartbeat_seconds=0.1),
            launch_of(group),
            model_provider=pretrain_gpt.model_provider,
            datasets_provider=slowly,
            get_batch=pretrain_gpt.get_batch,
            forward_step=pretrain_gpt.forward_step,
        )
    return said.getvalue()


def test_building_datasets_has_a_heartbeat():
    (said,) = run_on_ranks(said_while_building, 1)
    assert "heartbeat: start, building datasets" in said


def test_stops_at_a_loss_that_is_not_finite(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(RankFailure, match="error: iteration 2: .*nan"):
        run_on_ranks(train, 1, path, lr=1e30, weight_decay=0, clip_grad=0)
    assert [step["iteration"] for step in read_metrics(path)] == [1]


def test_trains_on_through_them_when_told_to(tmp_path):
    steps = run(
        1,
        tmp_path / "m",
        lr=1e30,
        weight_decay=0,
        clip_grad=0,
        no_check_for_nan_in_loss_and_grad=True,
    )
    assert len(steps) == 10
    assert steps[-1]["lm_loss"] is None
