"""Untied Ulysses: exchange a few heads, attend, return the output; chunk after chunk.

A rank holds q of u/a heads over the whole sequence (2u/a with overlap) and only the k and v that
they use; dK and dV of a head stay until its last chunk. The caller provides q, k and v
(:class:`Projections`): finished tensors in the plain layer, projected tile by tile in the streamed
one. The loop is the same.

One chunk, with shapes on one rank: s tokens, n = s/p per rank, a Ulysses and r ring ranks, u query
heads per chunk, d head width, b micro-batch, m hidden size::

    load    project, rotate     x [n, b, m]        ->  send buffer, a blocks [n, b, u/a, d]
            all-to-all          a x [n, b, u/a, d] ->  q [s/r, b, u/a, d];  k, v alike
    attend  kernel              q, k, v            ->  out [s/r, b, u/a, d],  lse [b, u/a, s/r]
    return  all-to-all          out                ->  its slot of O, a blocks [n, b, u/a, d]

Backward loads O and dO as well, and returns dQ into the slot that dO has left. dK and dV of the
heads that no later chunk uses return to the ranks that own the tokens, which sum those of all ranks
that share a head.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_untied.context_parallel.buffer_plan import (
    BackwardBuffers,
    Buffer,
    ForwardBuffers,
    LoadBuffers,
    PerChunk,
    Sizes,
)
from megatron_untied.context_parallel.exchange import HeadChunks, HeadExchange, Work
from megatron_untied.context_parallel.head_schedule import ChunkAssignment, HeadSchedule, KernelCall
from megatron_untied.context_parallel.kernels import (
    Attended,
    AttentionKernel,
    Mask,
    Qkv,
    QkvGrads,
)
from megatron_untied.context_parallel.kv_gradients import (
    KvAccumulator,
    KvGradients,
    KvHome,
    MakeSums,
)
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.step_progress import LayerProgress, StepProgress

LogSumExps = Sequence[Sequence[Tensor]]
"""By chunk, then by kernel call: each [b, query heads of the call, s/r]."""


class Projections(ABC):
    """q, k, v of this rank's n tokens, q and k rotated to their positions."""

    n: int
    b: int
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def write(self, kind: Literal["q", "k", "v"], heads: Sequence[range], send: Tensor) -> None:
        """Fill ``send``: flat blocks [n, b, len(heads[i]), d] one after the other, i = 0, 1, ..."""


@dataclass(slots=True, eq=False)
class Attention:
    """Attention over all tokens of some heads, which are on this rank: one kernel call.

    :class:`.ring.RingAttention` replaces it if a ring shares the tokens.
    """

    kernel: AttentionKernel
    mask: Mask
    num_ring: ClassVar[int] = 1
    """Ranks that hold the tokens of a head. Several add to the gradient of each query and key."""
    ring_overlap: ClassVar[bool] = False
    """Whether they exchange keys and values while they attend."""

    def forward(self, x: Qkv, *, out: Tensor) -> Tensor:
        """Write the output [s/r, b, heads, d] into ``out``; returns lse [b, heads, s/r]."""
        return self.kernel.forward(x, out=out, mask=self.mask)

    def backward(
        self, d_out: Tensor, x: Qkv, y: Attended, *, dq: Tensor, dkv: KvAccumulator
    ) -> None:
        """Write the gradient of q into ``dq``, and add those of k and v to ``dkv``.

        ``dq`` may be ``d_out`` without a ring. A ring may overwrite ``d_out``.
        """
        dk, dv = dkv.scratch()  # the sums themselves, if nothing was added to them yet
        self.kernel.backward(d_out, x, y, into=QkvGrads(dq, dk, dv), mask=self.mask)
        dkv.add(dk, dv)


class SavedAttention(NamedTuple):
    """What backward needs of a forward over all chunks."""

    out: HeadChunks  # [n, b, h, d]
    lse: LogSumExps


