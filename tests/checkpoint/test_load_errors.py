"""What cannot be loaded gets one line with what to change, on every rank, and changes nothing."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron_untied.checkpoint import (
    CheckpointConfig,
    Progress,
    bytes_to_read,
    load_checkpoint,
    save_checkpoint,
)
from megatron_untied.checkpoint.checksums import CHECKSUMS
from megatron_untied.checkpoint.compatibility import CHANGEABLE, STRUCTURE
from megatron_untied.config import ModelConfig, RotaryConfig
from tests.checkpoint.warnings import recorded_warnings
from tests.support.optimizer_run import MODEL, Split, small_run
from tests.support.ranks import run_on_ranks
from tests.support.whole_model import gather_state


def train_and_save(group, path):
    run = small_run(Split())
    for iteration in (1, 2):
        run.train(range(iteration - 1, iteration))
        save_checkpoint(path, run.state, Progress(iteration=iteration))


def message(group, config, model=MODEL, lr_decay_steps=40):
    run = small_run(Split(), model, seed=3)
    run.state.scheduler.lr_decay_steps = lr_decay_steps
    before = gather_state(run.state)
    own = {
        name: folders[group.rank()]
        for name in ("load", "save")
        if isinstance(folders := getattr(config, name), list)
    }
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller looks at the message
        load_checkpoint(dataclasses.replace(config, **own), run.state, seed=3)
    after = gather_state(run.state)
    assert all(torch.equal(before[name], after[name]) for name in before)
    return str(caught.value)


def assert_refused(*texts, ranks=2, **arguments):
    """Every rank says the same line, which has all ``texts`` in it."""
    answers = run_on_ranks(message, ranks, **arguments)
    assert len(set(answers)) == 1
    assert "\n" not in answers[0]
    for text in texts:
        assert text in answers[0], answers[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with iterations 1 and 2, saved by 2 ranks."""
    path = tmp_path_factory.mktemp("trained")
    run_on_ranks(train_and_save, 2, str(path))
    return path


@pytest.fixture
def saved(trained, tmp_path):
    """A copy to spoil."""
    return Path(shutil.copytree(trained, tmp_path / "saved"))


@pytest.fixture
def unsummed(saved):
    """The copy without its checksums, as of an earlier version: other checks meet what is wrong."""
    (saved / "iter_0000002" / CHECKSUMS).unlink()
    return saved


@pytest.fixture
def config(saved):
    return CheckpointConfig(load=str(saved))


def test_refuses_a_missing_checkpoint_when_told_to(tmp_path):
    path = str(tmp_path)
    config = CheckpointConfig(load=path, save=path, exit_on_missing_checkpoint=True)
    advice = "leave --exit-on-missing-checkpoint out"
    assert_refused(f"--load {tmp_path} has no checkpoint", advice, config=config)


def progress_without_a_checkpoint(group, path):
    config = CheckpointConfig(load=path, save=path)
    return load_checkpoint(config, small_run(Split()).state, seed=3)


def test_starts_at_zero_without_a_checkpoint(tmp_path):
    for path in (str(tmp_path), str(tmp_path / "not there"), None):
        assert run_on_ranks(progress_without_a_checkpoint, 1, path) == [Progress()]


def test_refuses_a_tracker_that_names_a_missing_folder(saved, config):
    (saved / "latest_checkpointed_iteration.txt").write_text("30")
    assert_refused("names iteration 30", "has 1, 2: choose with --ckpt-step 2", config=config)


def test_refuses_a_tracker_that_names_a_folder_that_was_never_completed(saved, config):
    (saved / "iter_0000002").rename(saved / "iter_0000002.incomplete")
    assert_refused("names iteration 2", "has 1: choose with --ckpt-step 1", config=config)


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"


@pytest.mark.parametrize(
    "name", ["__0_0.distcp", ".metadata", "random_00001.pt", "state.json", "run_config.json"]
)
def test_names_a_git_lfs_pointer_in_place_of_a_file(saved, config, name):
    (saved / "iter_0000002" / name).write_text(LFS_POINTER)
    assert_refused(f"{name} is a Git LFS pointer", "run `git lfs pull` in", config=config)


