"""The all-to-all between sequence-sharded and head-sharded tensors, and tensors ready for it.

The sequence-sharded side of an exchange is a flat buffer: for each Ulysses rank i in turn a block
[n, b, heads of i, d]. Ranks hold the sequence in order, so what arrives from rank 0, 1, ... one
after the other *is* the sequence, [s/r, b, my heads, d]: nothing is rearranged on either side.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from megatron_untied.context_parallel.head_schedule import HeadSchedule


class Work(Protocol):
    """Something under way, such as a collective; the part of ``dist.Work`` used here."""

    def wait(self) -> object:
        """Let what is queued from now on start only when it is done."""


class Done:
    """Work that is over."""

    def wait(self) -> None:
        """Nothing to wait for."""


@dataclass(slots=True)
class ExchangeCounter:
    """What this rank sent so far; read by benchmarks and tests."""

    calls: int = 0
    sent_bytes: int = 0


class HeadExchange:
    """The all-to-all over the Ulysses ranks. Its methods are collective over the group.

    ``heads[i]`` is the number of heads that rank i gets, not all zero; every rank passes the same
    list. Buffers are contiguous. ``recv`` may be read and ``send`` written once the returned work
    was waited for.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        """``group`` None is this rank alone."""
        self.group = group
        self.size, self.rank = (group.size(), group.rank()) if group is not None else (1, 0)
        self.counter = ExchangeCounter()

    def to_heads(self, send: Tensor, recv: Tensor, heads: Sequence[int]) -> Work:
        """[n, b, heads[i], d] for each rank i -> [s/r, b, my heads, d]."""
        per_head = send.numel() // sum(heads)
        mine = [heads[self.rank] * per_head] * self.size
        return self._all_to_all(send, [count * per_head for count in heads], recv, mine)

    def to_sequence(self, send: Tensor, recv: Tensor, heads: Sequence[int]) -> Work:
        """[s/r, b, my heads, d] -> [n, b, heads[i], d] for each rank i: undoes to_heads."""
        per_head = recv.numel() // sum(heads)
        mine = [heads[self.rank] * per_head] * self.size
        return self._all_to_all(send, mine, recv, [count * per_head for count in heads])

    def _all_to_all(
        self, send: Tensor, send_sizes: list[int], recv: Tensor, recv_sizes: list[int]
    ) -> Work:
        send, recv = send.view(-1), recv.view(-1)
        if self.size == 1:
            if not _are_one(send, recv):
                recv.copy_(send)
            return Done()
        self.counter.calls += 1
        self.counter.sent_bytes += send.nbytes
        return dist.all_to_all_single(
            recv, send, recv_sizes, send_sizes, group=self.group, async_op=True
        )


def _are_one(a: Tensor, b: Tensor) -> bool:
    """Whether two flat tensors are the same memory. Not by their addresses: a trace has none."""
    same_storage = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same_storage and a.storage_offset() == b.storage_offset()


def blocks(flat: Tensor, heads: Sequence[int], n: int, b: int, d: int) -> list[Tensor]:
    """A flat sequence-sharded buffer as one view [n, b, heads[i], d] for each rank i."""
    parts = flat.split([n * b * count * d for count in heads])
    return [part.view(n, b, count, d) for part, count in zip(parts, heads, strict=True)]


class HeadBlocks:
    """A flat sequence-sharded buffer, read and written in the natural order of heads.

    Consecutive ranks with equally many, evenly spaced heads are moved by one copy.
    """

    def __init__(self, flat: Tensor, heads: Sequence[range], n: int, b: int, d: int):
        """``heads[i]``: which heads of the natural order rank i gets."""
        self._runs: list[tuple[Tensor, list[range]]] = []
        start = 0
        for ranks in _evenly_spaced(heads):
            shape = len(ranks), n, b, len(ranks[0]), d
            stop = start + torch.Size(shape).numel()
            self._runs.append((flat[start:stop].view(shape), ranks))
            start = stop

    def write(self, rows: slice, x: Tensor) -> None:
        """Put ``x`` [t, b, heads, d] in the places of tokens ``rows``."""
        for block, ranks in self._runs:
            block[:, rows].copy_(_heads_by_rank(x, ranks))

    def read(self, rows: slice, out: Tensor) -> None:
        """Get tokens ``rows`` into their heads of ``out`` [t, b, heads, d]."""
        for block, ranks in self._runs:
            _heads_by_rank(out, ranks).copy_(block[:, rows])


def _heads_by_rank(x: Tensor, ranks: Sequence[range]) -> Tensor:
    """[t, b, heads, d] -> the view [ranks, t, b, heads of each, d]."""
    size = len(ranks[0])
    step = ranks[1].start - ranks[0].start if len(ranks) > 1 else size
    start, stop = ranks[0].start, ranks[-1].stop
    windows = x.narrow(2, start, stop - start).unfold(2, size, step)  # [t, b, ranks, d, heads]
    return windows.permute(2, 0, 1, 4, 3)


