"""What checkpoints take on disk, against written ones, and a warning before it is full."""

import contextlib
import io
import shutil
from collections import namedtuple

import pytest

from megatron_untied.checkpoint import Progress, save_checkpoint
from megatron_untied.planner.disk import Disk
from megatron_untied.planner.weights import num_parameters
from tests.support.command_line import tiny_config
from tests.support.planning import run_config
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import train, train_state_on

WIDE = {"hidden_size": 192, "ffn_hidden_size": 384, "num_layers": 3}
LONG = "--model llama3-8b --seq-length 4096 --train-iters 1000"
Usage = namedtuple("Usage", "total used free")


def disk(flags: str, **changes) -> Disk:
    return Disk.of(run_config(f"{LONG} {flags}"), 8, **changes)


def save_once(group, folder, **flags):
    config = tiny_config(group.size(), save=folder, **WIDE, **flags)
    train_state = train_state_on(group, save=folder, **WIDE, **flags)
    save_checkpoint(folder, train_state.checkpoint_state, Progress(iteration=1), run_config=config)
    return Disk.of(config, group.size()).checkpoint_bytes


@pytest.mark.parametrize("flags", [{}, {"use_torch_fsdp2": True}])
def test_bytes_are_those_of_a_checkpoint(tmp_path, flags):
    counted = run_on_ranks(save_once, 2, tmp_path / "save", **flags)[0]
    written = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert counted == pytest.approx(written, rel=0.03)


def test_of_a_large_model_it_is_weights_and_two_moments():
    parameters = num_parameters(run_config(LONG).model)
    assert disk("").checkpoint_bytes == pytest.approx(12 * parameters, rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "saved", "kept", "at_once"),
    [
        ("--save x", [1000], 1, 1),
        ("--save x --save-interval 300", [300, 600, 900, 1000], 4, 4),
        ("--save x --save-interval 250", [250, 500, 750, 1000], 4, 4),
        ("--save x --save-interval 250 --save-retain-interval 500", [250, 500, 750, 1000], 2, 3),
        ("--save x --save-interval 300 --save-retain-interval 1000", [300, 600, 900, 1000], 1, 2),
        ("--save x --save-interval 250 --most-recent-k 2", [250, 500, 750, 1000], 2, 3),
        (
            "--save x --save-interval 250 --most-recent-k 2 --save-retain-interval 500",
            [250, 500, 750, 1000],
            3,
            3,
        ),
        ("--save x --save-interval 300 --exit-interval 700", [300, 600, 700], 3, 3),
        ("--save x --save-interval 2000", [1000], 1, 1),
        ("--save x --skip-train", [], 0, 0),
        ("", [], 0, 0),
    ],
)
def test_how_many_are_there(flags, saved, kept, at_once):
    found = disk(flags)
    assert (list(found.saved), found.num_kept) == (saved, kept)
    assert found.peak_bytes == at_once * found.checkpoint_bytes


def test_a_run_that_continues_writes_the_rest():
    assert disk("--save x --save-interval 300", done=600).saved == (900, 1000)
    assert disk("--save x --save-interval 300", done=1000).saved == ()


def test_says_what_the_recipe_writes():
    """Ten checkpoints of an 8B model are about one TB."""
    line = disk("--save x --save-interval 100").describe()
    assert line == (
        "disk: 89.7 GiB per checkpoint, 10 written and 10 kept: 897.5 GiB, at most 897.5 GiB"
    )
    assert disk("").describe().endswith("none is written without --save")


def test_warns_where_too_little_is_free(monkeypatch, tmp_path):
    asked = []

    def usage(path):
        asked.append(path)
        return Usage(0, 0, 200 << 30)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    few = disk(f"--save {tmp_path}/not/there --save-interval 500")
    assert few.shortfall() is None
    assert asked == [tmp_path]
    many = disk(f"--save {tmp_path}/not/there --save-interval 100").shortfall()
    assert many.startswith(f"warning: checkpoints in --save {tmp_path}/not/there will take up to")
    assert "200.0 GiB free; --save-retain-interval 1000 keeps the last" in many
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 1 << 30))
    assert few.shortfall().endswith("give a folder on a larger file system")


def train_on_a_full_disk(group, folder):
    before, shutil.disk_usage = shutil.disk_usage, lambda path: Usage(0, 0, 1000)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            train(group, train_iters=1, save=folder)
    finally:
        shutil.disk_usage = before
    return said.getvalue()


def test_training_warns_at_its_start(tmp_path):
    (said,) = run_on_ranks(train_on_a_full_disk, 1, tmp_path)
    assert said.count("warning: checkpoints in --save") == 1
    assert said.index("warning: checkpoints") < said.index(" saved ")
