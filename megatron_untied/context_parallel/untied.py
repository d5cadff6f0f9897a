"""Untied Ulysses: exchange a few heads, attend, exchange back; chunk after chunk.

A rank never holds q, k, v or their gradients of more than u heads over the whole sequence. Where
q, k and v come from is the caller's business (:class:`.chunk_loader.Projections`): finished
tensors in the plain layer, tile-by-tile projections in the streamed one. The loop is the same.
"""

from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from megatron_untied.context_parallel.all_to_all import HeadExchange
from megatron_untied.context_parallel.chunk_loader import ChunkLoader, LoadedChunk, Projections
from megatron_untied.context_parallel.head_major import HeadMajor
from megatron_untied.context_parallel.head_schedule import HeadSchedule
from megatron_untied.context_parallel.key_value_gradients import (
    GradientTarget,
    KeyValueGradients,
)
from megatron_untied.context_parallel.key_value_sums import MakeSums
from megatron_untied.context_parallel.workspace import ChunkBuffers, Workspace
from megatron_untied.step_progress import LayerProgress, StepProgress

LogSumExps = list[list[Tensor]]
"""By chunk, then by kernel call: each [b, heads, s]."""


class Attend(Protocol):
    """Attention over what one rank holds after the exchange; see :mod:`.kernels`."""

    sums_gradients: bool
    """Whether several kernel calls add to the gradient of one query or key."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> Tensor:
        """Write the attention output into ``out``; returns the log-sum-exp."""

    def backward(
        self,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        dq: Tensor,
        target: GradientTarget,
    ) -> None:
        """Write the gradient of q into ``dq``, and add those of k and v to ``target``.

        ``dq`` may be ``d_out``, unless gradients are summed.
        """


class UntiedUlysses:
    """Head-chunked attention of one geometry on one rank. Its methods are collective.

    Buffers live in the workspace; only log-sum-exps are made anew. If the schedule overlaps, the
    exchanges of the chunks before and after run while a chunk attends, for a second set of them.
    """

    def __init__(
        self,
        schedule: HeadSchedule,
        head_width: int,
        group: dist.ProcessGroup | None,
        workspace: Workspace,
        progress: LayerProgress | None = None,
    ):
        """``progress`` is told of every chunk; None is nobody."""
        self.schedule, self.head_width, self.workspace = schedule, head_width, workspace
        self.progress = progress or StepProgress().of_layer(0, 1, len(schedule.chunks))
        self.exchange = HeadExchange(group)
        self.limit_in_flight = 1 if schedule.overlap else 0

    def forward(self, source: Projections, out: HeadMajor, attend: Attend) -> LogSumExps:
        """Fill ``out`` with the attention of all heads."""
        buffers, lse = self._buffers(source), []
        chunks = self._loader(source, buffers, spare="o")
        sending = _Sending(self.exchange, buffers, self.limit_in_flight)
        for chunk in chunks:
            self.progress.chunk(chunk.index)
            turn = chunk.turn
            if self.exchange.size == 1:  # nothing will travel: attend into the slot itself
                o = out.landing(chunk.index).view(-1, buffers.b, len(turn.query), buffers.d)
            else:
                o = buffers.head_side(chunks.set_of("o", chunk.index), len(turn.query))
            lse.append([])
            for piece in turn.pieces:
                columns = piece.query_columns
                q, (k, v) = chunk.tensors["q"][:, :, columns], chunk.key_value(piece.kv)
                lse[-1].append(attend.forward(q, k, v, out=o[:, :, columns]))
            self.progress.attended()
            sending.send(o, out, chunk)
        sending.finish()
        return lse

    def backward(
        self,
        source: Projections,
        out: HeadMajor,
        lse: LogSumExps,
        grad: HeadMajor,
        attend: Attend,
        make_sums: MakeSums | None = None,
    ) -> Tensor:
        """Turn ``grad`` from dO into dQ, slot by slot; returns dK and dV: [2, n, b, g, d].

        dQ and dK are those of the rotated queries and keys. ``make_sums`` says where gradients of
        keys and values are summed over chunks; None is the workspace.
        """
        buffers = self._buffers(source)
        chunks = self._loader(source, buffers, spare="dk", head_major={"do": grad, "o": out})
        sending = _Sending(self.exchange, buffers, self.limit_in_flight)
        gradients = KeyValueGradients(
            self.schedule,
            self.exchange,
            buffers,
            summed=attend.sums_gradients,
            make_sums=make_sums,
        )
        # A kernel reads dO for the last time before it writes dQ: one buffer for both. Not if
        # another call reads dO again, and not while the next dO arrives and this dQ leaves.
        over_d_out = not (attend.sums_gradients or self.schedule.overlap)
        for chunk in chunks:
            self.progress.chunk(chunk.index)
            turn = chunk.turn
            dq = chunk.tensors["do"]
            if not over_d_out:
                dq = buffers.head_side(chunks.set_of("dq", chunk.index), len(turn.query))
            gradients.begin(turn)
            for piece, piece_lse in zip(turn.pieces, lse[chunk.index], strict=True):
                do, q, o, dq_piece = (
                    x[:, :, piece.query_columns] for x in (*_query_tensors(chunk), dq)
                )
                k, v = chunk.key_value(piece.kv)
                target = gradients.target(piece.kv)
                attend.backward(do, q, k, v, o, piece_lse, dq=dq_piece, target=target)
            self.progress.attended()
            # This chunk's dO has arrived everywhere: its slot is free for dQ.
            sending.send(dq, grad, chunk)
            gradients.send_home(chunk, scratch=chunks.set_of("do", chunk.index))
        sending.finish()
        return gradients.total

    def _buffers(self, source: Projections) -> ChunkBuffers:
        return ChunkBuffers(
            self.workspace,
            num_ranks=self.exchange.size,
            n=source.n,
            b=source.b,
            d=self.head_width,
            like=source.like,
        )

    def _loader(
        self,
        source: Projections,
        buffers: ChunkBuffers,
        *,
        spare: str,
        head_major: dict[str, HeadMajor] | None = None,
    ) -> ChunkLoader:
        return ChunkLoader(
            self.schedule,
            self.exchange,
            buffers,
            source,
            spare=spare,
            head_major=head_major,
        )


class _Sending:
    """Chunks on their way back: at most ``limit`` of them while the next one attends."""

    def __init__(self, exchange: HeadExchange, buffers: ChunkBuffers, limit: int):
        self.exchange, self.buffers, self.limit = exchange, buffers, limit
        self.on_their_way: list[tuple[dist.Work | None, HeadMajor, int]] = []

    def send(self, x: Tensor, home: HeadMajor, chunk: LoadedChunk) -> None:
        """Start sending ``x`` [s, b, heads of this turn, d] to its slots."""
        heads = [len(turn.query) for turn in chunk.turns]
        landing = home.landing(chunk.index)
        work = self.exchange.to_sequence(x, landing, heads, self.buffers.unit)
        self.on_their_way.append((work, home, chunk.index))
        self._settle(self.limit)

    def finish(self) -> None:
        """Wait for all of them."""
        self._settle(0)

    def _settle(self, limit: int) -> None:
        while len(self.on_their_way) > limit:
            work, home, index = self.on_their_way.pop(0)
            if work is not None:
                work.wait()
            home.landed(index)


def _query_tensors(chunk: LoadedChunk) -> tuple[Tensor, Tensor, Tensor]:
    return chunk.tensors["do"], chunk.tensors["q"], chunk.tensors["o"]