class UntiedUlysses:
    """Head-chunked attention of one geometry on one rank. Its methods are collective.

    Buffers live in the workspace; only log-sum-exps are made anew. If the schedule overlaps, the
    exchanges of the chunks before and after run during a chunk's attention, at the cost of a second
    set of buffers.
    """

    def __init__(
        self,
        schedule: HeadSchedule,
        head_width: int,
        group: dist.ProcessGroup | None,
        workspace: Workspace,
        progress: LayerProgress | None = None,
    ):
        """``progress`` records the begin and end of each chunk."""
        self.schedule, self.head_width, self.workspace = schedule, head_width, workspace
        self.progress = progress or StepProgress().for_layer(0, 1, len(schedule.chunks))
        self.exchange = HeadExchange(group)

    def forward(self, x: Projections, out: HeadChunks, attention: Attention) -> LogSumExps:
        """Fill ``out`` [n, b, h, d] with the attention of all heads; returns the log-sum-exps."""
        sizes = self.sizes(x, attention)
        buffers, lse = ForwardBuffers.plan(sizes), []
        source = _Source(x, sizes, buffers.load, self.workspace)
        returning = _Returning(max_in_flight=1 if self.schedule.overlap else 0)

        loading = self._load(0, source)
        for j, chunk in enumerate(self.schedule.chunks):
            loaded, mine = loading.wait(), chunk[self.exchange.rank]
            if self.schedule.overlap:
                loading = self._load(j + 1, source, loaded)  # travels while this chunk attends

            if self.exchange.size > 1:
                o = source.take(buffers.out[j], loaded.q.shape)
            else:  # nothing will travel: attend into the slot itself
                o = out.recv_buffer(j).view(loaded.q.shape)
            with self.progress.chunk(j):
                lse.append(
                    [
                        attention.forward(loaded.qkv(call), out=o[:, :, call.query_columns])
                        for call in mine.kernel_calls
                    ]
                )

            counts = [len(each.query_heads) for each in chunk]
            work = self.exchange.to_sequence(o, out.recv_buffer(j), counts)  # -> [n, b, u, d]
            returning.add(work, out, j)
            if not self.schedule.overlap:
                loading = self._load(j + 1, source, loaded)  # into the same buffers, free now
        returning.wait()
        return lse

    def backward(
        self,
        x: Projections,
        y: SavedAttention,
        d_out: HeadChunks,
        attention: Attention,
        make_sums: MakeSums | None = None,
        home: KvHome | None = None,
    ) -> KvHome:
        """Turn ``d_out`` from dO into dQ, slot by slot; returns dK and dV of this rank's tokens.

        dQ and dK are those of the rotated queries and keys. ``make_sums`` allocates the
        accumulators of dK and dV; by default they are in the workspace. ``home`` is what is
        returned; by default on the device.
        """
        sizes = self.sizes(x, attention)
        buffers = BackwardBuffers.plan(sizes, sums_on_host=make_sums is not None)
        slots = {"d_out": (d_out, buffers.d_out), "out": (y.out, buffers.out)}
        source = _Source(x, sizes, buffers.load, self.workspace, slots)
        returning = _Returning(max_in_flight=1 if self.schedule.overlap else 0)
        dkv = KvGradients(self.exchange, sizes, buffers.kv_grads, source.take, make_sums, home)

        loading = self._load(0, source)
        for j, chunk in enumerate(self.schedule.chunks):
            loaded, mine = loading.wait(), chunk[self.exchange.rank]
            if self.schedule.overlap:
                loading = self._load(j + 1, source, loaded)  # travels while this chunk attends

            dq = loaded.d_out
            # The kernel reads dO for the last time before it writes dQ: they share a buffer, unless
            # a ring reads dO again or the next dO is already arriving.
            if not buffers.dq_over_d_out:
                dq = source.take(buffers.dq[j], loaded.q.shape)
            with self.progress.chunk(j):
                for call, lse in zip(mine.kernel_calls, y.lse[j], strict=True):
                    columns = call.query_columns
                    attention.backward(
                        loaded.d_out[:, :, columns],
                        loaded.qkv(call),
                        Attended(loaded.out[:, :, columns], lse),
                        dq=dq[:, :, columns],
                        dkv=dkv.of(call, mine),
                    )

            # This rank's exchange of the chunk's dO is complete: its slot may receive dQ.
            counts = [len(each.query_heads) for each in chunk]
            work = self.exchange.to_sequence(dq, d_out.recv_buffer(j), counts)  # -> [n, b, u, d]
            returning.add(work, d_out, j)
            dkv.return_to_owner(j, chunk)
            if not self.schedule.overlap:
                loading = self._load(j + 1, source, loaded)  # into the same buffers, free now
        returning.wait()
        return dkv.home

    def sizes(self, x: Projections, attention: Attention) -> Sizes:
        """What the buffers of a call depend on."""
        return Sizes(
            schedule=self.schedule,
            rank=self.exchange.rank,
            n=x.n,
            b=x.b,
            d=self.head_width,
            dtype=x.dtype,
            num_ring=attention.num_ring,
            ring_overlap=attention.ring_overlap,
        )

    def _load(
        self, j: int, source: "_Source", before: "_LoadedChunk | None" = None
    ) -> "_LoadedChunk | None":
        """Start to bring chunk j here: project, rotate, exchange. None after the last chunk.

        ``before`` is the chunk before it, whose keys and values may be reused.
        """
        if j == len(self.schedule.chunks):
            return None
        rank, sizes = self.exchange.rank, source.sizes
        mine = self.schedule.chunks[j][rank]
        loaded, arrived = _LoadedChunk(), {}
        for part in source.parts(j):
            counts = list(map(len, part.heads))
            shape = sizes.tokens, sizes.b, counts[rank], sizes.d
            if part.slots is not None:
                send = part.slots.send_buffer(j)
                alone = self.exchange.size == 1  # has it already: it is read where it lies
                recv = send.view(shape) if alone else source.take(part.recv, shape)
            else:
                recv = send = source.take(part.recv, shape)
                if self.exchange.size > 1:
                    send = source.take(part.send, (sizes.n, sizes.b, sum(counts), sizes.d))
                # [n, b, m] -> [n, b, heads[i], d], ...
                source.x.write(part.name, part.heads, send.view(-1))
            # [n, b, heads[i], d] for each rank i -> [s/r, b, my heads, d]
            loaded.works.append(self.exchange.to_heads(send, recv, counts))
            arrived[part.name] = recv
            if not self.schedule.overlap:
                loaded.wait()  # what comes next is sent from the same buffer
        loaded.q, loaded.d_out, loaded.out = (arrived.get(name) for name in ("q", "d_out", "out"))
        if before is not None:
            loaded.kv = before.kv_used_by(mine)
        if "k" in arrived:
            loaded.kv.append(_KvHeads(mine.kv_to_load, arrived["k"], arrived["v"]))
        return loaded


