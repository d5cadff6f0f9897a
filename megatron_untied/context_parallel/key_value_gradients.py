"""The gradients of keys and values: summed over the chunks that used a head, then sent home."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_untied.context_parallel.all_to_all import HeadExchange, blocks
from megatron_untied.context_parallel.chunk_loader import LoadedChunk
from megatron_untied.context_parallel.head_schedule import HeadSchedule, Turn
from megatron_untied.context_parallel.workspace import ChunkBuffers


@dataclass(slots=True)
class _Sums:
    """Gradients of the heads of one load: [s, b, len(heads), d] of k and of v."""

    heads: range
    tensors: tuple[Tensor, Tensor]
    started: set[int] = field(default_factory=set)

    def columns(self, heads: range) -> list[Tensor]:
        first = heads.start - self.heads.start
        return [x[:, :, first : first + len(heads)] for x in self.tensors]


@dataclass(frozen=True, slots=True)
class GradientTarget:
    """Where attention leaves the gradients of some keys and values: [s, b, len(heads), d] each."""

    heads: range
    sums: _Sums
    scratch: ChunkBuffers

    def buffers(self, index: int = 0) -> list[Tensor]:
        """Where a kernel is to write dk and dv, to be added.

        ``index`` 1 are others than ``index`` 0, for who still needs what he wrote there.
        """
        if self._in_place:
            return self.sums.columns(self.heads)
        names = (("dk", "dv"), ("dk_second", "dv_second"))[index]
        return [self.scratch.head_side(name, len(self.heads)) for name in names]

    def add(self, dk: Tensor, dv: Tensor, *, rows: slice | None = None) -> None:
        """Add gradients of all tokens, or after those of ``rows`` [len(rows), b, heads, d]."""
        started = self._started
        assert started or rows is None, "nothing of the other rows would ever be written"
        for total, part in zip(self.sums.columns(self.heads), (dk, dv), strict=True):
            if started:
                total[rows or slice(None)].add_(part)
            elif not self._in_place:
                total.copy_(part)
        self.sums.started.update(self.heads)

    @property
    def _started(self) -> bool:
        return not self.sums.started.isdisjoint(self.heads)

    @property
    def _in_place(self) -> bool:
        """Whether what the kernel writes first are the sums themselves."""
        return not self._started and self.sums.tensors[0].dtype == self.scratch.like.dtype


class KeyValueGradients:
    """dK and dV of one attention call.

    A head that a rank uses in several kernel calls, or that several ranks use, is summed in at
    least fp32, so that rounding does not grow with their number. Where each head is used once the
    kernel writes straight into what is sent, in the dtype it computes in.
    """

    def __init__(
        self,
        schedule: HeadSchedule,
        exchange: HeadExchange,
        buffers: ChunkBuffers,
        *,
        summed: bool,
    ):
        """``summed``: whether attention adds several parts for one head in one chunk already."""
        self.exchange, self.buffers = exchange, buffers
        dtype = buffers.like.dtype
        wide = torch.promote_types(dtype, torch.float32)
        summed = summed or schedule.kv_heads_in_many_chunks(exchange.rank)
        self._sum_dtype = wide if summed else dtype
        self._sums: list[_Sums] = []
        self._home_dtype = wide if schedule.shares_kv_heads else dtype
        self._home_shape = (2, buffers.n, buffers.b, schedule.num_kv_heads, buffers.d)
        self.total: Tensor | None = None
        """[2, n, b, g, d]: dK and dV of this rank's own tokens, once the first came home.

        Not in the workspace: where each head comes home in the last chunk it takes the memory of
        the kernel's scratch, which is then free.
        """

    def begin(self, turn: Turn) -> None:
        """Make room for the heads that ``turn`` loads."""
        if turn.load:
            names = (f"dk_sum{turn.buffer}", f"dv_sum{turn.buffer}")
            size = len(turn.load)
            tensors = (self.buffers.head_side(x, size, self._sum_dtype) for x in names)
            self._sums.append(_Sums(turn.load, tuple(tensors)))

    def target(self, heads: range) -> GradientTarget:
        """Where the gradients of ``heads`` go."""
        return GradientTarget(heads, self._find(heads), self.buffers)

    def send_home(self, chunk: LoadedChunk, scratch: str) -> None:
        """Send the heads finished in ``chunk`` to the ranks whose tokens they are. Collective.

        ``scratch`` names a buffer that is free by now.
        """
        dones = [turn.done for turn in chunk.turns]
        if not any(dones):
            return
        counts, size = [len(done) for done in dones], self.buffers
        if self.total is None:
            self.total = size.like.new_zeros(self._home_shape, dtype=self._home_dtype)
        for index, total in enumerate(self.total):
            receive = size.sequence_side(scratch, sum(counts))
            send = self._packed(index, chunk.turn.done)
            work = self.exchange.to_sequence(send, receive, counts, size.unit)
            if work is not None:
                work.wait()
            parts = blocks(receive, counts, size.n, size.b, size.d)
            for done, part in zip(dones, parts, strict=True):
                total[:, :, done.start : done.stop] += part
        self._sums = [sums for sums in self._sums if sums.heads[-1] not in chunk.turn.done]

    def _find(self, heads: range) -> _Sums:
        return next(sums for sums in self._sums if heads[0] in sums.heads)

    def _packed(self, index: int, done: range) -> Tensor:
        """Dk (0) or dv (1) of the ``done`` heads, contiguous and in the dtype that travels."""
        for sums in self._sums:
            if sums.heads == done and self._sum_dtype == self.buffers.like.dtype:
                return sums.tensors[index]
        packed = self.buffers.head_side(("dk", "dv")[index], len(done))
        for column, head in enumerate(done):
            one = range(head, head + 1)
            packed[:, :, column : column + 1] = self._find(one).columns(one)[index]
        return packed
