"""The order is a function of seed, epoch and place in it, whatever the length of the run."""

import numpy as np
import pytest
import torch

from megatron_untied.data.datasets import lengths_by_file
from megatron_untied.data.sample_order import repeated, sample_indices, samples_per_epoch
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


def token_ranges(found, lengths, sizes):
    """First token and number of tokens of every sample, in order; tokens count over all epochs."""
    starts = np.concatenate([[0], lengths[found.document_index].cumsum()])
    places = [int(starts[document] + offset) for document, offset in found.sample_index]
    return [(places[row], size) for row, size in zip(found.shuffle_index, sizes, strict=True)]


@pytest.mark.parametrize("num_samples", [30, 45, 200])
def test_other_lengths_go_on_at_the_next_token(num_samples):
    """Each token of an epoch is in one sample, whatever its length, but for the epoch's end."""
    earlier = [(10, 13), (25, 7), (25, 0), (7, 9)]
    found = sample_indices(
        DOCUMENTS, LENGTHS, seq_length=50, num_samples=num_samples, seed=3, earlier=earlier
    )
    sizes = [size for size, count in earlier for _ in range(count)]
    sizes += [50] * (len(found.shuffle_index) - len(sizes))
    assert len(sizes) >= num_samples
    ranges = token_ranges(found, LENGTHS, sizes)
    assert ranges[:13] != sorted(ranges[:13])  # a length is shuffled
    read = np.zeros(int(LENGTHS[found.document_index].sum()), np.int64)
    for first, size in ranges:
        read[first : first + size] += 1
    assert read.max() == 1
    per_epoch = int(LENGTHS[DOCUMENTS].sum())
    for epoch in read.reshape(-1, per_epoch):
        left = np.flatnonzero(epoch == 0)
        assert 1 <= len(left) <= 50  # the last token is a label alone
        assert left.tolist() == list(range(per_epoch - len(left), per_epoch))


def test_a_longer_run_of_several_lengths_begins_with_a_shorter_one():
    short, long = (
        sample_indices(DOCUMENTS, LENGTHS, seq_length=50, num_samples=n, seed=3, earlier=[(20, 60)])
        for n in (70, 300)
    )
    for name in ("document_index", "sample_index", "shuffle_index"):
        one, other = getattr(short, name), getattr(long, name)
        assert np.array_equal(one, other[: len(one)])


@pytest.mark.parametrize("weights", [("0.1", "0.7", "0.2"), ("1", "1", "1"), ("3", "1e-3", "0.7")])
def test_a_blend_of_several_lengths_changes_in_every_file(tmp_path, weights):
    prefixes = [
        write_token_files(
            tmp_path / str(seed), random_documents(50, vocab_size=100, eod=100, seed=seed)
        )
        for seed in range(3)
    ]
    blend = [word for pair in zip(weights, prefixes, strict=True) for word in pair]
    earlier = [(16, 50), (48, 31)]
    lengths = {"earlier": earlier, "valid_lengths": {16: 0, 48: 0, 24: 0}}
    train = build(*blend, split="1", num_samples=(120, 0, 0), seq_length=24, lengths=lengths).train
    assert [len(train[i]["tokens"]) for i in range(120)] == [16] * 50 + [48] * 31 + [24] * 39
    drawn = [np.bincount(part, minlength=3) for part in np.split(train.dataset_index, (50, 81))]
    counts = lengths_by_file([float(weight) for weight in weights], earlier)
    assert [[n for _, n in each] for each in counts] == np.transpose(drawn[:2]).tolist()


def test_long_documents_are_read_as_often_as_their_weight_says():
    lengths = LENGTHS[DOCUMENTS]
    weights = ((20, 2.5), (40, 0.25))
    epochs = [repeated(DOCUMENTS, lengths, weights, seed=3, epoch=n) for n in range(8)]
    for document, length in zip(DOCUMENTS, lengths, strict=True):
        times = [int((epoch == document).sum()) for epoch in epochs]
        if length < 20:
            assert times == [1] * 8
        elif length < 40:
            assert sum(times) == 20
            assert set(times) == {2, 3}
        else:
            assert sum(times) == 2
            assert set(times) == {0, 1}
    assert len({len(epoch) for epoch in epochs}) > 1


def test_samples_follow_each_other_in_epochs_of_different_documents():
    weights = ((30, 1.5),)
    found = sample_indices(
        DOCUMENTS, LENGTHS, seq_length=50, num_samples=60, seed=3, weights=weights
    )
    ranges = sorted(token_ranges(found, LENGTHS, [50] * len(found.shuffle_index)))
    gaps = np.diff([first for first, _ in ranges])
    assert (gaps >= 50).all()
    assert (gaps < 100).all()
    plain = sample_indices(DOCUMENTS, LENGTHS, seq_length=50, num_samples=60, seed=3)
    one = sample_indices(
        DOCUMENTS, LENGTHS, seq_length=50, num_samples=60, seed=3, weights=((0, 1.0),)
    )
    assert all(map(np.array_equal, one, plain))


def test_weights_that_leave_less_than_a_sample_are_refused():
    with pytest.raises(ValueError, match=r"epoch \d+ of the training .* larger weights"):
        sample_indices(
            DOCUMENTS, LENGTHS, seq_length=50, num_samples=9, seed=3, weights=((0, 0.001),)
        )


def test_weights_are_those_of_training_documents_alone(tmp_path, prefixes):
    plain, weighted = (
        build(prefixes[0], split="80,20", num_samples=(40, 4, 0), seq_length=16, **flags)
        for flags in ({}, {"long_document_weight": ((20, 4.0),)})
    )
    assert all(equal(plain.valid[i], weighted.valid[i]) for i in range(4))
    assert not all(equal(plain.train[i], weighted.train[i]) for i in range(20))
