"""[n, b, h, d] kept so that a chunk's heads are one buffer, ready to be exchanged."""

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_untied.context_parallel.all_to_all import HeadBlocks
from megatron_untied.context_parallel.head_schedule import HeadSchedule


class HeadMajor(Protocol):
    """All query heads of a rank's tokens, chunk after chunk and, in a chunk, rank after rank.

    The slot of chunk j is the flat sequence-side buffer of its exchange: what arrives lands in its
    place, and what leaves needs no copy.
    """

    def slot(self, index: int) -> Tensor:
        """A chunk's heads on the device, to be sent; valid until the next is asked for."""

    def landing(self, index: int) -> Tensor:
        """Where a chunk's heads are to arrive on the device."""

    def landed(self, index: int) -> None:
        """Say that they have arrived."""

    def rows(self, rows: Sequence[slice]) -> Tensor:
        """Several runs of tokens, one after the other: a new [t, b, h, d], natural order."""

    def write(self, rows: slice, value: Tensor) -> None:
        """Put ``value`` [t, b, h, d], heads in natural order, in the places of tokens ``rows``."""

    def release(self) -> None:
        """Nothing will be read any more."""


class HeadMajorShape:
    """Where the heads of [n, b, h, d] lie: integers only."""

    def __init__(self, schedule: HeadSchedule, n: int, b: int, d: int):
        self.schedule = schedule
        self.n, self.b, self.h, self.d = n, b, schedule.num_heads, d
        self.overlap = schedule.overlap
        self.heads = [[turn.query for turn in chunk] for chunk in schedule.chunks]
        """By chunk and rank."""
        self.counts = [[len(heads) for heads in chunk] for chunk in self.heads]
        self.slot_numels = [n * b * d * sum(counts) for counts in self.counts]
        self.numel = sum(self.slot_numels)
        self.num_ranks = len(schedule.chunks[0])

    def blocks(self, index: int, slot: Tensor) -> HeadBlocks:
        """The way in and out of a chunk's flat slot."""
        return HeadBlocks(slot, self.heads[index], self.n, self.b, self.d)

    def even_blocks(self, index: int) -> list[torch.Size]:
        """A chunk's flat slot, cut where ranks differ in heads: [ranks, n, b, heads of each, d]."""
        return [
            torch.Size((len(list(ranks)), self.n, self.b, count, self.d))
            for count, ranks in itertools.groupby(self.counts[index])
            if count
        ]

    def of_tokens(self, n: int) -> "HeadMajorShape":
        """The same for another number of tokens."""
        return HeadMajorShape(self.schedule, n, self.b, self.d)

    def empty_rows(self, rows: Sequence[slice], like: Tensor) -> tuple[Tensor, list[Tensor]]:
        """A new [t, b, h, d] for several runs of tokens, and its part for each run."""
        counts = [run.stop - run.start for run in rows]
        out = torch.empty(sum(counts), self.b, self.h, self.d, dtype=like.dtype, device=like.device)
        return out, list(out.split(counts))


class DeviceHeadMajor:
    """Head-major slots in one flat tensor on the device. See :class:`HeadMajor`."""

    def __init__(self, storage: Tensor, shape: HeadMajorShape):
        """``storage`` is flat, ``shape.numel`` elements."""
        self.shape = shape
        self._slots = storage.split(shape.slot_numels)
        self._blocks = [shape.blocks(index, slot) for index, slot in enumerate(self._slots)]

    def slot(self, index: int) -> Tensor:
        """See :class:`HeadMajor`."""
        return self._slots[index]

    def landing(self, index: int) -> Tensor:
        """See :class:`HeadMajor`."""
        return self._slots[index]

    def landed(self, index: int) -> None:
        """See :class:`HeadMajor`."""

    def rows(self, rows: Sequence[slice]) -> Tensor:
        """See :class:`HeadMajor`."""
        out, parts = self.shape.empty_rows(rows, self._slots[0])
        for run, part in zip(rows, parts, strict=True):
            self.read(run, part)
        return out

    def read(self, rows: slice, out: Tensor) -> None:
        """Get one run of tokens into ``out`` [t, b, h, d]."""
        for blocks in self._blocks:
            blocks.read(rows, out)

    def write(self, rows: slice, value: Tensor) -> None:
        """See :class:`HeadMajor`."""
        for blocks in self._blocks:
            blocks.write(rows, value)

    def release(self) -> None:
        """See :class:`HeadMajor`."""
