"""Every node finds or makes the sample indices; what fails on one rank ends all with one error."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_untied.checkpoint.collective_errors import gather_rare
from megatron_untied.config.data import DataConfig
from megatron_untied.data import index_cache, packed_documents
from megatron_untied.data.datasets import build_datasets
from megatron_untied.data.index_cache import cached_arrays
from tests.data.test_datasets import SEQ_LENGTH, TOKENIZER
from tests.support.corpus import random_documents, write_token_files
from tests.support.ranks import run_on_ranks


def built_on(group, data_paths, caches, local_ranks=(0, 0), seq_length=SEQ_LENGTH) -> tuple:
    """Samples of this rank and how many indices it made; each node has paths of its own."""
    rank = group.rank()
    made = []
    sample_indices = packed_documents.sample_indices

    def counted(documents, lengths, **arguments):
        made.append(documents)
        return sample_indices(documents, lengths, **arguments)

    data = DataConfig(
        tokenizer_type="NullTokenizer",
        vocab_size=100,
        data_path=data_paths[rank],
        split="1",
        data_cache_path=caches[rank],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_documents, "sample_indices", counted)
        patch.setenv("LOCAL_RANK", str(local_ranks[rank]))
        train = build_datasets(
            data, TOKENIZER, seq_length=seq_length, num_samples=(30, 0, 0), seed=3
        ).train
    return [train[i]["tokens"] for i in range(30)], len(made)


def refused_on(group, *arguments, no_space: bool = False) -> str:
    """The error of this rank, of a type that the launcher prints in one line."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if no_space:
            patch.setattr(np, "save", full)
        with pytest.raises((ValueError, OSError)) as error:
            built_on(group, *arguments)
    return str(error.value)


class FakeGroup:
    """Of this process alone."""

    def rank(self) -> int:
        return 0


def write(folder: Path, seed: int = 0) -> str:
    folder.mkdir(exist_ok=True)
    documents = random_documents(60, vocab_size=100, eod=TOKENIZER.eod, seed=seed)
    return write_token_files(folder / "data", documents)


