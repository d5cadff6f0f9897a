"""The all-to-all between sequence-sharded and head-sharded tensors, and tensors laid out for it.

The sequence-sharded side of an exchange is a flat buffer: for each Ulysses rank i in turn a block
[n, b, heads of i, d]. Ranks hold the sequence in order, so the blocks received from ranks 0, 1, ...
*are* the sequence, [s/r, b, my heads, d]: neither side rearranges anything.

:class:`HeadChunks` tensors hold all heads of a rank's tokens as such buffers, one per chunk: on the
device here, on the host in :mod:`megatron_untied.streaming.host_tensors`.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_untied.context_parallel.buffer_plan import Sizes, head_chunks_buffer
from megatron_untied.context_parallel.head_schedule import HeadSchedule
from megatron_untied.context_parallel.workspace import Workspace


class Done:
    """A finished operation."""

    def wait(self) -> None:
        """Return at once."""


Work = dist.Work | Done
"""A collective in flight. ``wait`` makes compute queued later wait for the collective."""


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
        """``group``: None means one rank, which does not communicate."""
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
        runs: list[list[range]] = []  # of ranks that one strided view covers
        for own in filter(None, heads):
            run = runs[-1] if runs else []
            distances = {right.start - left.start for left, right in pairwise([*run, own])}
            is_even = bool(run) and len(own) == len(run[0]) and len(distances) == 1
            # Ranks may overlap where they share key-value heads; a strided view cannot.
            if is_even and min(distances) >= len(own):
                run.append(own)
            else:
                runs.append([own])
        # [ranks, n, b, heads per rank, d] each
        shapes = [torch.Size((len(run), n, b, len(run[0]), d)) for run in runs]
        parts = flat[: sum(shape.numel() for shape in shapes)].split([x.numel() for x in shapes])
        self._blocks = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._runs = runs

    def pairs(self, rows: slice, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens ``rows`` of each part of the buffer, with its heads of ``x`` [t, b, heads, d].

        Both are views [ranks, t, b, heads per rank, d]; a copy between them is one kernel.
        """
        for block, run in zip(self._blocks, self._runs, strict=True):
            start, stop, size = run[0].start, run[-1].stop, len(run[0])
            step = run[1].start - start if len(run) > 1 else size
            windows = x.narrow(2, start, stop - start).unfold(2, size, step)
            yield block[:, rows], windows.permute(2, 0, 1, 4, 3)  # from [t, b, ranks, d, heads]


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


class HeadChunks:
    """[n, b, h, d] of this rank's tokens, stored chunk by chunk and, in a chunk, rank by rank.

    Chunk j is one flat slot, the sequence-sharded side of its exchange: it is sent without a copy,
    and received where it stays. Slots are parts of one flat tensor on the device here;
    :mod:`megatron_untied.streaming.host_tensors` keeps them in host memory.
    """

    host_slots: Sequence = ()
    """That host memory."""

    def __init__(self, storage: Tensor, layout: HeadChunkLayout):
        """``storage``: flat, ``layout.numel`` elements."""
        self.layout, self.dtype, self.device = layout, storage.dtype, storage.device
        self._slots = storage.split(layout.slot_numels)
        self._blocks = [
            HeadBlocks(slot, heads, layout.n, layout.b, layout.d)
            for slot, heads in zip(self._slots, layout.heads, strict=True)
        ]

    @classmethod
    def in_workspace(
        cls, name: str, sizes: Sizes, workspace: Workspace, device: torch.device
    ) -> "HeadChunks":
        """Uninitialized; the next layer takes the same memory."""
        storage = workspace.take(head_chunks_buffer(name, sizes), device)
        return cls(storage, HeadChunkLayout(sizes.schedule, sizes.n, sizes.b, sizes.d))

    def send_buffer(self, j: int) -> Tensor:
        """Chunk j on the device, flat, to be sent; valid until the next one is requested."""
        return self._slots[j]

    def recv_buffer(self, j: int) -> Tensor:
        """The device memory that chunk j is received in, flat; then call :meth:`received`."""
        return self._slots[j]

    def received(self, j: int) -> None:
        """Store chunk j, complete in its ``recv_buffer``: here it was received in its slot."""

    def read(self, rows: slice, out: Tensor) -> None:
        """Copy tokens ``rows`` to ``out`` [t, b, h, d], heads in natural order."""
        for block, heads in itertools.chain(*(x.pairs(rows, out) for x in self._blocks)):
            heads.copy_(block)

    def write(self, rows: slice, value: Tensor) -> None:
        """Copy ``value`` [t, b, h, d], heads in natural order, to tokens ``rows``."""
        for block, heads in itertools.chain(*(x.pairs(rows, value) for x in self._blocks)):
            block.copy_(heads)

    def release(self) -> None:
        """Free host memory; call it after the last read. Device memory goes with its reference."""

    def rows(self, rows: Sequence[slice]) -> Tensor:
        """Several runs of tokens, concatenated: a new [t, b, h, d], heads in natural order."""
        counts = [run.stop - run.start for run in rows]
        shape = sum(counts), self.layout.b, self.layout.h, self.layout.d
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        for run, part in zip(rows, out.split(counts), strict=True):
            self.read(run, part)
        return out
