"""Trade a sequence shard of all heads for the whole sequence of some heads, and back.

A buffer of the sequence side is flat: for each rank r in turn a block ``[n, b, heads of r, d]``.
Ranks hold the sequence in order, so what arrives from rank 0, 1, ... one after the other *is* the
sequence: ``[s, b, my heads, d]``, nothing to rearrange on either side.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(slots=True)
class ExchangeCounter:
    """What this rank sent so far; read by benchmarks and tests."""

    calls: int = 0
    sent_bytes: int = 0


class HeadExchange:
    """The exchange over one process group. Its methods are collective over the group.

    ``heads[r]`` is the number of heads rank r gets; every rank passes the same list. ``unit`` is
    n * b * d, the elements of one head on one rank. Buffers are contiguous. What is returned must
    be waited for before ``receive`` is read or ``send`` written; None is done already.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        """``group`` None is this rank alone."""
        self.group = group
        self.size, self.rank = (group.size(), group.rank()) if group is not None else (1, 0)
        self.counter = ExchangeCounter()

    def to_heads(
        self, send: Tensor, receive: Tensor, heads: Sequence[int], unit: int
    ) -> dist.Work | None:
        """[n, b, heads of r, d] for each r -> [s, b, my heads, d]."""
        mine = [heads[self.rank] * unit] * self.size
        return self._exchange(send, [count * unit for count in heads], receive, mine)

    def to_sequence(
        self, send: Tensor, receive: Tensor, heads: Sequence[int], unit: int
    ) -> dist.Work | None:
        """[s, b, my heads, d] -> [n, b, heads of r, d] for each r: the inverse of to_heads."""
        mine = [heads[self.rank] * unit] * self.size
        return self._exchange(send, mine, receive, [count * unit for count in heads])

    def _exchange(
        self, send: Tensor, send_sizes: list[int], receive: Tensor, receive_sizes: list[int]
    ) -> dist.Work | None:
        send, receive = send.view(-1), receive.view(-1)
        if self.size == 1:
            if not _are_one(send, receive):
                receive.copy_(send)
            return None
        self.counter.calls += 1
        self.counter.sent_bytes += send.numel() * send.element_size()
        return dist.all_to_all_single(
            receive, send, receive_sizes, send_sizes, group=self.group, async_op=True
        )


def _are_one(a: Tensor, b: Tensor) -> bool:
    """Whether two flat tensors are the same memory. Not by their addresses: a trace has none."""
    same_storage = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same_storage and a.storage_offset() == b.storage_offset()


def blocks(flat: Tensor, heads: Sequence[int], n: int, b: int, d: int) -> list[Tensor]:
    """A flat sequence-side buffer as one [n, b, heads of r, d] view for each rank r."""
    parts = flat.split([n * b * count * d for count in heads])
    return [part.view(n, b, count, d) for part, count in zip(parts, heads, strict=True)]


class HeadBlocks:
    """A flat sequence-side buffer between the order of its exchange and that of [t, b, heads, d].

    Ranks in a row with equally many, evenly spaced heads are moved by one copy.
    """

    def __init__(self, flat: Tensor, heads: Sequence[range], n: int, b: int, d: int):
        """``heads[r]``: which heads of the natural order rank r gets."""
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
            _tokens(block, rows).copy_(_heads_by_rank(x, ranks))

    def read(self, rows: slice, out: Tensor) -> None:
        """Get tokens ``rows`` into their heads of ``out`` [t, b, heads, d]."""
        for block, ranks in self._runs:
            _heads_by_rank(out, ranks).copy_(_tokens(block, rows))


def _heads_by_rank(x: Tensor, ranks: Sequence[range]) -> Tensor:
    """[t, b, heads, d] -> the view [ranks, t, b, heads of each, d]."""
    size = len(ranks[0])
    step = ranks[1].start - ranks[0].start if len(ranks) > 1 else size
    start, stop = ranks[0].start, ranks[-1].stop
    windows = x.narrow(2, start, stop - start).unfold(2, size, step)
    return windows.permute(2, 0, 1, 4, 3)


def _tokens(block: Tensor, rows: slice) -> Tensor:
    return block.narrow(1, rows.start, rows.stop - rows.start)


def _evenly_spaced(heads: Sequence[range]) -> Iterator[list[range]]:
    """Cut the ranks that have heads into runs of as many each, at one distance, none shared."""
    run: list[range] = []
    for each in filter(None, heads):
        distances = {right.start - left.start for left, right in pairwise([*run, each])}
        if run and (len(each) != len(run[0]) or len(distances) > 1 or min(distances) < len(each)):
            yield run
            run = []
        run.append(each)
    if run:
        yield run
