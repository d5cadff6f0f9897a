"""The order is a function of seed, epoch and place in it, whatever the length of the run."""

import numpy as np
import pytest
import torch

from megatron_untied.data.sample_order import sample_indices, samples_per_epoch
from tests.data.test_datasets import TOKENIZER, build, equal
from tests.support.corpus import random_documents, write_token_files

LENGTHS = np.random.RandomState(0).randint(1, 60, size=40).astype(np.int32)
DOCUMENTS = np.arange(5, 35, dtype=np.int32)
PER_EPOCH = samples_per_epoch(int(LENGTHS[DOCUMENTS].sum()), 50)


def indices(num_samples, seed=3, seq_length=50):
    return sample_indices(
        DOCUMENTS, LENGTHS, seq_length=seq_length, num_samples=num_samples, seed=seed
    )


@pytest.mark.parametrize("num_samples", [1, PER_EPOCH, PER_EPOCH + 1, 3 * PER_EPOCH, 100])
def test_a_shorter_run_is_the_beginning_of_a_longer_one(num_samples):
    short, long = indices(num_samples), indices(1000)
    for name in ("document_index", "sample_index", "shuffle_index"):
        one, other = getattr(short, name), getattr(long, name)
        assert np.array_equal(one, other[: len(one)])
    assert num_samples <= len(short.shuffle_index) < num_samples + PER_EPOCH


def test_each_epoch_has_every_document_and_every_sample_once():
    found = indices(4 * PER_EPOCH)
    epochs = found.document_index.reshape(4, -1)
    assert all(sorted(epoch) == DOCUMENTS.tolist() for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    shuffled = found.shuffle_index.reshape(4, PER_EPOCH)
    for epoch, rows in enumerate(shuffled):
        first = epoch * (PER_EPOCH + 1)
        assert sorted(rows) == list(range(first, first + PER_EPOCH))
    orders = {tuple(rows - epoch * (PER_EPOCH + 1)) for epoch, rows in enumerate(shuffled)}
    assert len(orders) == 4


def test_samples_of_an_epoch_follow_one_another_and_lie_within_it():
    found = indices(3 * PER_EPOCH)
    for epoch, rows in enumerate(found.sample_index.reshape(3, PER_EPOCH + 1, 2)):
        lengths = LENGTHS[found.document_index]
        starts = np.concatenate([[0], lengths.cumsum()])
        tokens = [starts[document] + offset for document, offset in rows]
        assert np.diff(tokens).tolist() == [50] * PER_EPOCH
        epoch_start = epoch * LENGTHS[DOCUMENTS].sum()
        # The last sample reads one token more, its last label.
        assert epoch_start <= tokens[0] < tokens[-1] < epoch_start + LENGTHS[DOCUMENTS].sum()


def test_the_seed_decides_every_epoch():
    one, other = (indices(2 * PER_EPOCH, seed).shuffle_index.reshape(2, -1) for seed in (3, 4))
    assert all(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def prefixes(tmp_path):
    return [
        write_token_files(
            tmp_path / name, random_documents(30, vocab_size=100, eod=TOKENIZER.eod, seed=seed)
        )
        for seed, name in enumerate(("a", "b"))
    ]


@pytest.mark.parametrize("cache", [None, "cache"])
def test_a_longer_run_continues_one_file(tmp_path, prefixes, cache):
    cache = cache and str(tmp_path / cache)
    short, long = (
        build(prefixes[0], split="1", num_samples=(count, 0, 0), data_cache_path=cache).train
        for count in (7, 90)
    )
    assert len(long) > 3 * len(short)
    assert all(equal(short[i], long[i]) for i in range(len(short)))


def test_a_longer_run_continues_a_weighted_blend_of_several_epochs(prefixes):
    blend = ("3", prefixes[0], "1", prefixes[1])
    short, long = (build(*blend, split="1", num_samples=(count, 0, 0)).train for count in (40, 200))
    for i in range(40):
        one, other = dict(short[i]), dict(long[i])
        assert one.pop("dataset_id") == other.pop("dataset_id")
        assert equal(one, other)
    shares = np.bincount([long[i]["dataset_id"] for i in range(200)])
    assert shares.tolist() == [150, 50]


def test_a_longer_run_continues_a_blend_that_is_read_once(prefixes):
    short, long = (
        build(*prefixes, split="1", num_samples=(count, 0, 0)).train for count in (5, 20)
    )
    assert all(torch.equal(short[i]["tokens"], long[i]["tokens"]) for i in range(5))


def test_epochs_leave_other_documents_out():
    found = indices(20 * PER_EPOCH)
    last = {int(epoch[-1]) for epoch in found.document_index.reshape(20, -1)}
    assert len(last) > 10
