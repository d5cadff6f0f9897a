"""dK and dV: summed over the kernel calls that use a head, then sent to the ranks that own it.

A key-value head that a rank uses in several kernel calls, or that several ranks use, is summed in
at least fp32, so that rounding does not grow with their number. Where each head is used once the
kernel writes straight into what is sent, in the dtype it computes in.
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
    def place(self, heads: range, dtype: torch.dtype) -> KvPair | None:
        """Where a kernel may write dK and dV of ``heads`` itself; None if it has to elsewhere."""

    @abstractmethod
    def add(self, heads: range, parts: KvPair, rows: slice | None = None) -> None:
        """Add dK and dV of ``heads``, or of ``rows`` only, once all rows had some."""

    @abstractmethod
    def whole(self, index: int, heads: range, dtype: torch.dtype) -> Tensor | None:
        """The sum of dK (0) or dV (1), contiguous, if it is of just ``heads`` in ``dtype``."""

    @abstractmethod
    def read(self, index: int, head: int, out: Tensor) -> None:
        """Write the sum of dK (0) or dV (1) of one head into ``out`` [s/r, b, d]."""

    @abstractmethod
    def release(self) -> None:
        """Has to be called after the last read."""


MakeSums = Callable[[range], KvSums]
"""Key-value heads -> sums that hold nothing yet."""


@dataclass(slots=True, eq=False)
class DeviceKvSums(KvSums):
    """Sums in two tensors [s/r, b, len(heads), d], whose content is undefined at first."""

    heads: range
    tensors: KvPair
    started: set[int] = field(default_factory=set)

    @override
    def place(self, heads: range, dtype: torch.dtype) -> KvPair | None:
        empty = self.started.isdisjoint(heads) and self.tensors[0].dtype == dtype
        return self._columns(heads) if empty else None

    @override
    def add(self, heads: range, parts: KvPair, rows: slice | None = None) -> None:
        started = not self.started.isdisjoint(heads)
        assert started or rows is None, "nothing of the other rows would ever be written"
        for total, part in zip(self._columns(heads), parts, strict=True):
            if started:
                total[rows or slice(None)].add_(part)
            elif total.dtype != part.dtype:  # else the kernel wrote it in its place
                total.copy_(part)
        self.started.update(heads)

    @override
    def whole(self, index: int, heads: range, dtype: torch.dtype) -> Tensor | None:
        tensor = self.tensors[index]
        return tensor if heads == self.heads and tensor.dtype == dtype else None

    @override
    def read(self, index: int, head: int, out: Tensor) -> None:
        out.copy_(self.tensors[index][:, :, head - self.heads.start])

    @override
    def release(self) -> None:
        pass

    def _columns(self, heads: range) -> KvPair:
        first = heads.start - self.heads.start
        dk, dv = (x[:, :, first : first + len(heads)] for x in self.tensors)
        return dk, dv


@dataclass(frozen=True, slots=True)
class KvAccumulator:
    """dK and dV of the key-value heads of one kernel call, to which attention adds."""

    heads: range
    sums: KvSums
    buffers: KvGradBuffers
    memory: Memory

    def scratch(self, which: int = 0) -> KvPair:
        """Where a kernel is to write dK and dV, which is then to be added.

        ``which`` 1 is other memory than 0, for a ring that still sends what it wrote there.
        """
        place = self.sums.place(self.heads, self.memory.sizes.dtype)
        if place is not None:
            return place
        dk, dv = (
            self.memory.head_sharded(each, len(self.heads)) for each in self.buffers.scratch[which]
        )
        return dk, dv

    def add(self, dk: Tensor, dv: Tensor, *, rows: slice | None = None) -> None:
        """Add gradients of all tokens, or then those of ``rows``: [len(rows), b, heads, d]."""
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
        """``make_sums`` makes what gradients are summed in; None is in the workspace."""
        self.exchange, self.buffers, self.memory = exchange, buffers, memory
        self._make_sums = make_sums if memory.sizes.sums_kv else None
        self._sums: list[KvSums] = []
        self.total: Tensor | None = None
        """[2, n, b, g, d]: dK and dV of this rank's own tokens, once the first came home.

        Not in the workspace: where all heads come home in the last chunk it takes the memory of
        the kernel's own allocations, which is then free.
        """

    def begin(self, assignment: ChunkAssignment) -> None:
        """Make room for the heads that a chunk loads."""
        heads = assignment.kv_to_load
        if not heads:
            return
        if self._make_sums is not None:
            self._sums.append(self._make_sums(heads))
        else:
            dk, dv = (
                self.memory.head_sharded(each, len(heads))
                for each in self.buffers.sums[assignment.kv_buffer]
            )
            self._sums.append(DeviceKvSums(heads, (dk, dv)))

    def of(self, heads: range) -> KvAccumulator:
        """What the gradients of ``heads`` are added to."""
        return KvAccumulator(heads, self._sums_of(heads[0]), self.buffers, self.memory)

    def return_to_owner(self, j: int, chunk: Sequence[ChunkAssignment]) -> None:
        """Send the heads finished in chunk j to the ranks whose tokens they are; waits."""
        mine, sizes = chunk[self.exchange.rank].kv_finished, self.memory.sizes
        finished = [each.kv_finished for each in chunk]
        counts = list(map(len, finished))
        if not any(counts):
            return
        if self.total is None:
            shape = 2, sizes.n, sizes.b, sizes.schedule.num_kv_heads, sizes.d
            options = {"dtype": self.buffers.home_dtype, "device": self.memory.device}
            self.total = torch.zeros(shape, **options)
        for index, total in enumerate(self.total):
            recv = self.memory.sequence_sharded(self.buffers.home[j], sum(counts))
            self.exchange.to_sequence(self._packed(index, mine), recv, counts).wait()
            parts = blocks(recv, counts, sizes.n, sizes.b, sizes.d)
            for heads, part in zip(finished, parts, strict=True):
                total[:, :, heads.start : heads.stop] += part  # several ranks may have used one
        finished_sums = [sums for sums in self._sums if sums.heads[-1] in mine]
        self._sums = [sums for sums in self._sums if sums not in finished_sums]
        for sums in finished_sums:
            sums.release()

    def _sums_of(self, head: int) -> KvSums:
        return next(sums for sums in self._sums if head in sums.heads)

    def _packed(self, index: int, heads: range) -> Tensor:
        """The sum of dK (0) or dV (1) of ``heads``: contiguous, in the dtype that travels."""
        if heads:
            whole = self._sums_of(heads[0]).whole(index, heads, self.memory.sizes.dtype)
            if whole is not None:
                return whole
        packed = self.memory.head_sharded(self.buffers.packed[index], len(heads))
        for column, head in enumerate(heads):
            self._sums_of(head).read(index, head, packed[:, :, column])
        return packed
