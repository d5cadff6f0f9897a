"""Flip one byte of a checkpoint: every rank ends with one line that names the file and the save."""

import random
import shutil
from pathlib import Path

import pytest

from megatron_untied.checkpoint import CheckpointConfig, Progress, load_checkpoint, save_checkpoint
from megatron_untied.checkpoint.checksums import CHECKSUMS, ChecksumError, Checksums
from tests.checkpoint.warnings import recorded_warnings
from tests.support.optimizer_run import Split, small_run
from tests.support.ranks import run_on_ranks

FILES = (
    *("__0_0.distcp", "__1_0.distcp", ".metadata", "random_00000.pt", "random_00001.pt"),
    *("state.json", "run_config.json", CHECKSUMS),
)
FLIPS = 5


def train_and_save(group, path):
    run = small_run(Split())
    run.train(range(1))
    save_checkpoint(path, run.state, Progress(iteration=1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Iteration 1, saved by two ranks."""
    path = tmp_path_factory.mktemp("checksums") / "saved"
    run_on_ranks(train_and_save, 2, str(path))
    return path


def messages_of_loading(group, path, file, positions):
    """What loading ends with after the byte at each of ``positions`` was flipped."""
    target, messages = Path(path) / "iter_0000001" / file, []
    run, whole = small_run(Split(), seed=3), target.read_bytes()
    for position, flip in positions:
        group.barrier().wait()
        if group.rank() == 0:
            target.write_bytes(
                whole[:position] + bytes([whole[position] ^ flip]) + whole[position + 1 :]
            )
        group.barrier().wait()
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller looks at the message
            load_checkpoint(CheckpointConfig(load=path), run.state, seed=3)
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("ranks", [2, 1], ids=["same-layout", "other-layout"])
@pytest.mark.parametrize("file", FILES)
def test_a_flipped_byte_is_found_on_every_rank(saved, tmp_path, file, ranks):
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    size, drawn = (folder / "iter_0000001" / file).stat().st_size, random.Random(file)
    places = [0, size - 1, *(drawn.randrange(size) for _ in range(FLIPS - 2))]
    flips = [(place, drawn.randrange(1, 256)) for place in places]
    answers = run_on_ranks(messages_of_loading, ranks, str(folder), file, flips)
    for said in zip(*answers, strict=True):
        assert len(set(said)) == 1
        assert "\n" not in said[0]
        assert str(folder / "iter_0000001") in said[0]
        # The own random state is unpickled before, and has its own message.
        assert f"{file} has changed since it was saved" in said[0] or (
            file.startswith("random") and f"{file} is damaged; give --no-load-rng" in said[0]
        )


def test_every_byte_has_a_checksum(saved):
    folder = saved / "iter_0000001"
    assert {path.name for path in folder.iterdir()} == set(FILES)
    ends = dict.fromkeys(FILES, 0)
    for part in sorted(Checksums.read(folder).parts):
        assert part.offset == ends[part.file], "a gap, or an overlap"
        ends[part.file] += part.num_bytes
    del ends[CHECKSUMS]  # covers itself
    assert ends == {name: (folder / name).stat().st_size for name in ends}


def warnings_of_loading(group, path):
    with recorded_warnings() as said:
        load_checkpoint(CheckpointConfig(load=path), small_run(Split()).state, seed=3)
    return said


def test_a_checkpoint_without_checksums_loads_with_one_line(saved, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    (folder / "iter_0000001" / CHECKSUMS).unlink()
    first, second = run_on_ranks(warnings_of_loading, 2, str(folder))
    assert len(first) == 1
    assert first[0].startswith(f"{folder / 'iter_0000001'} has no {CHECKSUMS}: changes since ")
    assert second == []


def test_a_file_of_checksums_that_was_cut_off_is_refused(saved, tmp_path):
    folder = Path(shutil.copytree(saved / "iter_0000001", tmp_path / "copy"))
    content = (folder / CHECKSUMS).read_bytes()
    for size in (0, 5, len(content) // 2, len(content) - 1):
        (folder / CHECKSUMS).write_bytes(content[:size])
        with pytest.raises(ChecksumError, match=f"{CHECKSUMS} has changed since it was saved"):
            Checksums.read(folder)
