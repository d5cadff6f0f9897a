import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron_untied.checkpoint import (
    CheckpointConfig,
    Progress,
    Provenance,
    load_checkpoint,
    read_model_config,
    save_checkpoint,
)
from megatron_untied.checkpoint import directory as disk
from megatron_untied.checkpoint.run_config import read_provenance
from megatron_untied.config import RotaryConfig
from megatron_untied.sharding.shards import ModelShards
from tests.checkpoint.warnings import recorded_warnings
from tests.support.optimizer_run import MODEL, Split, small_run
from tests.support.ranks import run_on_ranks
from tests.support.whole_model import gather_parameters, gather_state


@dataclass(frozen=True)
class Settings:
    """Stands for the configuration of a whole run."""

    model: object
    folder: Path
    sizes: tuple


def save_iterations(group, path, iterations, **options):
    run = small_run(Split())
    return [
        str(save_checkpoint(path, run.state, Progress(iteration=iteration), **options))
        for iteration in iterations
    ]


def folders(path):
    return sorted(name for name in os.listdir(path) if name.startswith("iter_"))


def test_returns_the_folder_on_every_rank(tmp_path):
    answers = run_on_ranks(save_iterations, 2, str(tmp_path), [1, 2])
    assert answers == [[str(tmp_path / "iter_0000001"), str(tmp_path / "iter_0000002")]] * 2


def test_keeps_all_checkpoints_unless_told_otherwise(tmp_path):
    run_on_ranks(save_iterations, 1, str(tmp_path), [1, 2, 3])
    assert folders(tmp_path) == ["iter_0000001", "iter_0000002", "iter_0000003"]


def test_retains_multiples_and_the_last(tmp_path):
    run_on_ranks(save_iterations, 2, str(tmp_path), [1, 2, 3, 4, 5, 6, 7], save_retain_interval=3)
    assert folders(tmp_path) == ["iter_0000003", "iter_0000006", "iter_0000007"]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"most_recent_k": 3}, [5, 6, 7]),
        ({"most_recent_k": 1}, [7]),
        ({"most_recent_k": 9}, [1, 2, 3, 4, 5, 6, 7]),
        ({"most_recent_k": 2, "save_retain_interval": 4}, [4, 6, 7]),
    ],
)
def test_keeps_the_last_ones(tmp_path, options, kept):
    run_on_ranks(save_iterations, 2, str(tmp_path), [1, 2, 3, 4, 5, 6, 7], **options)
    assert folders(tmp_path) == [f"iter_{iteration:07d}" for iteration in kept]


def test_the_last_ones_of_a_run_are_counted_without_those_of_another(tmp_path):
    run_on_ranks(save_as, 1, str(tmp_path), "a", [1, 3])
    run_on_ranks(save_as, 1, str(tmp_path), "b", [2, 4, 5], most_recent_k=2)
    assert run_ids(tmp_path) == {
        "iter_0000001": "a", "iter_0000003": "a", "iter_0000004": "b", "iter_0000005": "b",
    }  # fmt: skip


def test_never_deletes_a_later_checkpoint(tmp_path):
    run_on_ranks(save_iterations, 1, str(tmp_path), [5, 2], save_retain_interval=3)
    assert folders(tmp_path) == ["iter_0000002", "iter_0000005"]


def save_as(group, path, run_id, iterations, **options):
    """Save; what was logged about it."""
    with recorded_warnings() as said:
        save_iterations(group, path, iterations, provenance=Provenance(run_id=run_id), **options)
    return said


def run_ids(path):
    return {name: read_provenance(path / name).run_id for name in folders(path)}


def test_what_another_run_wrote_is_neither_deleted_nor_replaced(tmp_path):
    run_on_ranks(save_as, 1, str(tmp_path), "a", [1, 2, 5])
    (said,) = run_on_ranks(save_as, 1, str(tmp_path), "b", [2, 3, 4], save_retain_interval=100)
    assert run_ids(tmp_path) == {
        "iter_0000001": "a", "iter_0000002.kept-1": "a", "iter_0000005": "a", "iter_0000004": "b",
    }  # fmt: skip
    aside, back = said
    folder = tmp_path / "iter_0000002"
    assert aside == f"{folder} was not written by this run and is now iter_0000002.kept-1"
    assert back.endswith("now names iteration 2 and no longer 5, whose checkpoint stays")


def test_the_checkpoint_before_stays_if_another_run_wrote_it(tmp_path):
    run_on_ranks(save_as, 1, str(tmp_path), "a", [1])
    run_on_ranks(save_as, 1, str(tmp_path), "b", [2, 3], save_retain_interval=100)
    assert run_ids(tmp_path) == {"iter_0000001": "a", "iter_0000003": "b"}


def test_a_foreign_folder_with_the_name_of_a_checkpoint_is_kept(tmp_path):
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000001" / "thesis.txt").write_text("all of it")
    run_on_ranks(save_as, 1, str(tmp_path), "a", [1, 2], save_retain_interval=100)
    assert (tmp_path / "iter_0000001.kept-1" / "thesis.txt").read_text() == "all of it"


def test_the_unfinished_checkpoint_of_another_run_is_kept(tmp_path):
    """That run may be saving the same iteration at this moment."""
    disk.start(tmp_path, 1, "b")
    (disk.staging_folder(tmp_path, 1, "b") / "file").write_text("of b")
    foreign = tmp_path / "iter_0000002.incomplete"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("all of it")
    (said,) = run_on_ranks(save_as, 1, str(tmp_path), "a", [1])
    stays = "was not written by this run and stays"
    assert [line.partition(" " + stays)[0] for line in said] == [
        str(tmp_path / "iter_0000001.b.incomplete"), str(foreign)
    ]  # fmt: skip
    disk.publish(tmp_path, 1, "b")
    assert (tmp_path / "iter_0000001" / "file").read_text() == "of b"
    assert (foreign / "thesis.txt").read_text() == "all of it"


