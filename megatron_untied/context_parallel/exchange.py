"""The all-to-all between sequence-sharded and head-sharded tensors, and tensors laid out for it.

The sequence-sharded side of an exchange is a flat buffer: for each Ulysses rank i in turn a block
[n, b, heads of i, d]. Ranks hold the sequence in order, so the blocks received from ranks 0, 1, ...
*are* the sequence, [s/r, b, my heads, d]: neither side rearranges anything.

:class:`HeadChunks` tensors hold all heads of a rank's tokens as such buffers, one per chunk: on the
device here, on the host in :mod:`megatron_untied.streaming.host_tensors`.
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
    """An operation in flight, such as a collective; the part of ``dist.Work`` used here."""

    def wait(self) -> object:
        """Let compute queued from now on start only after it."""


class Done:
    """A finished operation."""

    def wait(self) -> None:
        """Return at once."""


@dataclass(slots=True)
class ExchangeCounter:
    """Traffic of this rank so far; read by benchmarks and tests."""

    calls: int = 0
    sent_bytes: int = 0


class HeadExchange:
    """The all-to-all over the Ulysses ranks. Its methods are collective over the group.

    ``heads[i]`` is the number of heads that rank i gets, not all zero; every rank passes the same
    list. Buffers are contiguous. Wait for the returned work before reading ``recv`` or writing
    ``send``.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        """``group``: None for one rank, which copies."""
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
            # Not compared by address: fake tensors of a trace have none.
            same_storage = send.untyped_storage()._cdata == recv.untyped_storage()._cdata
            if not (same_storage and send.storage_offset() == recv.storage_offset()):
                recv.copy_(send)
            return Done()
        self.counter.calls += 1
        self.counter.sent_bytes += send.nbytes  # including a rank's own block
        return dist.all_to_all_single(
            recv, send, recv_sizes, send_sizes, group=self.group, async_op=True
        )


def blocks(flat: Tensor, heads: Sequence[int], n: int, b: int, d: int) -> list[Tensor]:
    """A flat sequence-sharded buffer as one view [n, b, heads[i], d] for each rank i."""
    parts = flat.split([n * b * count * d for count in heads])
    return [part.view(n, b, count, d) for part, count in zip(parts, heads, strict=True)]


class HeadBlocks:
    """A flat sequence-sharded buffer, read and written in the natural order of heads.

    One copy moves the heads of consecutive ranks that have equally many, evenly spaced heads: with
    even schedules that is one kernel launch per tile instead of one per rank.
    """

    def __init__(self, flat: Tensor, heads: Sequence[range], n: int, b: int, d: int):
        """``heads[i]``: the heads of rank i, numbered in natural order."""
        self._runs: list[tuple[Tensor, list[range]]] = []
        start = 0
        for ranks in _evenly_spaced(heads):
            shape = len(ranks), n, b, len(ranks[0]), d  # [ranks, n, b, heads per rank, d]
            stop = start + torch.Size(shape).numel()
            self._runs.append((flat[start:stop].view(shape), ranks))
            start = stop

    def write(self, rows: slice, x: Tensor) -> None:
        """Copy ``x`` [t, b, heads, d] to tokens ``rows`` of the buffer."""
        for block, ranks in self._runs:
            block[:, rows].copy_(_heads_by_rank(x, ranks))  # one strided copy

    def read(self, rows: slice, out: Tensor) -> None:
        """Copy tokens ``rows`` of the buffer to their heads in ``out`` [t, b, heads, d]."""
        for block, ranks in self._runs:
            _heads_by_rank(out, ranks).copy_(block[:, rows])


def _heads_by_rank(x: Tensor, ranks: Sequence[range]) -> Tensor:
    """[t, b, heads, d] -> the view [ranks, t, b, heads per rank, d]."""
    size = len(ranks[0])
    step = ranks[1].start - ranks[0].start if len(ranks) > 1 else size
    start, stop = ranks[0].start, ranks[-1].stop
    windows = x.narrow(2, start, stop - start).unfold(2, size, step)  # [t, b, ranks, d, heads]
    return windows.permute(2, 0, 1, 4, 3)


