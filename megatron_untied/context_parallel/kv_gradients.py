"""dK and dV: summed over the kernel calls that use a head, then sent to the ranks that own it.

A key-value head that a rank uses in several kernel calls, or that several ranks use, is summed in
at least fp32, so that rounding errors do not grow with their number. If each head is used once, the
kernel writes into the send buffer itself, in its own dtype.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_untied.context_parallel.buffer_plan import Buffer, KvGradBuffers, Sizes
from megatron_untied.context_parallel.exchange import HeadExchange, blocks
from megatron_untied.context_parallel.head_schedule import ChunkAssignment, KernelCall
from megatron_untied.tiling import rows_of

KvPair = tuple[Tensor, Tensor]
"""dK and dV: [s/r, b, key-value heads, d] each."""


@dataclass(slots=True, eq=False)
class KvSums:
    """Sums of dK and of dV of some key-value heads, each over all tokens of the Ulysses ranks.

    Here on the device; :mod:`megatron_untied.streaming.host_tensors` keeps them in host memory.
    """

    heads: range
    tensors: KvPair | None
    """[s/r, b, len(heads), d], uninitialized before the first addition; None on the host."""
    started: set[int] = field(default_factory=set)
    """Heads that have been added to."""

    def writable(self, heads: range, dtype: torch.dtype) -> KvPair | None:
        """The sums of ``heads``, if a kernel may write its dK and dV there instead of adding."""
        if self.tensors is None or self.tensors[0].dtype != dtype or self.started & set(heads):
            return None
        columns = slice(heads.start - self.heads.start, heads.stop - self.heads.start)
        dk, dv = self.tensors
        return dk[:, :, columns], dv[:, :, columns]

    def add(self, heads: range, parts: KvPair, rows: slice | None = None) -> None:
        """Add dK and dV of ``heads``; the first time of all rows, later of ``rows`` if given."""
        started = not self.started.isdisjoint(heads)
        assert started or rows is None, "the first gradients must be of all rows"
        columns = slice(heads.start - self.heads.start, heads.stop - self.heads.start)
        for total, part in zip(self.tensors, parts, strict=True):
            if started:
                total[rows or slice(None), :, columns].add_(part)
            elif total.dtype != part.dtype:  # else the kernel wrote the sum itself
                total[:, :, columns].copy_(part)
        self.started.update(heads)

    def read(self, index: int, head: int, out: Tensor) -> None:
        """Write the sum of dK (0) or dV (1) of one head into ``out`` [s/r, b, d]."""
        out.copy_(self.tensors[index][:, :, head - self.heads.start])

    def release(self) -> None:
        """Free host memory; call it after the last read. Device memory is the workspace's."""


MakeSums = Callable[[range], KvSums]
"""Key-value heads -> their sums, uninitialized."""


class KvHome:
    """dK and dV of this rank's own tokens, all heads, as chunks bring them home.

    Here on the device; :mod:`megatron_untied.streaming.host_tensors` keeps them in host memory.
    """

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self.total: Tensor | None = None
        """[2, n, b, g, d], once the first are received.

        Not in the workspace: if all heads finish in the last chunk, the allocator reuses the
        memory of the kernel's own allocations, which is free by then.
        """

    def add(self, index: int, received: Tensor, heads: Sequence[range]) -> None:
        """Add dK (0) or dV (1) of ``heads[i]`` from rank i: flat [n, b, len(heads[i]), d] each.

        Several ranks may use one head.
        """
        sizes = self.sizes
        if self.total is None:
            shape = 2, sizes.n, sizes.b, sizes.schedule.num_kv_heads, sizes.d
            self.total = received.new_zeros(shape, dtype=sizes.home_dtype)
        parts = blocks(received.view(-1), list(map(len, heads)), sizes.n, sizes.b, sizes.d)
        for each, part in zip(heads, parts, strict=True):
            self.total[index][:, :, each.start : each.stop] += part

    def rows(self, index: int, rows: Sequence[slice]) -> Tensor:
        """Several runs of tokens of dK (0) or dV (1): [t, b, g, d], which may be overwritten."""
        return rows_of(self.total[index], rows)

    def release(self) -> None:
        """Free host memory; call it after the last read. Device memory goes with its reference."""


