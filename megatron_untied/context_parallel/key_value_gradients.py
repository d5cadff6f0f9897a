"""The gradients of keys and values: summed over the chunks that used a head, then sent home."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_untied.context_parallel.all_to_all import HeadExchange, blocks
from megatron_untied.context_parallel.chunk_loader import LoadedChunk
from megatron_untied.context_parallel.head_schedule import HeadSchedule, Turn
from megatron_untied.context_parallel.key_value_sums import DeviceSums, KeyValueSums, MakeSums
from megatron_untied.context_parallel.workspace import ChunkBuffers


@dataclass(frozen=True, slots=True)
class GradientTarget:
    """Where attention leaves the gradients of some keys and values: [s, b, len(heads), d] each."""

    heads: range
    sums: KeyValueSums
    scratch: ChunkBuffers

    def buffers(self, index: int = 0) -> list[Tensor]:
        """Where a kernel is to write dk and dv, to be added.

        ``index`` 1 are others than ``index`` 0, for who still needs what he wrote there.
        """
        place = self.sums.place(self.heads, self.scratch.like.dtype)
        if place is not None:
            return place
        names = (("dk", "dv"), ("dk_second", "dv_second"))[index]
        return [self.scratch.head_side(name, len(self.heads)) for name in names]

    def add(self, dk: Tensor, dv: Tensor, *, rows: slice | None = None) -> None:
        """Add gradients of all tokens, or after those of ``rows`` [len(rows), b, heads, d]."""
        self.sums.add(self.heads, (dk, dv), rows)


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
        make_sums: MakeSums | None = None,
    ):
        """``summed``: whether attention adds several parts for one head in one chunk already.

        ``make_sums`` makes the wide sums, None in the workspace.
        """
        self.exchange, self.buffers = exchange, buffers
        dtype = buffers.like.dtype
        wide = torch.promote_types(dtype, torch.float32)
        summed = summed or schedule.kv_heads_in_many_chunks(exchange.rank)
        self._sum_dtype = wide if summed else dtype
        self._make_sums = make_sums if summed else None
        self._sums: list[KeyValueSums] = []
        self._home_dtype = wide if schedule.shares_kv_heads else dtype
        self._home_shape = (2, buffers.n, buffers.b, schedule.num_kv_heads, buffers.d)
        self.total: Tensor | None = None
        """[2, n, b, g, d]: dK and dV of this rank's own tokens, once the first came home.

        Not in the workspace: where each head comes home in the last chunk it takes the memory of
        the kernel's scratch, which is then free.
        """

    def begin(self, turn: Turn) -> None:
        """Make room for the heads that ``turn`` loads."""
        if not turn.load:
            return
        if self._make_sums is not None:
            size = self.buffers
            shape = torch.Size((size.n * size.num_ranks, size.b, size.d))
            self._sums.append(self._make_sums(turn.load, shape, self._sum_dtype))
        else:
            self._sums.append(self._device_sums(turn))

    def target(self, heads: range) -> GradientTarget:
        """Where the gradients of ``heads`` go."""
        return GradientTarget(heads, self._find(heads[0]), self.buffers)

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
        finished = [sums for sums in self._sums if sums.heads[-1] in chunk.turn.done]
        self._sums = [sums for sums in self._sums if sums not in finished]
        for sums in finished:
            sums.release()

    def _device_sums(self, turn: Turn) -> DeviceSums:
        names = f"dk_sum{turn.buffer}", f"dv_sum{turn.buffer}"
        size = len(turn.load)
        tensors = [self.buffers.head_side(name, size, self._sum_dtype) for name in names]
        return DeviceSums(turn.load, tensors)

    def _find(self, head: int) -> KeyValueSums:
        return next(sums for sums in self._sums if head in sums.heads)

    def _packed(self, index: int, done: range) -> Tensor:
        """Dk (0) or dv (1) of the ``done`` heads, contiguous and in the dtype that travels."""
        if done:
            whole = self._find(done[0]).whole(index, done, self.buffers.like.dtype)
            if whole is not None:
                return whole
        packed = self.buffers.head_side(("dk", "dv")[index], len(done))
        for column, head in enumerate(done):
            self._find(head).read(index, head, packed[:, :, column])
        return packed
