import pytest

from megatron_untied.checkpoint import directory as disk


def save(directory, iteration, content="content"):
    disk.start(directory, iteration)
    (disk.staging_folder(directory, iteration) / "file").write_text(content)
    disk.publish(directory, iteration)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_the_layout_is_megatrons(tmp_path):
    save(tmp_path, 100)
    assert names(tmp_path) == ["iter_0000100", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "100"
    assert disk.find_checkpoint(tmp_path) == tmp_path / "iter_0000100"


def test_makes_the_directory(tmp_path):
    save(tmp_path / "a" / "b", 1)
    assert disk.latest_iteration(tmp_path / "a" / "b") == 1


def test_an_earlier_iteration_can_be_named(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert disk.find_checkpoint(tmp_path).name == "iter_0000002"
    assert disk.find_checkpoint(tmp_path, 1).name == "iter_0000001"


def test_nothing_was_saved(tmp_path):
    assert disk.find_checkpoint(tmp_path) is None
    assert disk.find_checkpoint(tmp_path / "not there") is None


def test_the_same_iteration_again_replaces_it(tmp_path):
    save(tmp_path, 1, "old")
    save(tmp_path, 1, "new")
    assert (disk.find_checkpoint(tmp_path) / "file").read_text() == "new"
    assert names(tmp_path) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


def test_a_checkpoint_that_was_being_replaced_is_still_found(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "iter_0000001").rename(tmp_path / "iter_0000001.replaced")
    assert disk.find_checkpoint(tmp_path).name == "iter_0000001.replaced"
    save(tmp_path, 1)
    assert names(tmp_path) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


def test_leftovers_of_a_crash_are_cleared_away_by_the_next_save(tmp_path):
    disk.start(tmp_path, 7)
    save(tmp_path, 9)
    assert names(tmp_path) == ["iter_0000009", "latest_checkpointed_iteration.txt"]


def test_retiring_a_checkpoint_that_is_gone_does_nothing(tmp_path):
    disk.retire(disk.iteration_folder(tmp_path, 3))
    assert names(tmp_path) == []


def test_a_failed_write_leaves_the_file_before(tmp_path):
    disk.write_durably(tmp_path / "file", b"old")
    with pytest.raises(TypeError):
        disk.write_durably(tmp_path / "file", "not bytes")
    assert (tmp_path / "file").read_bytes() == b"old"
