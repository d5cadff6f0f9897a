"""Packs chats of unequal lengths into samples of ``seq_length`` tokens with even attention work.

Chats in a sample do not see each other, so its attention work is the sum of their squared lengths.
The chats of an epoch are shuffled and packed a window at a time: the longest first, each into the
sample with the least work of those with room for it. The samples of the epoch are shuffled again.
So, as in :mod:`.sample_order`, a longer run begins with the samples of a shorter one. Within a
global batch :mod:`.loader` deals samples to ranks by their work.
"""

from typing import NamedTuple

import numpy as np

WINDOW = 4096
"""Chats that are packed together. The cost grows as its square; with more, less is padding."""


class PackedSamples(NamedTuple):
    """Which chats each sample holds, all epochs one after the other."""

    members: np.ndarray
    """Indices of chats, int64 [chats of all epochs], sample after sample."""
    ends: np.ndarray
    """Where each sample ends in ``members``, int64 [samples]."""
    work: np.ndarray
    """Attention work of each sample, in pairs of tokens: int64 [samples]."""


def pack(lengths: np.ndarray, *, seq_length: int, num_samples: int, seed: int) -> PackedSamples:
    """At least ``num_samples`` samples, in whole epochs.

    Args:
        lengths: input tokens of each chat, int64 [chats], at most ``seq_length``.
        seq_length: tokens of a sample.
        num_samples: least number of samples.
        seed: the run's seed.
    """
    samples: list[np.ndarray] = []
    epoch = 0
    while not epoch or len(samples) < num_samples:
        # RandomState: its numbers do not change with releases of numpy.
        generator = np.random.RandomState([seed, epoch])
        order = generator.permutation(len(lengths))
        packed = [
            window[members]
            for window in np.split(order, range(WINDOW, len(order), WINDOW))
            for members in _pack_window(lengths[window], seq_length)
        ]
        samples += [packed[i] for i in generator.permutation(len(packed))]
        epoch += 1
    return PackedSamples(
        members=np.concatenate(samples),
        ends=np.cumsum([len(members) for members in samples]),
        work=np.array([np.square(lengths[members]).sum() for members in samples]),
    )


def _pack_window(lengths: np.ndarray, seq_length: int) -> list[list[int]]:
    count = -(-int(lengths.sum()) // seq_length)  # the fewest that could do
    room = np.full(count, seq_length)
    work = np.zeros(count, np.int64)
    samples: list[list[int]] = [[] for _ in range(count)]
    for chat in np.argsort(-lengths, kind="stable"):
        length = lengths[chat]
        with_room = np.flatnonzero(room >= length)
        if len(with_room):
            chosen = with_room[work[with_room].argmin()]
        else:
            chosen = len(samples)
            samples.append([])
            room, work = np.append(room, seq_length), np.append(work, 0)
        samples[chosen].append(int(chat))
        room[chosen] -= length
        work[chosen] += length * length
    return [members for members in samples if members]