@pytest.mark.parametrize("text", ["garbage", "", "-3", "1.5", "²", "\udc80"])
def test_refuses_a_tracker_with_garbage(saved, config, text):
    tracker = saved / "latest_checkpointed_iteration.txt"
    tracker.write_bytes(text.encode(errors="surrogateescape"))
    assert_refused("not an iteration", "choose with --ckpt-step 2", ranks=1, config=config)


def test_refuses_an_iteration_that_is_not_there(config):
    config = dataclasses.replace(config, ckpt_step=7)
    assert_refused("--ckpt-step names iteration 7", "has 1, 2", config=config)


def test_refuses_a_directory_without_any_checkpoint_for_an_iteration(tmp_path):
    config = CheckpointConfig(load=str(tmp_path), ckpt_step=7)
    assert_refused("has no checkpoint at all", ranks=1, config=config)


def test_refuses_checkpoints_that_no_tracker_file_names(saved, config):
    (saved / "latest_checkpointed_iteration.txt").unlink()
    assert_refused("has no latest_checkpointed_iteration.txt", "--ckpt-step 2", config=config)


@pytest.mark.parametrize("name", ["run_config.json", "state.json"])
def test_refuses_a_folder_without_its_small_files(saved, config, name):
    (saved / "iter_0000002" / name).unlink()
    assert_refused(f"{name} is missing", "not a whole checkpoint", ranks=1, config=config)


@pytest.mark.parametrize("name", ["run_config.json", "state.json"])
def test_refuses_small_files_with_something_else_in_them(unsummed, config, name):
    (unsummed / "iter_0000002" / name).write_text("nonsense")
    assert_refused(f"{name} is not JSON", ranks=1, config=config)


def test_refuses_a_folder_without_its_index(saved, config):
    (saved / "iter_0000002" / ".metadata").unlink()
    assert_refused("not a whole checkpoint: .metadata", "--ckpt-step", config=config)


def test_refuses_a_folder_with_a_spoilt_index(saved, config):
    (saved / "iter_0000002" / ".metadata").write_bytes(b"not an index")
    assert_refused("not a whole checkpoint: .metadata", ranks=1, config=config)


def test_refuses_a_folder_without_one_of_its_files(saved, config):
    (saved / "iter_0000002" / "__1_0.distcp").unlink()
    assert_refused("not a whole checkpoint: __1_0.distcp has 0 of", config=config)


def test_refuses_a_file_that_was_cut_off(saved, config):
    file = saved / "iter_0000002" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    assert_refused("not a whole checkpoint: __0_0.distcp has", config=config)


def test_refuses_ranks_that_see_different_directories(saved, tmp_path):
    folders = [str(saved), str(tmp_path / "other node")]
    config = CheckpointConfig(load=folders, save=folders)
    assert_refused("on rank 0 and None on rank 1", "same file system", config=config)


def test_says_on_every_rank_what_went_wrong_on_one(saved, tmp_path):
    other = shutil.copytree(saved, tmp_path / "other")
    (other / "latest_checkpointed_iteration.txt").write_text("30")
    config = CheckpointConfig(load=[str(saved), str(other)])
    assert_refused("names iteration 30", config=config)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_layers": 3}, "--num-layers: 2, here 3"),
        ({"vocab_size": 252}, "tokens in the tokenizer's vocabulary: 251, here 252"),
        ({"swiglu": False}, "--swiglu: True, here False"),
        ({"num_attention_heads": 4}, "--num-attention-heads: 8, here 4"),
        ({"normalization": "LayerNorm"}, "--normalization: RMSNorm, here LayerNorm"),
        ({"norm_epsilon": 1e-6}, "--norm-epsilon: 1e-05, here 1e-06"),
        ({"rotary": RotaryConfig(percent=0.5)}, "--rotary-percent: 1.0, here 0.5"),
    ],
)
def test_refuses_another_architecture(config, change, text):
    model = dataclasses.replace(MODEL, **change)
    assert_refused("of another model", text, "--use-checkpoint-args", config=config, model=model)


def test_does_not_advise_the_flag_that_was_given(saved, config):
    config = dataclasses.replace(config, use_checkpoint_args=True)
    model = dataclasses.replace(MODEL, num_layers=3)
    refused = run_on_ranks(message, 1, config, model)[0]
    assert "--num-layers: 2, here 3. Leave these flags out" in refused
    assert "or --use-checkpoint-args" not in refused


