"""Trade a sequence shard of all heads for the whole sequence of some heads, and back.

A buffer of the sequence side is flat: for each rank r in turn a block ``[n, b, heads of r, d]``.
Ranks hold the sequence in order, so what arrives from rank 0, 1, ... one after the other *is* the
sequence: ``[s, b, my heads, d]``, nothing to rearrange on either side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
            if send.data_ptr() != receive.data_ptr():
                receive.copy_(send)
            return None
        self.counter.calls += 1
        self.counter.sent_bytes += send.numel() * send.element_size()
        return dist.all_to_all_single(
            receive, send, receive_sizes, send_sizes, group=self.group, async_op=True
        )


def blocks(flat: Tensor, heads: Sequence[int], n: int, b: int, d: int) -> list[Tensor]:
    """A flat sequence-side buffer as one [n, b, heads of r, d] view for each rank r."""
    parts = flat.split([n * b * count * d for count in heads])
    return [part.view(n, b, count, d) for part, count in zip(parts, heads, strict=True)]
