import numpy as np
import pytest

from megatron_untied.data.chat_packing import WINDOW, pack

S = 1024


def lengths_of(count, seed=0):
    lengths = np.random.RandomState(seed).lognormal(5, 1, count)
    return lengths.clip(1, S).astype(np.int64)


def samples_of(packed):
    return [members.tolist() for members in np.split(packed.members, packed.ends[:-1])]


@pytest.mark.parametrize("count", [1, 7, WINDOW + 300])
def test_every_epoch_has_every_chat_once_and_no_sample_is_too_long(count):
    lengths = lengths_of(count)
    one = pack(lengths, seq_length=S, num_samples=1, seed=3)
    packed = pack(lengths, seq_length=S, num_samples=len(one.ends) + 1, seed=3)
    epochs = np.split(packed.members, [count])
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(count))
    assert len(epochs) == 2
    samples = samples_of(packed)
    assert all(lengths[members].sum() <= S for members in samples)
    assert packed.work.tolist() == [int((lengths[x] ** 2).sum()) for x in samples]


def test_a_longer_run_begins_with_the_samples_of_a_shorter_one():
    lengths = lengths_of(500)
    short = samples_of(pack(lengths, seq_length=S, num_samples=1, seed=3))
    long = samples_of(pack(lengths, seq_length=S, num_samples=3 * len(short), seed=3))
    assert long[: len(short)] == short
    assert long[len(short) : 2 * len(short)] != short
    assert samples_of(pack(lengths, seq_length=S, num_samples=1, seed=4)) != short


def test_little_is_padding_and_the_work_is_even():
    """Against chats in the order in which they come, each sample filled until one does not fit."""
    lengths = lengths_of(3000)
    seq_length = 8 * S
    packed = pack(lengths, seq_length=seq_length, num_samples=1, seed=3)
    work, room = [0], seq_length
    for length in lengths.tolist():
        if length > room:
            work, room = [*work, 0], seq_length
        room -= length
        work[-1] += length**2
    assert len(packed.ends) * seq_length < 1.02 * lengths.sum()
    spread = packed.work.std() / packed.work.mean()
    assert spread < 0.5 * np.std(work) / np.mean(work)