def _evenly_spaced(heads: Sequence[range]) -> Iterator[list[range]]:
    """Split the ranks that have heads into runs of equally many, evenly spaced, disjoint heads."""
    run: list[range] = []
    for each in filter(None, heads):
        distances = {right.start - left.start for left, right in pairwise([*run, each])}
        if run and (len(each) != len(run[0]) or len(distances) > 1 or min(distances) < len(each)):
            yield run
            run = []
        run.append(each)
    if run:
        yield run


class HeadMajor(ABC):
    """[n, b, h, d] of this rank's tokens, stored chunk by chunk and, in a chunk, rank by rank.

    Chunk j is one flat slot, the sequence-sharded side of its exchange: what is sent is not copied
    first, and what arrives lands where it stays.
    """

    @abstractmethod
    def send_buffer(self, j: int) -> Tensor:
        """Chunk j on the device, to be sent; valid until the next one is asked for."""

    @abstractmethod
    def recv_buffer(self, j: int) -> Tensor:
        """Where chunk j arrives on the device."""

    @abstractmethod
    def received(self, j: int) -> None:
        """Has to be called when chunk j is in its ``recv_buffer``."""

    @abstractmethod
    def rows(self, rows: Sequence[slice]) -> Tensor:
        """Several runs of tokens, one after the other: a new [t, b, h, d], natural order."""

    @abstractmethod
    def write(self, rows: slice, value: Tensor) -> None:
        """Put ``value`` [t, b, h, d], heads in natural order, in the places of tokens ``rows``."""

    @abstractmethod
    def release(self) -> None:
        """Has to be called after the last read."""


class HeadMajorLayout:
    """Where the heads of [n, b, h, d] lie in a head-major tensor: integers only."""

    def __init__(self, schedule: HeadSchedule, n: int, b: int, d: int):
        self.schedule = schedule
        self.n, self.b, self.h, self.d = n, b, schedule.num_heads, d
        self.heads = [[each.query_heads for each in chunk] for chunk in schedule.chunks]
        """By chunk and rank."""
        self.counts = [[len(heads) for heads in chunk] for chunk in self.heads]
        self.slot_numels = [n * b * d * sum(counts) for counts in self.counts]
        self.numel = sum(self.slot_numels)

    def blocks(self, j: int, slot: Tensor) -> HeadBlocks:
        """The slot of chunk j, to be read and written in the natural order of heads."""
        return HeadBlocks(slot, self.heads[j], self.n, self.b, self.d)

    def even_blocks(self, j: int) -> list[torch.Size]:
        """The slot of chunk j, split where ranks differ in heads: [ranks, n, b, heads each, d]."""
        return [
            torch.Size((len(list(ranks)), self.n, self.b, count, self.d))
            for count, ranks in itertools.groupby(self.counts[j])
            if count
        ]

    def of_tokens(self, n: int) -> "HeadMajorLayout":
        """The same for another number of tokens."""
        return HeadMajorLayout(self.schedule, n, self.b, self.d)

    def empty_rows(
        self, rows: Sequence[slice], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, list[Tensor]]:
        """A new [t, b, h, d] for several runs of tokens, and its part for each run."""
        counts = [run.stop - run.start for run in rows]
        out = torch.empty(sum(counts), self.b, self.h, self.d, dtype=dtype, device=device)
        return out, list(out.split(counts))


class DeviceHeadMajor(HeadMajor):
    """Slots in one flat tensor on the device."""

    def __init__(self, storage: Tensor, layout: HeadMajorLayout):
        """``storage`` is flat, ``layout.numel`` elements."""
        self.layout = layout
        self._slots = storage.split(layout.slot_numels)
        self._blocks = [layout.blocks(j, slot) for j, slot in enumerate(self._slots)]

    @override
    def send_buffer(self, j: int) -> Tensor:
        return self._slots[j]

    @override
    def recv_buffer(self, j: int) -> Tensor:
        return self._slots[j]

    @override
    def received(self, j: int) -> None:
        pass

    @override
    def rows(self, rows: Sequence[slice]) -> Tensor:
        out, parts = self.layout.empty_rows(rows, self._slots[0].dtype, self._slots[0].device)
        for run, part in zip(rows, parts, strict=True):
            self.read(run, part)
        return out

    def read(self, rows: slice, out: Tensor) -> None:
        """Get one run of tokens into ``out`` [t, b, h, d]."""
        for each in self._blocks:
            each.read(rows, out)

    @override
    def write(self, rows: slice, value: Tensor) -> None:
        for each in self._blocks:
            each.write(rows, value)

    @override
    def release(self) -> None:
        pass
