"""Where a run may begin and save, decided from small files alone."""

import dataclasses

import pytest

from megatron_untied.checkpoint import CheckpointConfig, Progress, Provenance, Samples, find_start
from megatron_untied.checkpoint import directory as disk
from megatron_untied.checkpoint.run_config import write_run_config
from megatron_untied.checkpoint.state import StoredState
from tests.support.optimizer_run import MODEL

SAMPLES = Samples(order={"--seed": 1, "--seq-length": 64}, content={"--eod-mask-loss": False})


def write_checkpoint(directory, iteration, **provenance):
    """All of a checkpoint but its tensors."""
    disk.start(directory, iteration)
    staging = disk.staging_folder(directory, iteration)
    progress = Progress(iteration=iteration, consumed_samples=4 * iteration)
    StoredState(progress=progress, ranks=None, optimizer_step=iteration, scheduler=None).write(
        staging
    )
    write_run_config(staging, MODEL, None, Provenance(**provenance))
    disk.publish(directory, iteration)


@pytest.fixture
def saved(tmp_path):
    write_checkpoint(tmp_path / "saved", 3, run_id="a", samples=SAMPLES, source_dtype="bfloat16")
    return str(tmp_path / "saved")


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"finetune": True}, "--finetune"),
        ({"load_optim": False}, "--no-load-optim"),
        ({"reset_data_position": True}, "--reset-data-position"),
        ({"exit_on_missing_checkpoint": True}, "--exit-on-missing-checkpoint"),
    ],
)
def test_refuses_to_load_nothing_where_something_is_meant(tmp_path, flags, name):
    config = CheckpointConfig(load=str(tmp_path / "nowhere"), **flags)
    with pytest.raises(ValueError, match=f"nowhere has no checkpoint, and {name} needs one"):
        find_start(config)


def test_a_folder_to_load_that_is_not_the_one_to_save_to_must_hold_a_checkpoint(tmp_path):
    """A run that has not saved yet loads from where it saves; anything else is a typo."""
    typo, save = str(tmp_path / "chekpoints"), str(tmp_path / "checkpoints")
    for config in (CheckpointConfig(load=typo), CheckpointConfig(load=typo, save=save)):
        with pytest.raises(ValueError, match=f"--load {typo} has no .*, or leave --load out"):
            find_start(config)
    assert find_start(CheckpointConfig(load=save, save=f"{save}/.")).folder is None


def test_refuses_to_evaluate_nothing(tmp_path):
    with pytest.raises(ValueError, match="has no checkpoint, and --skip-train needs one"):
        find_start(CheckpointConfig(load=str(tmp_path)), skip_train=True)


def test_a_first_start_may_load_from_where_it_will_save(tmp_path):
    folder = str(tmp_path / "new")
    start = find_start(CheckpointConfig(load=folder, save=folder), samples=SAMPLES)
    assert (start.folder, start.progress, start.same_run) == (None, Progress(), False)
    assert start.provenance == Provenance(samples=SAMPLES)


def test_a_restart_is_the_same_run(saved):
    start = find_start(CheckpointConfig(load=saved, save=saved + "/."), samples=SAMPLES)
    assert start.progress == Progress(iteration=3, consumed_samples=12)
    assert start.same_run
    assert start.provenance.run_id == "a"
    assert start.notes == ()


@pytest.mark.parametrize("flags", [{}, {"finetune": True}])
def test_a_run_that_saves_elsewhere_is_another(saved, tmp_path, flags):
    config = CheckpointConfig(load=saved, save=str(tmp_path / "other"), **flags)
    start = find_start(config, samples=SAMPLES)
    assert not start.same_run
    assert start.provenance == Provenance(samples=SAMPLES, source_dtype="bfloat16")


def leave_the_folder_alone(saved):
    (saved / "latest_checkpointed_iteration.txt").unlink()


def leave_the_tracker_alone(saved):
    (saved / "iter_0000003").rename(saved / "notes")