def _evenly_spaced(heads: Sequence[range]) -> Iterator[list[range]]:
    """Split the ranks that have heads into runs of equally many, evenly spaced, disjoint heads."""
    run: list[range] = []
    for own in filter(None, heads):
        distances = {right.start - left.start for left, right in pairwise([*run, own])}
        # Ranks may overlap where they share key-value heads; a strided view cannot.
        if run and (len(own) != len(run[0]) or len(distances) > 1 or min(distances) < len(own)):
            yield run
            run = []
        run.append(own)
    if run:
        yield run


class HeadChunks(ABC):
    """[n, b, h, d] of this rank's tokens, stored chunk by chunk and, in a chunk, rank by rank.

    Chunk j is one flat slot, the sequence-sharded side of its exchange: it is sent without a copy,
    and received where it stays.
    """

    layout: "HeadChunkLayout"
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def send_buffer(self, j: int) -> Tensor:
        """Chunk j on the device, flat, to be sent; valid until the next one is requested."""

    @abstractmethod
    def recv_buffer(self, j: int) -> Tensor:
        """The device memory that chunk j is received in, flat."""

    @abstractmethod
    def received(self, j: int) -> None:
        """Store chunk j; call it when the chunk is complete in its ``recv_buffer``."""

    @abstractmethod
    def read(self, rows: slice, out: Tensor) -> None:
        """Copy tokens ``rows`` to ``out`` [t, b, h, d], heads in natural order."""

    @abstractmethod
    def write(self, rows: slice, value: Tensor) -> None:
        """Copy ``value`` [t, b, h, d], heads in natural order, to tokens ``rows``."""

    @abstractmethod
    def release(self) -> None:
        """Free host memory; call it after the last read."""

    def rows(self, rows: Sequence[slice]) -> Tensor:
        """Several runs of tokens, concatenated: a new [t, b, h, d], heads in natural order."""
        counts = [run.stop - run.start for run in rows]
        shape = sum(counts), self.layout.b, self.layout.h, self.layout.d
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        for run, part in zip(rows, out.split(counts), strict=True):
            self.read(run, part)
        return out


class HeadChunkLayout:
    """The order of the heads of [n, b, h, d] stored in chunks of heads: integers only."""

    def __init__(self, schedule: HeadSchedule, n: int, b: int, d: int):
        self.schedule = schedule
        self.n, self.b, self.h, self.d = n, b, schedule.num_heads, d
        self.heads = [[rank.query_heads for rank in chunk] for chunk in schedule.chunks]
        """By chunk and rank."""
        self.counts = [[len(heads) for heads in chunk] for chunk in self.heads]
        self.slot_numels = [n * b * d * sum(counts) for counts in self.counts]
        self.numel = sum(self.slot_numels)

    def even_blocks(self, j: int) -> list[torch.Size]:
        """The slot of chunk j in blocks of ranks with as many heads each.

        A block is [ranks, n, b, heads per rank, d]: its tokens are one slice.
        """
        return [
            torch.Size((len(list(ranks)), self.n, self.b, count, self.d))
            for count, ranks in itertools.groupby(self.counts[j])
            if count
        ]


class DeviceHeadChunks(HeadChunks):
    """Slots in one flat tensor on the device."""

    def __init__(self, storage: Tensor, layout: HeadChunkLayout):
        """``storage``: flat, ``layout.numel`` elements."""
        self.layout, self.dtype, self.device = layout, storage.dtype, storage.device
        self._slots = storage.split(layout.slot_numels)
        self._blocks = [
            HeadBlocks(slot, heads, layout.n, layout.b, layout.d)
            for slot, heads in zip(self._slots, layout.heads, strict=True)
        ]

    @override
    def send_buffer(self, j: int) -> Tensor:
        return self._slots[j]

    @override
    def recv_buffer(self, j: int) -> Tensor:
        return self._slots[j]

    @override
    def received(self, j: int) -> None:
        pass  # it was received in its slot

    @override
    def read(self, rows: slice, out: Tensor) -> None:
        for blocks_of_chunk in self._blocks:
            blocks_of_chunk.read(rows, out)

    @override
    def write(self, rows: slice, value: Tensor) -> None:
        for blocks_of_chunk in self._blocks:
            blocks_of_chunk.write(rows, value)

    @override
    def release(self) -> None:
        pass  # freed with the last reference