def test_what_another_run_was_replacing_when_it_was_stopped_is_kept(tmp_path):
    run_on_ranks(save_as, 1, str(tmp_path), "a", [1])
    (tmp_path / "iter_0000001").rename(tmp_path / "iter_0000001.replaced")
    run_on_ranks(save_as, 1, str(tmp_path), "b", [1])
    assert run_ids(tmp_path) == {"iter_0000001": "b", "iter_0000001.replaced.kept-1": "a"}


def test_the_same_run_replaces_its_own_checkpoint(tmp_path):
    for _ in range(2):
        assert run_on_ranks(save_as, 1, str(tmp_path), "a", [1]) == [[]]
    assert folders(tmp_path) == ["iter_0000001"]


def test_the_configuration_can_be_read_by_people_and_back(tmp_path):
    settings = Settings(model=MODEL, folder=Path("somewhere"), sizes=(1, 2))
    run_on_ranks(save_iterations, 1, str(tmp_path), [4], run_config=settings)
    values = json.loads((tmp_path / "iter_0000004" / "run_config.json").read_text())
    assert values["folder"] == "somewhere"
    assert values["sizes"] == [1, 2]
    assert values["model"]["rotary"]["base"] == 10000.0
    assert read_model_config(tmp_path) == MODEL
    assert read_model_config(str(tmp_path), 4) == MODEL


def save_other_architecture(group, path, model):
    run = small_run(Split(), model)
    save_checkpoint(path, run.state, Progress(iteration=1))


def test_every_field_of_the_architecture_comes_back(tmp_path):
    rotary = RotaryConfig(base=5e5, scaling="llama3", scaling_factor=8.0, attention_factor=1.2)
    model = dataclasses.replace(MODEL, rotary=rotary, window_size=5, norm_epsilon=1e-6)
    run_on_ranks(save_other_architecture, 1, str(tmp_path), model)
    assert read_model_config(tmp_path) == model


def test_use_checkpoint_args_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"--use-checkpoint-args: {tmp_path} has no checkpoint"):
        read_model_config(tmp_path)


def save_into_a_file(group, path):
    Path(path).write_text("a file") if group.rank() == 0 else None
    run = small_run(Split())
    with pytest.raises(OSError) as caught:  # noqa: PT011 - any, on every rank
        save_checkpoint(path, run.state, Progress(iteration=1))
    return type(caught.value)


def test_what_stops_one_rank_stops_all(tmp_path):
    assert run_on_ranks(save_into_a_file, 2, str(tmp_path / "file")) == [FileExistsError] * 2


def save_and_load_before_the_first_step(group, path):
    run, other = small_run(Split()), small_run(Split(), seed=3)
    save_checkpoint(path, run.state, Progress())
    load_checkpoint(CheckpointConfig(load=path), other.state, seed=3)
    assert other.state.shards.step() == 0
    for one in (run, other):
        one.train(range(2))
    first, second = gather_state(run.state), gather_state(other.state)
    fresh = small_run(Split())
    fresh.train(range(2))
    third = gather_state(fresh.state)
    for name in first:
        assert torch.equal(first[name], second[name])
        assert torch.equal(first[name], third[name])


def test_a_checkpoint_of_the_very_start_disturbs_nothing(tmp_path):
    run_on_ranks(save_and_load_before_the_first_step, 2, str(tmp_path))


def model_only(run):
    return dataclasses.replace(run.state, shards=ModelShards(run.model), scheduler=None)


def save_weights_alone(group, path):
    run = small_run(Split(tensor=2, bf16=True))
    save_checkpoint(path, model_only(run), Progress())
    return gather_parameters(run.model, run.state.layouts)


def load_for_evaluation(group, path):
    run = small_run(Split(tensor=group.size()), seed=3)
    load_checkpoint(CheckpointConfig(load=path), model_only(run), seed=3)
    return gather_parameters(run.model, run.state.layouts)


def load_for_finetuning(group, path):
    run = small_run(Split(bf16=True), seed=3)
    load_checkpoint(CheckpointConfig(load=path, finetune=True), run.state, seed=3)
    return gather_parameters(run.model, run.state.layouts)


@pytest.mark.parametrize("load", [load_for_evaluation, load_for_finetuning])
def test_weights_alone_keep_their_dtype_and_load_into_any(tmp_path, load):
    saved = run_on_ranks(save_weights_alone, 2, str(tmp_path))[0]
    loaded = run_on_ranks(load, 1, str(tmp_path))[0]
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    files = (tmp_path / "iter_0000000").glob("*.distcp")
    # 2 bytes a weight, and what torch.save adds to each of the slices.
    num_weights = sum(values.numel() for values in saved.values())
    assert sum(file.stat().st_size for file in files) < 2 * num_weights + 120_000


def load_trained_for_evaluation(group, path):
    trained = small_run(Split())
    trained.train(range(2))
    save_checkpoint(path, trained.state, Progress(iteration=2))
    return gather_state(trained.state), load_for_evaluation(group, path)


def test_evaluation_needs_no_optimizer(tmp_path):
    for trained, loaded in run_on_ranks(load_trained_for_evaluation, 1, str(tmp_path)):
        for name, values in loaded.items():
            assert torch.equal(values, trained[f"model.{name}"])