YARN = RotaryConfig(scaling="yarn", scaling_factor=4.0, original_max_positions=64)
CHANGED = {
    "nothing": ({}, None),
    "base": ({"rotary": RotaryConfig(base=5e5)}, "--rotary-base: 10000.0, here 500000.0"),
    "longer": ({"max_position_embeddings": 512}, "--max-position-embeddings: 256, here 512"),
    "shorter": ({"max_position_embeddings": 32}, None),
    "window": ({"window_size": 9}, "--window-size: unlimited, here 8,0"),
    "yarn": (
        {"rotary": YARN, "window_size": 1},
        "--window-size: unlimited, here 0,0; scaling of the rotary embedding: none, here yarn; "
        "stretch factor of the rotary scaling: 1.0, here 4.0; original context of the rotary "
        "scaling: 8192, here 64",
    ),
    "what plain rotation does not read": ({"rotary": RotaryConfig(beta_fast=7.0)}, None),
}


def warnings_of_loading(group, config, model) -> list[str]:
    with recorded_warnings() as said:
        load_checkpoint(config, small_run(Split(), model).state, seed=3)
    return [line for line in said if CHECKSUMS not in line]


@pytest.mark.parametrize("change", CHANGED)
def test_warns_once_of_settings_that_change_the_function_as_may_be_meant(saved, config, change):
    fields, text = CHANGED[change]
    model = dataclasses.replace(MODEL, **fields)
    first, second = run_on_ranks(warnings_of_loading, 2, config, model)
    folder = saved / "iter_0000002"
    assert first == ([f"{folder} becomes another function of its input: {text}"] if text else [])
    assert second == []


def test_every_setting_is_compared_or_changes_nothing():
    """A field that is new in ModelConfig has to be put somewhere."""
    rotary = {f"rotary.{field.name}" for field in dataclasses.fields(RotaryConfig)}
    fields = {field.name for field in dataclasses.fields(ModelConfig)} - {"rotary"}
    of_weights_alone = {"make_vocab_size_divisible_by", "init_method_std"}
    assert fields | rotary == {*STRUCTURE, *CHANGEABLE} | of_weights_alone
    assert not {*STRUCTURE} & {*CHANGEABLE}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_layers": "2"}, "num_layers is '2', which is no int"),
        ({"num_layers": 2.5}, "num_layers is 2.5, which is no int"),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size 0 is below 1, the smallest value"),
        ({"kv_channels": 7}, "kv_channels 7 is odd; channels are rotated in pairs; use 8"),
        ({"num_layers": True}, "num_layers is True, which is no int"),
        ({"swiglu": 1}, "swiglu is 1, which is no bool"),
        ({"norm_epsilon": None}, "norm_epsilon is None, which is no float"),
        ({"window_size": "8"}, "window_size is '8', which is no int | None"),
        ({"normalization": "BatchNorm"}, "normalization is 'BatchNorm', which is no Literal"),
        ({"rotary": {"base": "10000"}}, "base is '10000', which is no float"),
    ],
)
def test_refuses_values_of_another_type(saved, config, fields, text):
    claim(saved, **fields)
    assert_refused(f"run_config.json: {text}", "--ckpt-step", ranks=1, config=config)


def test_a_whole_number_is_a_float(saved, config):
    claim(saved, rotary={"base": 10000})
    assert run_on_ranks(warnings_of_loading, 2, config, MODEL) == [[], []]


def test_refuses_heads_of_another_width_though_all_shapes_are_equal(config):
    model = dataclasses.replace(
        MODEL, num_attention_heads=4, num_query_groups=2, kv_channels=16, qk_layernorm=False
    )
    assert_refused("--num-attention-heads: 8, here 4", ranks=1, config=config, model=model)


def claim(folder, **fields):
    """Edit the architecture, and delete the checksums, as the message about a change advises."""
    (folder / "iter_0000002" / CHECKSUMS).unlink()
    path = folder / "iter_0000002" / "run_config.json"
    values = json.loads(path.read_text())
    values["model"] |= fields
    path.write_text(json.dumps(values))