@dataclass(frozen=True, slots=True)
class KvAccumulator:
    """The sums that one kernel call adds its dK and dV to."""

    heads: range
    sums: KvSums
    gradients: "KvGradients"

    def scratch(self, which: int = 0) -> KvPair:
        """Memory for a kernel's dK and dV, [s/r, b, heads, d]: then pass them to :meth:`add`.

        ``which`` 1 is not the memory of 0, which a ring may still be sending.
        """
        sizes, buffers = self.gradients.sizes, self.gradients.buffers
        sums = self.sums.writable(self.heads, sizes.dtype)
        if sums is not None:
            return sums  # saves the scratch memory, and a pass over it
        shape = sizes.tokens, sizes.b, len(self.heads), sizes.d
        dk, dv = buffers.scratch[which]
        return self.gradients.take(dk, shape), self.gradients.take(dv, shape)

    def add(self, dk: Tensor, dv: Tensor, *, rows: slice | None = None) -> None:
        """Add gradients [s/r, b, heads, d], or after a first time [len(rows), b, heads, d]."""
        self.sums.add(self.heads, (dk, dv), rows)


class KvGradients:
    """dK and dV of all key-value heads, in one backward over the chunks. Collective."""

    def __init__(
        self,
        exchange: HeadExchange,
        sizes: Sizes,
        buffers: KvGradBuffers,
        take: Callable[[Buffer, Sequence[int]], Tensor],
        make_sums: MakeSums | None = None,
        home: KvHome | None = None,
    ):
        """``take(buffer, shape)`` is workspace memory on the device of the gradients.

        ``make_sums``: constructor of the sums; by default they are in the workspace. ``home``:
        where they go; by default on the device.
        """
        self.exchange, self.sizes, self.buffers, self.take = exchange, sizes, buffers, take
        self._make_sums = make_sums if sizes.sums_kv else None
        self._sums: dict[int, KvSums] = {}  # by head; heads that arrived together share one
        self.home = home or KvHome(sizes)

    def of(self, call: KernelCall, assignment: ChunkAssignment) -> KvAccumulator:
        """The accumulator of one kernel call of a chunk, whose sums its first call allocates."""
        heads, sizes = assignment.kv_to_load, self.sizes
        if heads and heads[0] not in self._sums:
            if self._make_sums is not None:
                sums = self._make_sums(heads)
            else:
                shape = sizes.tokens, sizes.b, len(heads), sizes.d
                dk, dv = self.buffers.sums[assignment.kv_buffer]
                sums = KvSums(heads, (self.take(dk, shape), self.take(dv, shape)))
            self._sums.update(dict.fromkeys(heads, sums))
        return KvAccumulator(call.kv_heads, self._sums[call.kv_heads[0]], self)

    def return_to_owner(self, j: int, chunk: Sequence[ChunkAssignment]) -> None:
        """Send the heads finished in chunk j to the ranks that own the tokens; waits.

        [s/r, b, heads, d] -> [n, b, heads, d], added to ``home``.
        """
        mine, sizes = chunk[self.exchange.rank].kv_finished, self.sizes
        finished = [assignment.kv_finished for assignment in chunk]
        counts = list(map(len, finished))
        if not any(counts):  # the same on every rank: the exchange is collective
            return
        for index in range(2):
            send = self._contiguous(index, mine)  # [s/r, b, len(mine), d]
            if self.exchange.size == 1:
                received = send
            else:
                # One receive buffer for both, so dK is home before dV is sent.
                numel = sizes.n * sizes.b * sum(counts) * sizes.d
                received = self.take(self.buffers.home[j], (numel,))
                self.exchange.to_sequence(send, received, counts).wait()
            self.home.add(index, received, finished)
        for head in mine:
            sums = self._sums.pop(head)
            if head == sums.heads[-1]:
                sums.release()

    def _contiguous(self, index: int, heads: range) -> Tensor:
        """The sum of dK (0) or dV (1): [s/r, b, len(heads), d], contiguous, in the sent dtype."""
        sums, sizes = self._sums[heads[0]] if heads else None, self.sizes
        if sums is not None and sums.tensors is not None and heads == sums.heads:
            if sums.tensors[index].dtype == sizes.dtype:
                return sums.tensors[index]  # sent as it lies
        shape = sizes.tokens, sizes.b, len(heads), sizes.d
        packed = self.take(self.buffers.packed[index], shape)
        for column, head in enumerate(heads):
            self._sums[head].read(index, head, packed[:, :, column])
        return packed