class _Part(NamedTuple):
    """One tensor of a chunk that is exchanged, and the buffers on both sides."""

    name: Literal["q", "k", "v", "out", "d_out"]
    heads: list[range]
    """By Ulysses rank."""
    recv: Buffer
    send: Buffer | None = None
    slots: HeadChunks | None = None
    """Instead of ``send``: O and dO are sent as they lie in their slots, [n, b, u, d]."""


@dataclass(frozen=True, slots=True)
class _Source:
    """What the chunks of one pass are loaded from, and into."""

    x: Projections
    sizes: Sizes
    buffers: LoadBuffers
    workspace: Workspace
    slots: dict[str, tuple[HeadChunks, PerChunk]] = field(default_factory=dict)
    """In backward "d_out" and "out", and the buffers that their chunks are received in."""

    def parts(self, j: int) -> list[_Part]:
        """What to exchange for chunk j: the same parts on every rank."""
        chunk, buffers = self.sizes.schedule.chunks[j], self.buffers
        queries, kv = [each.query_heads for each in chunk], [each.kv_to_load for each in chunk]
        parts = [
            _Part(name, queries, recv[j], slots=slots) for name, (slots, recv) in self.slots.items()
        ]
        parts.append(_Part("q", queries, buffers.q[j], buffers.send_q))
        if any(kv):  # of any rank: the exchange is collective
            # kv_buffer is -1 where this rank loads no key-value heads: what it receives is empty.
            pair = buffers.kv[chunk[self.sizes.rank].kv_buffer]
            for name, recv, send in zip(("k", "v"), pair, buffers.send_kv, strict=True):
                parts.append(_Part(name, kv, recv, send))
        return parts

    def take(self, buffer: Buffer, shape: Sequence[int]) -> Tensor:
        """The buffer on the device of q, k and v, uninitialized."""
        return self.workspace.take(buffer, self.x.device, shape)


class _KvHeads(NamedTuple):
    """Key-value heads that arrived together."""

    heads: range
    k: Tensor  # [s/r, b, len(heads), d]
    v: Tensor


@dataclass(slots=True)
class _LoadedChunk:
    """What this rank attends to in one chunk, there after :meth:`wait`."""

    q: Tensor | None = None  # [s/r, b, u/a, d]
    kv: list[_KvHeads] = field(default_factory=list)
    d_out: Tensor | None = None  # [s/r, b, u/a, d], in backward
    out: Tensor | None = None  # [s/r, b, u/a, d], in backward
    works: list[Work] = field(default_factory=list)

    def qkv(self, call: KernelCall) -> Qkv:
        """Views of the heads of one kernel call; its key-value heads arrived together."""
        loaded = next(each for each in self.kv if call.kv_heads[0] in each.heads)
        first = call.kv_heads[0] - loaded.heads[0]
        columns = slice(first, first + len(call.kv_heads))
        q = self.q[:, :, call.query_columns]
        return Qkv(q, loaded.k[:, :, columns], loaded.v[:, :, columns])

    def kv_used_by(self, mine: ChunkAssignment) -> list[_KvHeads]:
        """Those of this chunk's keys and values that a later chunk of the rank uses too."""
        return [each for each in self.kv if set(mine.kv_heads) & set(each.heads)]

    def wait(self) -> "_LoadedChunk":
        """Make the compute stream wait for the pending exchanges."""
        for work in self.works:
            work.wait()
        self.works.clear()
        return self


@dataclass(frozen=True, slots=True)
class _Returning:
    """Chunks in flight to the ranks that own the tokens."""

    max_in_flight: int
    """1 with overlap, during the attention of the next chunk; else 0."""
    in_flight: deque[tuple[Work, HeadChunks, int]] = field(default_factory=deque)

    def add(self, work: Work, into: HeadChunks, j: int) -> None:
        """``work`` brings chunk j into ``into``; waits until ``max_in_flight`` are left."""
        self.in_flight.append((work, into, j))
        self.wait(self.max_in_flight)

    def wait(self, at_most: int = 0) -> None:
        """Wait until at most so many are in flight."""
        while len(self.in_flight) > at_most:
            work, into, j = self.in_flight.popleft()
            work.wait()  # compute may overwrite what was sent from here on
            into.received(j)
