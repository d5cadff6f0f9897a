"""Untied Ulysses: exchange a few heads, attend, send them home; chunk after chunk.

A rank holds q of u/a heads over the whole sequence (2u/a with overlap) and only the k and v that
they use; dK and dV of a head stay until its last chunk. The caller provides q, k and v
(:class:`Projections`): finished tensors in the plain layer, projected tile by tile in the streamed
one. The loop is the same.

One chunk, with shapes on one rank: s tokens, n = s/p per rank, a Ulysses and r ring ranks, u query
heads per chunk, d head width, b micro-batch, m hidden size::

    load    project, rotate     x [n, b, m]        ->  send buffer, a blocks [n, b, u/a, d]
            all-to-all          a x [n, b, u/a, d] ->  q [s/r, b, u/a, d];  k, v alike
    attend  kernel              q, k, v            ->  out [s/r, b, u/a, d],  lse [b, u/a, s/r]
    home    all-to-all          out                ->  its slot of O, a blocks [n, b, u/a, d]

Backward loads O and dO as well, and sends dQ home into the slot that dO has left. dK and dV of the
heads that no later chunk uses go home too, where they are summed over the ranks that share them.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from megatron_untied.context_parallel.buffer_plan import (
    BackwardBuffers,
    ForwardBuffers,
    LoadBuffers,
    PerChunk,
    Sizes,
)
from megatron_untied.context_parallel.exchange import HeadChunks, HeadExchange, Work
from megatron_untied.context_parallel.head_schedule import HeadSchedule, KernelCall
from megatron_untied.context_parallel.kernels import (
    Attended,
    AttentionKernel,
    Mask,
    Qkv,
    QkvGrads,
)
from megatron_untied.context_parallel.kv_gradients import KvAccumulator, KvGradients, MakeSums
from megatron_untied.context_parallel.workspace import Memory, Workspace
from megatron_untied.step_progress import LayerProgress, StepProgress

LogSumExps = list[list[Tensor]]
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


class Attention(ABC):
    """Attention over what one rank holds after the exchange."""

    num_ring: int
    """Ranks that hold the tokens of a head. Several add to the gradient of each query and key."""

    @abstractmethod
    def forward(self, x: Qkv, *, out: Tensor) -> Tensor:
        """Write the output [s/r, b, heads, d] into ``out``; returns lse [b, heads, s/r]."""

    @abstractmethod
    def backward(
        self, d_out: Tensor, x: Qkv, y: Attended, *, dq: Tensor, dkv: KvAccumulator
    ) -> None:
        """Write the gradient of q into ``dq``, and add those of k and v to ``dkv``.

        ``dq`` may be ``d_out`` without a ring.
        """


class LocalAttention(Attention):
    """All tokens of the heads are on this rank: one kernel call."""

    num_ring = 1

    def __init__(self, kernel: AttentionKernel, mask: Mask):
        self.kernel, self.mask = kernel, mask

    @override
    def forward(self, x: Qkv, *, out: Tensor) -> Tensor:
        return self.kernel.forward(x, out=out, mask=self.mask)

    @override
    def backward(
        self, d_out: Tensor, x: Qkv, y: Attended, *, dq: Tensor, dkv: KvAccumulator
    ) -> None:
        dk, dv = dkv.scratch()
        self.kernel.backward(d_out, x, y, into=QkvGrads(dq, dk, dv), mask=self.mask)
        dkv.add(dk, dv)


class SavedAttention(NamedTuple):
    """What backward needs of a forward over all chunks."""

    out: HeadChunks  # [n, b, h, d]
    lse: LogSumExps


class UntiedUlysses:
    """Head-chunked attention of one geometry on one rank. Its methods are collective.

    Buffers live in the workspace; only log-sum-exps are made anew. If the schedule overlaps, the
    exchanges of the chunks before and after run while a chunk attends, for a second set of buffers.
    """

    def __init__(
        self,
        schedule: HeadSchedule,
        head_width: int,
        group: dist.ProcessGroup | None,
        workspace: Workspace,
        progress: LayerProgress | None = None,
    ):
        """``progress`` is given the beginning and end of every chunk."""
        self.schedule, self.head_width, self.workspace = schedule, head_width, workspace
        self.progress = progress or StepProgress().for_layer(0, 1, len(schedule.chunks))
        self.exchange = HeadExchange(group)

    def forward(self, x: Projections, out: HeadChunks, attention: Attention) -> LogSumExps:
        """Fill ``out`` [n, b, h, d] with the attention of all heads; returns the log-sum-exps."""
        memory = Memory(self.workspace, self.sizes(x, attention), x.device)
        buffers = ForwardBuffers.plan(memory.sizes)
        inputs = _Inputs(x, memory, buffers.load)
        returning, lse = _Returning(self), []

        loading = self._load(0, inputs)
        for j, chunk in enumerate(self.schedule.chunks):
            loaded, mine = loading.wait(), chunk[self.exchange.rank]
            if self.schedule.overlap:
                loading = self._load(j + 1, inputs, loaded)  # travels while this chunk attends

            self.progress.begin_chunk(j)
            if self.exchange.size > 1:
                o = memory.head_sharded(buffers.out[j], len(mine.query_heads))
            else:  # nothing will travel: attend into the slot itself
                o = out.recv_buffer(j).view(loaded.q.shape)
            lse.append(
                [
                    attention.forward(loaded.qkv(call), out=o[:, :, call.query_columns])
                    for call in mine.kernel_calls
                ]
            )
            self.progress.chunk_completed()

            returning.send(j, o, into=out)  # [s/r, b, u/a, d] -> [n, b, u, d]
            if not self.schedule.overlap:
                loading = self._load(j + 1, inputs, loaded)  # into the same buffers, free now
        returning.wait()
        return lse

    def backward(
        self,
        x: Projections,
        y: SavedAttention,
        d_out: HeadChunks,
        attention: Attention,
        make_sums: MakeSums | None = None,
    ) -> Tensor:
        """Turn ``d_out`` from dO into dQ, slot by slot; returns dK and dV: [2, n, b, g, d].

        dQ and dK are those of the rotated queries and keys. ``make_sums`` allocates the
        accumulators of dK and dV; by default they are in the workspace.
        """
        memory = Memory(self.workspace, self.sizes(x, attention), x.device)
        buffers = BackwardBuffers.plan(memory.sizes, sums_on_host=make_sums is not None)
        inputs = _Inputs(x, memory, buffers.load, (d_out, buffers.d_out), (y.out, buffers.out))
        returning = _Returning(self)
        dkv = KvGradients(self.exchange, buffers.kv_grads, memory, make_sums)

        loading = self._load(0, inputs)
        for j, chunk in enumerate(self.schedule.chunks):
            loaded, mine = loading.wait(), chunk[self.exchange.rank]
            if self.schedule.overlap:
                loading = self._load(j + 1, inputs, loaded)  # travels while this chunk attends

            self.progress.begin_chunk(j)
            dkv.begin(mine)
            dq = loaded.d_out
            # The kernel reads dO for the last time before it writes dQ: they share a buffer, unless
            # a ring reads dO again or the next dO is already arriving.
            if not buffers.dq_over_d_out:
                dq = memory.head_sharded(buffers.dq[j], len(mine.query_heads))
            for call, lse in zip(mine.kernel_calls, y.lse[j], strict=True):
                columns = call.query_columns
                attention.backward(
                    loaded.d_out[:, :, columns],
                    loaded.qkv(call),
                    Attended(loaded.out[:, :, columns], lse),
                    dq=dq[:, :, columns],
                    dkv=dkv.of(call.kv_heads),
                )
            self.progress.chunk_completed()

            # This rank's exchange of the chunk's dO is complete: its slot may receive dQ.
            returning.send(j, dq, into=d_out)  # [s/r, b, u/a, d] -> [n, b, u, d]
            dkv.return_to_owner(j, chunk)
            if not self.schedule.overlap:
                loading = self._load(j + 1, inputs, loaded)  # into the same buffers, free now
        returning.wait()
        return dkv.total

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
        )

    def _load(
        self, j: int, inputs: "_Inputs", before: "_LoadedChunk | None" = None
    ) -> "_LoadedChunk | None":
        """Start to bring chunk j here: project, rotate, exchange. None after the last chunk.

        ``before`` is the chunk before it, whose keys and values may be reused.
        """
        if j == len(self.schedule.chunks):
            return None
        chunk, memory, buffers = self.schedule.chunks[j], inputs.memory, inputs.buffers
        mine = chunk[self.exchange.rank]
        loaded = _LoadedChunk()
        loaded.d_out = self._load_slot(j, loaded, memory, inputs.d_out)
        loaded.out = self._load_slot(j, loaded, memory, inputs.out)
        queries, loads = [a.query_heads for a in chunk], [a.kv_to_load for a in chunk]
        # kv_buffer is -1 where this rank loads no key-value heads: what it receives is empty.
        k, v = buffers.kv[mine.kv_buffer]
        parts = [("q", queries, buffers.send_q, buffers.q[j])]
        if any(loads):  # of any rank: the exchange is collective
            parts += [("k", loads, buffers.send_kv[0], k), ("v", loads, buffers.send_kv[1], v)]
        arrived = {}
        for kind, heads, send_buffer, recv_buffer in parts:
            counts = list(map(len, heads))
            recv = memory.head_sharded(recv_buffer, counts[self.exchange.rank])
            send = recv.view(-1)
            if self.exchange.size > 1:
                send = memory.sequence_sharded(send_buffer, sum(counts))
            inputs.x.write(kind, heads, send)  # [n, b, m] -> [n, b, heads[i], d] for each rank i
            work = self.exchange.to_heads(send, recv, counts)  # -> [s/r, b, my heads, d]
            # Without overlap q, k and v are sent from one buffer, one after the other.
            loaded.add(work, wait=not self.schedule.overlap)
            arrived[kind] = recv
        loaded.q = arrived["q"]
        if before is not None:
            loaded.kv = [each for each in before.kv if set(each.heads) & set(mine.kv_heads)]
        if any(loads):
            loaded.kv.append(_KvHeads(mine.kv_to_load, arrived["k"], arrived["v"]))
        return loaded

    def _load_slot(
        self,
        j: int,
        loaded: "_LoadedChunk",
        memory: Memory,
        source: tuple[HeadChunks, PerChunk] | None,
    ) -> Tensor | None:
        """Exchange a slot as it lies: [n, b, u, d] -> [s/r, b, u/a, d]; one rank has it already."""
        if source is None:
            return None
        tensor, buffers = source
        heads = [len(each.query_heads) for each in self.schedule.chunks[j]]
        send = tensor.send_buffer(j)
        if self.exchange.size == 1:
            return send.view(-1, memory.sizes.b, heads[0], memory.sizes.d)
        recv = memory.head_sharded(buffers[j], heads[self.exchange.rank])
        # A slot that was fetched from the host lies in the send buffer of what comes next.
        loaded.add(self.exchange.to_heads(send, recv, heads), wait=not self.schedule.overlap)
        return recv


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What the chunks of one pass are loaded from, and into."""

    x: Projections
    memory: Memory
    buffers: LoadBuffers
    d_out: tuple[HeadChunks, PerChunk] | None = None
    out: tuple[HeadChunks, PerChunk] | None = None


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

    def add(self, work: Work, *, wait: bool) -> None:
        """Another exchange that brings a part of it."""
        self.works.append(work)
        if wait:
            self.wait()

    def wait(self) -> "_LoadedChunk":
        """Make the compute stream wait for the pending exchanges."""
        for work in self.works:
            work.wait()
        self.works.clear()
        return self


class _Returning:
    """Chunks on their way back to the ranks whose tokens they are.

    With overlap one of them may be on its way while the next chunk attends.
    """

    def __init__(self, ulysses: UntiedUlysses):
        self.exchange, self.schedule = ulysses.exchange, ulysses.schedule
        self.in_flight: deque[tuple[Work, HeadChunks, int]] = deque()

    def send(self, j: int, x: Tensor, into: HeadChunks) -> None:
        """Start to send ``x`` [s/r, b, u/a, d] to chunk j of ``into``."""
        heads = [len(each.query_heads) for each in self.schedule.chunks[j]]
        work = self.exchange.to_sequence(x, into.recv_buffer(j), heads)
        self.in_flight.append((work, into, j))
        self.wait(at_most=1 if self.schedule.overlap else 0)

    def wait(self, at_most: int = 0) -> None:
        """Wait until no more than so many are on their way."""
        while len(self.in_flight) > at_most:
            work, into, j = self.in_flight.popleft()
            work.wait()
            into.received(j)
