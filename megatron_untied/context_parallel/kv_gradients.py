"""dK and dV: summed over the kernel calls that use a head, then sent to the ranks that own it.

A key-value head that a rank uses in several kernel calls, or that several ranks use, is summed in
at least fp32, so that rounding errors do not grow with their number. If each head is used once, the
kernel writes into the send buffer itself, in its own dtype.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from megatron_untied.context_parallel.buffer_plan import KvGradBuffers
from megatron_untied.context_parallel.exchange import HeadExchange, blocks
from megatron_untied.context_parallel.head_schedule import ChunkAssignment
from megatron_untied.context_parallel.workspace import Memory

KvPair = tuple[Tensor, Tensor]
"""dK and dV: [s/r, b, key-value heads, d] each."""


class KvSums(ABC):
    """Sums of dK and of dV of some key-value heads, each over all tokens of the Ulysses ranks."""

    heads: range

    @abstractmethod
    def add(self, heads: range, parts: KvPair, rows: slice | None = None) -> None:
        """Add dK and dV of ``heads``; the first time of all rows, later of ``rows`` if given."""

    def writable(self, heads: range, dtype: torch.dtype) -> KvPair | None:
        """The sums of ``heads``, if a kernel may write its dK and dV there; None on the host."""
        return None

    def sendable(self, index: int, heads: range, dtype: torch.dtype) -> Tensor | None:
        """The sum of dK (0) or dV (1), contiguous, if it is of just ``heads`` in ``dtype``.

        [s/r, b, len(heads), d]; None on the host.
        """
        return None

    @abstractmethod
    def read(self, index: int, head: int, out: Tensor) -> None:
        """Write the sum of dK (0) or dV (1) of one head into ``out`` [s/r, b, d]."""

    @abstractmethod
    def release(self) -> None:
        """Free host memory; call it after the last read."""


MakeSums = Callable[[range], KvSums]
"""Key-value heads -> their sums, uninitialized."""


@dataclass(slots=True, eq=False)
class DeviceKvSums(KvSums):
    """Sums in two tensors [s/r, b, len(heads), d], uninitialized before the first addition."""

    heads: range
    tensors: KvPair
    started: set[int] = field(default_factory=set)

    @override
    def writable(self, heads: range, dtype: torch.dtype) -> KvPair | None:
        is_empty = self.started.isdisjoint(heads)
        return self._columns(heads) if is_empty and self.tensors[0].dtype == dtype else None

    @override
    def add(self, heads: range, parts: KvPair, rows: slice | None = None) -> None:
        started = not self.started.isdisjoint(heads)
        assert started or rows is None, "the first gradients must be of all rows"
        for total, part in zip(self._columns(heads), parts, strict=True):
            if started:
                total[rows or slice(None)].add_(part)
            elif total.dtype != part.dtype:  # else the kernel wrote the sum itself
                total.copy_(part)
        self.started.update(heads)

    @override
    def sendable(self, index: int, heads: range, dtype: torch.dtype) -> Tensor | None:
        tensor = self.tensors[index]
        return tensor if heads == self.heads and tensor.dtype == dtype else None

    @override
    def read(self, index: int, head: int, out: Tensor) -> None:
        out.copy_(self.tensors[index][:, :, head - self.heads.start])

    @override
    def release(self) -> None:
        pass  # freed with the last reference

    def _columns(self, heads: range) -> KvPair:
        first = heads.start - self.heads.start
        dk, dv = (x[:, :, first : first + len(heads)] for x in self.tensors)
        return dk, dv


@dataclass(frozen=True, slots=True)
class KvAccumulator:
    """The sums that one kernel call adds its dK and dV to."""

    heads: range
    sums: KvSums
    buffers: KvGradBuffers
    memory: Memory

    def scratch(self, which: int = 0) -> KvPair:
        """Memory for a kernel's dK and dV, [s/r, b, heads, d]: then pass them to :meth:`add`.

        ``which`` 1 is not the memory of 0, which a ring may still be sending.
        """
        sums = self.sums.writable(self.heads, self.memory.sizes.dtype)
        if sums is not None:
            return sums
        dk, dv = (
            self.memory.head_sharded(buffer, len(self.heads))
            for buffer in self.buffers.scratch[which]
        )
        return dk, dv

    def add(self, dk: Tensor, dv: Tensor, *, rows: slice | None = None) -> None:
        """Add gradients [s/r, b, heads, d], or after a first time [len(rows), b, heads, d]."""
        self.sums.add(self.heads, (dk, dv), rows)


class KvGradients:
    """dK and dV of all key-value heads, in one backward over the chunks. Collective."""

    def __init__(
        self,
        exchange: HeadExchange,
        buffers: KvGradBuffers,
        memory: Memory,
        make_sums: MakeSums | None = None,
    ):
        """``make_sums``: constructor of the sums; by default they are in the workspace."""
        self.exchange, self.buffers, self.memory = exchange, buffers, memory
        self._make_sums = make_sums if memory.sizes.sums_kv else None
        self._sums: list[KvSums] = []
        self.total: Tensor | None = None
        """[2, n, b, g, d]: dK and dV of this rank's own tokens, once the first are received.

        Not in the workspace: if all heads finish in the last chunk, the allocator reuses the
        memory of the kernel's own allocations, which is free by then.
        """

    def begin(self, assignment: ChunkAssignment) -> None:
        """Allocate the sums of the heads that a chunk loads."""
        heads = assignment.kv_to_load
        if not heads:
            return
        if self._make_sums is not None:
            self._sums.append(self._make_sums(heads))
        else:
            dk, dv = (
                self.memory.head_sharded(buffer, len(heads))
                for buffer in self.buffers.sums[assignment.kv_buffer]
            )
            self._sums.append(DeviceKvSums(heads, (dk, dv)))

    def of(self, heads: range) -> KvAccumulator:
        """The accumulator of a kernel call's ``heads``."""
        return KvAccumulator(heads, self._sums_of(heads[0]), self.buffers, self.memory)

    def return_to_owner(self, j: int, chunk: Sequence[ChunkAssignment]) -> None:
        """Send the heads finished in chunk j to the ranks that own the tokens; waits.

        [s/r, b, heads, d] -> [n, b, heads, d], added to ``total``.
        """
        mine, sizes = chunk[self.exchange.rank].kv_finished, self.memory.sizes
        finished = [assignment.kv_finished for assignment in chunk]
        counts = list(map(len, finished))
        if not any(counts):
            return
        if self.total is None:
            shape = 2, sizes.n, sizes.b, sizes.schedule.num_kv_heads, sizes.d
            options = {"dtype": self.buffers.home_dtype, "device": self.memory.device}
            self.total = torch.zeros(shape, **options)
        for index, total in enumerate(self.total):  # dK before dV: one receive buffer for both
            recv = self.memory.sequence_sharded(self.buffers.home[j], sum(counts))
            self.exchange.to_sequence(self._packed(index, mine), recv, counts).wait()
            parts = blocks(recv, counts, sizes.n, sizes.b, sizes.d)
            for heads, part in zip(finished, parts, strict=True):
                total[:, :, heads.start : heads.stop] += part  # several ranks may use one head
        finished_sums = [sums for sums in self._sums if sums.heads[-1] in mine]
        self._sums = [sums for sums in self._sums if sums not in finished_sums]
        for sums in finished_sums:
            sums.release()

    def _sums_of(self, head: int) -> KvSums:
        return next(sums for sums in self._sums if head in sums.heads)

    def _packed(self, index: int, heads: range) -> Tensor:
        """The sum of dK (0) or dV (1): [s/r, b, len(heads), d], contiguous, in the sent dtype."""
        if heads:
            sums = self._sums_of(heads[0]).sendable(index, heads, self.memory.sizes.dtype)
            if sums is not None:
                return sums
        packed = self.memory.head_sharded(self.buffers.packed[index], len(heads))
        for column, head in enumerate(heads):
            self._sums_of(head).read(index, head, packed[:, :, column])
        return packed
