import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_untied.hf.folder import (
    INDEX,
    SINGLE,
    SafetensorsFolder,
    TensorSpec,
    write_safetensors_folder,
)

TENSORS = {
    "a": torch.randn(7, 5),
    "odd": torch.randn(3, dtype=torch.bfloat16),  # 6 bytes: what follows must stay aligned
    "b": torch.randn(2, 3, dtype=torch.float64),
    "c": torch.randn(11, 2).half(),
}


def write(folder, max_shard_bytes=10**6):
    specs = {name: TensorSpec(tuple(x.shape), x.dtype) for name, x in TENSORS.items()}
    write_safetensors_folder(
        folder, specs, lambda name: TENSORS[name].split(2), max_shard_bytes=max_shard_bytes
    )


def load(folder):
    return {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}


def assert_same(found):
    assert found.keys() == TENSORS.keys()
    for name, x in TENSORS.items():
        assert found[name].dtype == x.dtype
        assert torch.equal(found[name], x)


def test_the_library_reads_one_file(tmp_path):
    write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    assert_same(load(tmp_path))


def test_the_library_reads_several_files_with_an_index(tmp_path):
    write(tmp_path, max_shard_bytes=145)  # a 140 | odd 6 + b 48 + c 44
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*files, INDEX]
    assert_same(load(tmp_path))
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 238}
    assert index["weight_map"] == {"a": files[0]} | dict.fromkeys(("odd", "b", "c"), files[1])
    assert all(name in load_file(tmp_path / file) for name, file in index["weight_map"].items())


def test_a_tensor_larger_than_a_file_may_be_has_one_of_its_own(tmp_path):
    write(tmp_path, max_shard_bytes=1)
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    assert_same(load(tmp_path))


@pytest.mark.parametrize("max_shard_bytes", [1, 150, 10**6])
def test_reads_rows_of_what_the_library_wrote(tmp_path, max_shard_bytes):
    write(tmp_path, max_shard_bytes)
    for path in tmp_path.glob("*.safetensors"):
        save_file(load_file(path), path, metadata={"format": "pt"})
    folder = SafetensorsFolder(tmp_path)
    assert folder.specs.keys() == TENSORS.keys()
    for name, x in TENSORS.items():
        assert folder.specs[name] == TensorSpec(tuple(x.shape), x.dtype)
        assert torch.equal(folder.rows(name, 1, 2), x[1:2])
        assert torch.equal(folder.rows(name, 0, len(x)), x)


def test_rejects_a_missing_shard_by_its_name(tmp_path):
    write(tmp_path, max_shard_bytes=145)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks model-00002-of-00002.safetensors, named by model"):
        SafetensorsFolder(tmp_path)


def test_rejects_an_index_that_places_a_tensor_elsewhere(tmp_path):
    write(tmp_path, max_shard_bytes=145)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["a"] = "model-00002-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors has no a, which"):
        SafetensorsFolder(tmp_path)


def test_rejects_other_formats(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"has neither .* end in .bin\); only safetensors"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("length", [5, 100])
def test_rejects_a_file_that_is_cut_off(tmp_path, length):
    write(tmp_path)
    whole = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(whole[:length])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged \(.*\); download it again"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_rejects_quantized_weights(tmp_path, dtype):
    save_file({"x": torch.zeros(2, 2).to(dtype)}, tmp_path / SINGLE)
    with pytest.raises(ValueError, match="x is (I8|F8_E4M3), a quantized checkpoint; convert one"):
        SafetensorsFolder(tmp_path)


def write_stale(folder, *, right, stale):
    """Two files that both hold ``a``; the index places it in ``right``."""
    save_file({"a": TENSORS["a"], "c": TENSORS["c"]}, folder / right)
    save_file({"a": torch.zeros(7, 5), "b": TENSORS["b"]}, folder / stale)
    weight_map = {"a": right, "b": stale, "c": right}
    # In the order of the file names, as transformers writes it: either file may come last.
    in_order = dict(sorted(weight_map.items(), key=lambda item: item[1]))
    (folder / INDEX).write_text(json.dumps({"weight_map": in_order}))


@pytest.mark.parametrize(
    ("right", "stale"), [("1.safetensors", "2.safetensors"), ("2.safetensors", "1.safetensors")]
)
def test_the_index_says_which_of_two_copies_counts(tmp_path, right, stale):
    write_stale(tmp_path, right=right, stale=stale)
    folder = SafetensorsFolder(tmp_path)
    for name in "abc":
        assert torch.equal(folder.rows(name, 0, len(TENSORS[name])), TENSORS[name])


def test_tensors_that_the_index_does_not_list_are_not_read(tmp_path):
    save_file(TENSORS | {"old": torch.zeros(3, dtype=torch.int8)}, tmp_path / SINGLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, SINGLE)}))
    assert SafetensorsFolder(tmp_path).specs.keys() == TENSORS.keys()


def test_files_that_the_index_does_not_list_are_named_and_not_read(tmp_path, caplog):
    write(tmp_path, max_shard_bytes=145)
    save_file({"a": torch.zeros(7, 5)}, tmp_path / SINGLE)
    save_file({"junk": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    folder = SafetensorsFolder(tmp_path)
    assert folder.specs.keys() == TENSORS.keys()
    assert torch.equal(folder.rows("a", 0, 7), TENSORS["a"])
    assert "not read: consolidated.safetensors, model.safetensors" in caplog.text


def test_rejects_several_files_without_an_index(tmp_path):
    write(tmp_path, max_shard_bytes=145)
    (tmp_path / INDEX).unlink()
    with pytest.raises(ValueError, match=f"model-00002-of-00002.* but neither {INDEX} .*download"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"metadata": {}}', "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "places a in 1, which is not a file of its folder"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "places a in '../model.safetensors'"),
        (
            '{"weight_map": {"a": "model.safetensors", "a": "b.safetensors"}}',
            "the key 'a' is there more than once",
        ),
    ],
)
def test_rejects_an_index_that_cannot_be(tmp_path, index, message):
    write(tmp_path)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ValueError, match=message):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("name", [SINGLE, INDEX])
def test_names_a_git_lfs_pointer_and_what_downloads_the_file(tmp_path, name):
    write(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"
    (tmp_path / name).write_text(pointer)
    with pytest.raises(ValueError, match=f"{name} is a Git LFS pointer.* run `git lfs pull` in"):
        SafetensorsFolder(tmp_path)