def same_samples(results: list[tuple]) -> bool:
    (first, _), *others = results
    return all(torch.equal(a, b) for other, _ in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("of_blend", [False, True], ids=["one-file", "blend"])
@pytest.mark.parametrize("in_cache_folder", [False, True], ids=["beside", "cache-path"])
def test_nodes_without_a_shared_disk_make_their_own_indices(tmp_path, of_blend, in_cache_folder):
    paths, caches = [], []
    for node in ("n0", "n1"):
        prefix = write(tmp_path / node)
        other = write_token_files(tmp_path / node / "other", [[2] * 50] * 10)
        paths.append(("1", prefix, "2", other) if of_blend else (prefix,))
        caches.append(str(tmp_path / node / "cache") if in_cache_folder else None)
    results = run_on_ranks(built_on, 2, paths, caches)
    assert same_samples(results)
    made = 2 if of_blend else 1
    assert [number for _, number in results] == [made, made]


@pytest.mark.parametrize("local_ranks", [(0, 1), (0, 0)], ids=["one-node", "two-nodes"])
def test_rank_0_alone_makes_the_indices_of_a_folder_that_all_see(tmp_path, local_ranks):
    paths, caches = [(write(tmp_path / "data"),)] * 2, [str(tmp_path / "cache")] * 2
    results = run_on_ranks(built_on, 2, paths, caches, local_ranks)
    assert same_samples(results)
    assert [made for _, made in results] == [1, 0]
    again = run_on_ranks(built_on, 2, paths, caches, local_ranks)
    assert same_samples([*results, *again])
    assert [made for _, made in again] == [0, 0]


def refusals(*arguments, **options) -> str:
    """The message that both ranks end with."""
    first, second = run_on_ranks(refused_on, 2, *arguments, **options)
    assert first == second
    assert "\n" not in first
    return first


def test_a_cache_folder_that_cannot_be_made_names_the_folder_and_the_flag(tmp_path):
    paths = [(write(tmp_path / "data"),)] * 2
    (tmp_path / "file").write_text("")
    cache = str(tmp_path / "file" / "cache")
    said = refusals(paths, [cache, cache])
    assert f"cannot be written to {cache} (Not a directory); give --data-cache-path FOLDER" in said


def test_a_folder_that_only_another_node_cannot_write_to_names_that_rank(tmp_path):
    paths = [(write(tmp_path / node),) for node in ("n0", "n1")]
    (tmp_path / "file").write_text("")
    said = refusals(paths, [str(tmp_path / "cache"), str(tmp_path / "file" / "cache")])
    assert f"{tmp_path / 'file' / 'cache'} (Not a directory)" in said
    assert f"(rank 1 on {os.uname().nodename})" in said


def test_a_full_disk_leaves_no_half_written_index(tmp_path):
    paths, cache = [(write(tmp_path / "data"),)] * 2, tmp_path / "cache"
    said = refusals(paths, [str(cache)] * 2, no_space=True)
    assert f"{cache} (No space left on device); give --data-cache-path" in said
    assert not list(cache.iterdir())


@pytest.mark.parametrize("num_bytes", [0, 40, 140])
def test_a_cached_index_cut_short_names_the_file_and_what_to_do(tmp_path, num_bytes):
    paths, caches = [(write(tmp_path / "data"),)] * 2, [str(tmp_path / "cache")] * 2
    run_on_ranks(built_on, 2, paths, caches)
    (index,) = (tmp_path / "cache").glob("*shuffle_index.npy")
    os.truncate(index, num_bytes)
    said = refusals(paths, caches)
    assert f"--data-cache-path: the sample index {index} is damaged" in said
    assert "delete it, and the next start writes it again" in said
    index.unlink()
    assert same_samples(run_on_ranks(built_on, 2, paths, caches))


def halved(index: np.ndarray) -> np.ndarray:
    return index[: len(index) // 2]


def beyond(index: np.ndarray) -> np.ndarray:
    return index + 10_000


def twice_the_first(index: np.ndarray) -> np.ndarray:
    return np.concatenate([index[:1], index[:1], index[2:]])


def of_another_type(index: np.ndarray) -> np.ndarray:
    return index.astype(np.int64)


@pytest.mark.parametrize("name", ["document_index", "sample_index", "shuffle_index"])
@pytest.mark.parametrize("change", [halved, beyond, twice_the_first, of_another_type])
def test_a_cached_index_with_other_content_names_the_file_and_what_to_do(tmp_path, name, change):
    """A valid ``.npy`` all the same: training would read other samples, or fail at one of them."""
    prefix, cache = write(tmp_path / "data"), str(tmp_path / "cache")
    group = FakeGroup()
    built_on(group, [(prefix,)], [cache])
    (index,) = (tmp_path / "cache").glob(f"*{name}.npy")
    np.save(index, change(np.load(index)))
    said = refused_on(group, [(prefix,)], [cache])
    assert f"--data-cache-path: the sample index {index} is damaged" in said
    assert "delete it, and the next start writes it again" in said
    index.unlink()
    assert built_on(group, [(prefix,)], [cache])[1] == 1


def test_a_changed_index_of_one_node_ends_all_ranks(tmp_path):
    paths = [(write(tmp_path / node),) for node in ("n0", "n1")]
    caches = [str(tmp_path / node / "cache") for node in ("n0", "n1")]
    run_on_ranks(built_on, 2, paths, caches)
    (index,) = (tmp_path / "n1" / "cache").glob("*shuffle_index.npy")
    np.save(index, halved(np.load(index)))
    assert f"the sample index {index} is damaged" in refusals(paths, caches)


def test_a_changed_index_without_checksums_is_made_again(tmp_path):
    """As an earlier version wrote it."""
    prefix, cache = write(tmp_path / "data"), str(tmp_path / "cache")
    group = FakeGroup()
    first = built_on(group, [(prefix,)], [cache])
    (index,) = (tmp_path / "cache").glob("*shuffle_index.npy")
    np.save(index, halved(np.load(index)))
    (checksums,) = (tmp_path / "cache").glob("*checksums.npy")
    checksums.unlink()
    assert same_samples([first, built_on(group, [(prefix,)], [cache])])


def test_files_that_one_node_lacks_are_named_with_its_rank(tmp_path):
    said = refusals([(write(tmp_path / "n0"),), (str(tmp_path / "n1" / "data"),)], [None, None])
    assert f"there is no {tmp_path / 'n1' / 'data'}.bin" in said
    assert f"(rank 1 on {os.uname().nodename})" in said


def test_nodes_with_other_documents_under_the_same_name_are_refused(tmp_path):
    prefixes = [write(tmp_path / node, seed) for seed, node in enumerate("ab")]
    said = run_on_ranks(refused_on, 2, [(prefix,) for prefix in prefixes], [None, None])
    for prefix, message in zip(prefixes, said, strict=True):
        assert f"--data-path {prefix} holds other documents on rank 1 (" in message


def test_arrays_are_made_once_and_mapped(tmp_path):
    made = []

    def make():
        made.append(1)
        return np.arange(5), np.ones(3)

    for _ in range(2):
        one, other = cached_arrays(tmp_path / "new" / "folder", "key", ("a", "b"), make)
        assert isinstance(one, np.memmap)
        assert (one.tolist(), other.tolist()) == ([0, 1, 2, 3, 4], [1, 1, 1])
    assert len(made) == 1
    files = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert files == ["key-a.npy", "key-b.npy", "key-checksums.npy"]


def came_to_the_collective(group, finished) -> bool:
    """Whether rank 0 had built when this rank came to the first collective."""
    came = []

    def build():
        if group.rank() == 0:
            time.sleep(0.5)
            finished.touch()
        return group.rank()

    def gather(value):
        came.append(finished.exists())
        return gather_rare(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_cache, "gather_rare", gather)
        assert index_cache.in_turns(build) == group.rank()
    return came[0]


def test_ranks_wait_for_a_builder_outside_of_collectives(tmp_path):
    """Those have a timeout, and tokenizing chats may take hours."""
    assert run_on_ranks(came_to_the_collective, 2, tmp_path / "finished") == [True, True]