def leave_what_was_being_replaced(saved):
    leave_the_folder_alone(saved)
    (saved / "iter_0000003").rename(saved / "iter_0000003.replaced")


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: None,
        leave_the_folder_alone,
        leave_the_tracker_alone,
        leave_what_was_being_replaced,
    ],
)
def test_refuses_to_save_among_checkpoints_of_another_run(tmp_path, saved, change):
    write_checkpoint(tmp_path / "other", 1, run_id="b")
    change(tmp_path / "saved")
    for load in (None, str(tmp_path / "other")):
        config = CheckpointConfig(load=load, save=saved)
        with pytest.raises(ValueError, match=f"--save {saved} holds checkpoints already .*--load"):
            find_start(config)
        consenting = dataclasses.replace(config, save_into_existing=True)
        assert find_start(consenting).provenance.run_id is None


def test_refuses_to_save_a_finetuned_model_among_those_before(saved):
    config = CheckpointConfig(load=saved, save=saved, finetune=True)
    with pytest.raises(ValueError, match="--finetune starts a new run; give another folder"):
        find_start(config)


def test_other_files_are_no_checkpoints(tmp_path):
    for name in ("notes.txt", "iter_of_mine", "iter_0000001.incomplete"):
        (tmp_path / name).write_text("")
    assert find_start(CheckpointConfig(save=str(tmp_path))).folder is None


def test_evaluation_may_name_any_folder_to_save_to(saved, tmp_path):
    write_checkpoint(tmp_path / "other", 1, run_id="b")
    config = CheckpointConfig(load=saved, save=str(tmp_path / "other"))
    assert find_start(config, skip_train=True).progress.iteration == 3


OTHER_ORDER = {
    "--seed": ({"--seed": 2, "--seq-length": 64}, "--seed: 1, here 2"),
    "--seq-length": ({"--seed": 1, "--seq-length": 32}, "--seq-length: 64, here 32"),
    "added": (
        {"--seed": 1, "--seq-length": 64, "--mock-data": True},
        "--mock-data: not given, here True",
    ),
}


@pytest.mark.parametrize("case", OTHER_ORDER)
def test_refuses_another_order_of_samples(saved, case):
    order, text = OTHER_ORDER[case]
    samples = dataclasses.replace(SAMPLES, order=order)
    config = CheckpointConfig(load=saved)
    message = f"in another order: {text}.* 12 samples .*--reset-data-position .*--finetune"
    for kept in (config, dataclasses.replace(config, load_optim=False)):
        with pytest.raises(ValueError, match=message):
            find_start(kept, samples=samples)
    anew = find_start(dataclasses.replace(config, reset_data_position=True), samples=samples)
    assert anew.progress == Progress(iteration=3, consumed_samples=0, data_start=3)
    assert anew.provenance.samples == samples
    tuned = find_start(dataclasses.replace(config, finetune=True), samples=samples)
    assert tuned.progress == Progress()
    assert find_start(config, samples=samples, skip_train=True).progress.iteration == 3


def test_notes_another_view_of_the_same_samples(saved):
    samples = dataclasses.replace(SAMPLES, content={"--eod-mask-loss": True})
    start = find_start(CheckpointConfig(load=saved), samples=samples)
    (note,) = start.notes
    assert note.endswith("saw its samples in another way: --eod-mask-loss: False, here True")
    assert start.progress == Progress(iteration=3, consumed_samples=12)


def test_notes_that_an_old_checkpoint_does_not_know_its_samples(tmp_path):
    write_checkpoint(tmp_path, 2)
    config = CheckpointConfig(load=str(tmp_path), save=str(tmp_path))
    start = find_start(config, samples=SAMPLES)
    (note,) = start.notes
    assert "does not record its training samples; the data continues after 8 samples" in note
    assert start.same_run


def test_refuses_a_provenance_of_another_version(saved, tmp_path):
    path = tmp_path / "saved" / "iter_0000003" / "run_config.json"
    path.write_text(path.read_text().replace('"run_id"', '"run_number"'))
    with pytest.raises(
        ValueError, match=r"run_config.json: Provenance has unknown \['run_number'\]"
    ):
        find_start(CheckpointConfig(load=saved))