def test_refuses_tensors_of_another_shape(saved, config):
    claim(saved, ffn_hidden_size=80)
    model = dataclasses.replace(MODEL, ffn_hidden_size=80)
    assert_refused(
        "does not fit this model",
        "model.decoder.layers.0.mlp.linear_fc1.weight is [144, 48], here [160, 48]",
        " and 9 more",
        ranks=1,
        config=config,
        model=model,
    )


def test_refuses_missing_tensors(saved, config):
    claim(saved, num_layers=3)
    model = dataclasses.replace(MODEL, num_layers=3)
    assert_refused("model.decoder.layers.2", "is missing", ranks=1, config=config, model=model)


def test_refuses_tensors_that_nobody_asked_for(saved, config):
    claim(saved, num_layers=1)
    model = dataclasses.replace(MODEL, num_layers=1)
    for flags in ({}, {"finetune": True}):
        asked = dataclasses.replace(config, **flags)
        assert_refused("model.decoder.layers.1", "unknown here", ranks=1, config=asked, model=model)


def test_refuses_an_architecture_from_another_version(saved, config):
    claim(saved, number_of_experts=8)
    assert_refused("ModelConfig has unknown ['number_of_experts']", ranks=1, config=config)


def test_refuses_a_missing_file_of_random_states(saved, config):
    (saved / "iter_0000002" / "random_00001.pt").unlink()
    assert_refused("random_00001.pt is missing", "--no-load-rng", config=config)


def test_refuses_another_schedule(config):
    assert_refused(
        "lr_decay_steps 40, here 80", "--no-load-optim", config=config, lr_decay_steps=80
    )


def progress_with_another_schedule(group, config):
    run = small_run(Split(), seed=3)
    run.state.scheduler.lr_decay_steps = 80
    progress = load_checkpoint(config, run.state, seed=3)
    return progress.iteration, run.state.shards.step(), run.state.scheduler.lr_decay_steps


@pytest.mark.parametrize(("flag", "steps"), [("override", 80), ("use_checkpoint", 40)])
def test_moments_go_on_under_either_schedule(config, flag, steps):
    config = dataclasses.replace(config, **{f"{flag}_opt_param_scheduler": True})
    assert run_on_ranks(progress_with_another_schedule, 1, config) == [(2, 2, steps)]


def bytes_that_were_read(group, config):
    run, read = small_run(Split(), seed=3), []
    load_checkpoint(config, run.state, seed=3, advance=read.append)
    return len(read), sum(read), bytes_to_read(config, run.state)


@pytest.mark.parametrize("flags", [{}, {"finetune": True}])
def test_reading_tells_how_far_it_is(config, flags):
    config = dataclasses.replace(config, **flags)
    for calls, read, expected in run_on_ranks(bytes_that_were_read, 2, config):
        assert calls > 10
        assert read == expected


def test_refuses_weights_alone_where_training_should_go_on(unsummed, config):
    path = unsummed / "iter_0000002" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"optimizer_step": None}))
    assert_refused("has weights only; give --finetune or --no-load-optim", config=config)


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("state.json", b"[]", "state.json is not a JSON object"),
        ("state.json", b"{}", "state.json: StoredState has unknown [], missing ['optimizer_step'"),
        ("run_config.json", b"[1]", "run_config.json is not a JSON object"),
        ("run_config.json", b'{"model": "x"}', "run_config.json: model is no object"),
        ("random_00001.pt", b"junk", "random_00001.pt is damaged; give --no-load-rng"),
    ],
)
def test_refuses_a_small_file_with_something_else_in_it(unsummed, config, name, data, text):
    (unsummed / "iter_0000002" / name).write_bytes(data)
    assert_refused(text, config=config)


def refusal(group, config) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the caller looks at the message
        load_checkpoint(config, small_run(Split()).state, seed=3)
    return str(error.value)


def test_refuses_tensors_that_cannot_be_read_though_their_file_is_long_enough(unsummed, config):
    path = min((unsummed / "iter_0000002").glob("*.distcp"))
    path.write_bytes(b"\x55" * path.stat().st_size)
    # Other tensors may have been read by then, so here the weights are not compared.
    for message in run_on_ranks(refusal, 2, config):
        assert "is not a whole checkpoint" in message
        assert "where its tensors are read" in message
