"""Attention over a sequence that a ring of ranks shares.

A rank holds two blocks of the sequence, an early and a late one (:mod:`.sequence`), of the heads
in use. In step t it receives keys and values from the rank t places before it in the ring:

* step 0, its own: causal over [early; late] in one call, as all of early comes before all of late;
* those of a rank earlier in the sequence: all queries see that rank's early block, none the late;
* those of a rank later in the sequence: late queries see both blocks, early queries none.

So every step but the first is block x 2 block pairs on every rank, without a mask. Partial outputs
are merged by their log-sum-exps. In backward each step ends by sending the gradients of the
received keys and values back to their owner, which sums them.

Blocks are sent by their owner instead of being relayed from neighbor to neighbor. A relayed block
is sent whole, while a rank later in the sequence needs half of it: direct is 3/4 of the bytes.
Gradients summed along a relay would be fp32 and take one more hop. Sent directly to the owner, they
are in the kernel's dtype and summed in fp32 there: less than 3/8 of the bytes.

Buffers besides those of :mod:`.ulysses`, in bf16 chunks of q and of k: 2 q for the fp32 sum of out
or, from a ring of 3 on, of dq: two parts of dq lie in dq and over dO; for received keys and values
2 k in a ring of 2, 4 k in one of 3, 6 k in a longer one; and in backward, from a ring of 3 on, 2 k
for the dk and dv in flight. The sums of dk and dv, those of :mod:`.kv_gradients`, are always fp32.

Without overlap nothing travels during a kernel: up to 2 k for received keys and values, or for the
gradients that return, are allocated between two kernels and freed after the second.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from megatron_untied.context_parallel.buffer_plan import RingBuffers
from megatron_untied.context_parallel.exchange import ExchangeCounter
from megatron_untied.context_parallel.kernels import (
    Attended,
    AttentionKernel,
    Mask,
    Qkv,
    QkvGrads,
)
from megatron_untied.context_parallel.kv_gradients import KvAccumulator
from megatron_untied.context_parallel.sequence import ring_blocks
from megatron_untied.context_parallel.ulysses import Attention
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.phases import MemoryCategory, allocating
from megatron_untied.step_progress import StepProgress


@dataclass(frozen=True, kw_only=True, slots=True)
class RingStep:
    """One step of one rank, in rows of [early; late]."""

    index: int
    owner: int
    """The rank that sends its keys: ``index`` places before."""
    queries: slice
    """Own rows that see them."""
    keys: slice
    """Rows of the owner that are seen."""
    reader: int
    """The rank that receives this rank's keys: ``index`` places after."""
    lent: slice
    """Own rows that the reader sees."""


def ring_steps(rank: int, num_ring: int, block_size: int) -> list[RingStep]:
    """The steps of a rank, its own keys first."""
    late, both = slice(block_size, 2 * block_size), slice(0, 2 * block_size)
    early = slice(0, block_size)
    steps = []
    for index in range(num_ring):
        owner, reader = (rank - index) % num_ring, (rank + index) % num_ring
        steps.append(
            RingStep(
                index=index,
                owner=owner,
                # Of an earlier rank all queries see the early block; of a later one only late
                # queries see anything, and they see both blocks.
                queries=both if owner <= rank else late,
                keys=early if owner < rank else both,
                reader=reader,
                lent=early if rank < reader else both,
            )
        )
    return steps


class Ring:
    """A process group whose ranks exchange tensors in pairs."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.size, self.rank = group.size(), group.rank()
        self.counter = ExchangeCounter()

    def trade(
        self, send: Sequence[Tensor], to: int, receive: Sequence[Tensor], source: int
    ) -> list[dist.Work]:
        """Send to rank ``to`` and receive from rank ``source``; collective over the group.

        Wait for all returned works before reading ``receive`` or writing ``send``.
        """
        self.counter.calls += 1
        self.counter.sent_bytes += sum(x.nbytes for x in send)
        operations = [dist.P2POp(dist.isend, x, group=self.group, group_peer=to) for x in send]
        operations += [
            dist.P2POp(dist.irecv, x, group=self.group, group_peer=source) for x in receive
        ]
        return dist.batch_isend_irecv(operations)


class RingAttention(Attention):
    """Attention where each rank holds its own blocks of q, k, v. Collective over the ring."""

    def __init__(
        self,
        kernel: AttentionKernel,
        mask: Mask,
        ring: Ring,
        workspace: Workspace,
        progress: StepProgress | None = None,
        *,
        overlap: bool = True,
    ):
        """``mask``: of the whole sequence, causal and without a window.

        ``progress`` is updated after every step of the ring. ``overlap``: the next step's keys and
        values arrive during a step, and its gradients return during the next one.
        """
        super().__init__(kernel, mask)
        self.ring, self.num_ring, self.workspace = ring, ring.size, workspace
        self.ring_overlap = overlap
        self.progress = progress or StepProgress()

    @override
    def forward(self, x: Qkv, *, out: Tensor) -> Tensor:
        buffers, (s, b, h, _) = RingBuffers.plan(x.q.shape, x.k.shape, x.q.dtype), out.shape
        total = self.workspace.take(buffers.total, out.device, out.shape).zero_()  # fp32
        total_lse = total.new_full((b, h, s), -torch.inf)
        for step, kv in self._steps(x, buffers):
            rows = step.queries
            lse = self.kernel.forward(
                Qkv(x.q[rows], *kv), out=out[rows], mask=self._mask(step, s // 2)
            )
            self.progress.kernel_call_completed()
            merge(total[rows], total_lse[..., rows], out[rows], lse)
        out.copy_(total)
        return total_lse

    @override
    def backward(
        self, d_out: Tensor, x: Qkv, y: Attended, *, dq: Tensor, dkv: KvAccumulator
    ) -> None:
        buffers, returning = RingBuffers.plan(x.q.shape, x.k.shape, x.q.dtype), _Returning()
        total = None  # fp32; two parts need none: their sum is rounded once
        if self.ring.size > 2:
            total = self.workspace.take(buffers.total, dq.device, dq.shape).zero_()
        for step, kv in self._steps(x, buffers):
            # Two pairs in turn: the step before may still be sending the other. Step 0 sends none.
            turn = max(step.index - 1, 0) % 2 if self.ring_overlap else 0
            dk, dv = (part[: len(kv[0])] for part in dkv.scratch(turn))
            rows = step.queries
            # The second of two steps reads dO for the last time.
            part = d_out[rows] if step.index and total is None else dq[rows]
            self.kernel.backward(
                d_out[rows],
                Qkv(x.q[rows], *kv),
                Attended(y.out[rows], y.lse[..., rows]),
                into=QkvGrads(part, dk, dv),
                mask=self._mask(step, len(x.q) // 2),
            )
            self.progress.kernel_call_completed()
            if total is not None:
                total[rows].add_(part)
            elif step.index:
                dq[rows].add_(part)
            returning.finish(dkv)
            if step.index == 0:
                dkv.add(dk, dv)
            else:
                kv.clear()
                returning = self._return(step, [dk, dv], buffers)
                if not self.ring_overlap:
                    returning.finish(dkv)
                    returning = _Returning()  # frees what it received
        returning.finish(dkv)
        if total is not None:
            dq.copy_(total)

    def _steps(self, x: Qkv, buffers: RingBuffers) -> Iterator[tuple[RingStep, list[Tensor]]]:
        """Each step with its keys and values; with overlap those of the next are in flight.

        The caller may clear the list to let go of its memory.
        """
        steps = ring_steps(self.ring.rank, self.ring.size, len(x.k) // 2)
        own = [  # columns of what arrived together are copied: sends must be contiguous
            kv if kv.is_contiguous() else self.workspace.take(buffer, kv.device, kv.shape).copy_(kv)
            for kv, buffer in zip((x.k, x.v), buffers.own, strict=True)
        ]
        received, works = list(own), []
        for step, successor in zip(steps, [*steps[1:], None], strict=True):
            if step.index and not self.ring_overlap:
                received, works = self._borrow(step, own, buffers)
            for work in works:
                work.wait()
            present = received
            if successor is not None and self.ring_overlap:
                received, works = self._borrow(successor, own, buffers)
            yield step, present
            present.clear()

    def _borrow(
        self, step: RingStep, own: Sequence[Tensor], buffers: RingBuffers
    ) -> tuple[list[Tensor], list[dist.Work]]:
        """Start to receive the keys and values of ``step``, and to send the reader's."""
        received = self._memory(step, step.keys, own[0], buffers)
        lent = [kv[step.lent] for kv in own]
        return received, self.ring.trade(lent, step.reader, received, step.owner)

    def _return(
        self, step: RingStep, gradients: list[Tensor], buffers: RingBuffers
    ) -> "_Returning":
        """Start to send gradients of the step's keys and values home, and to receive one's own.

        With overlap over the keys and values of this step, which are not read again.
        """
        received = self._memory(step, step.lent, gradients[0], buffers)
        works = self.ring.trade(gradients, step.owner, received, step.reader)
        return _Returning(works, received, step.lent)

    def _memory(
        self, step: RingStep, rows: slice, like: Tensor, buffers: RingBuffers
    ) -> list[Tensor]:
        """Memory for ``rows`` of keys and values, or of their gradients: [rows, b, heads, d]."""
        shape = rows.stop - rows.start, *like.shape[1:]
        if not self.ring_overlap:
            with allocating(MemoryCategory.KERNEL):
                return [like.new_empty(shape), like.new_empty(shape)]
        # Three in turn: gradients of the step before, this step, the step after.
        pair = buffers.remote_kv[step.index % 3]
        return [self.workspace.take(buffer, like.device, shape) for buffer in pair]

    def _mask(self, step: RingStep, block_size: int) -> Mask:
        """Causal among a rank's own tokens, else documents only."""
        if self.mask.segments is None:
            return replace(self.mask, causal=step.index == 0)
        positions = []  # of the blocks that the step's queries and keys consist of
        for rank, rows in ((self.ring.rank, step.queries), (step.owner, step.keys)):
            blocks = ring_blocks(rank, self.ring.size, block_size=block_size)
            positions.append(blocks[rows.start // block_size : rows.stop // block_size])
        segments = tuple(documents.blocks(*positions) for documents in self.mask.segments)
        return replace(self.mask, causal=step.index == 0, segments=segments)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge ``part`` into ``out`` [s, b, h, d], and its lse into ``lse`` [b, h, s], in place."""
    # e^lse = e^lse_a + e^lse_b, and out = out_a e^(lse_a - lse) + out_b e^(lse_b - lse). The two
    # weights are sigmoids of lse_a - lse_b and of its negative: they cannot overflow, and sum to 1
    # however often lse has been rounded.
    difference = (lse - part_lse).permute(2, 0, 1).unsqueeze(-1)  # [s, b, h, 1]
    out.mul_(torch.sigmoid(difference)).addcmul_(part, torch.sigmoid(-difference))
    torch.logaddexp(lse, part_lse, out=lse)


@dataclass(frozen=True, slots=True)
class _Returning:
    """Gradients of this rank's keys and values in flight, from the step's reader."""

    works: list[dist.Work] = field(default_factory=list)
    received: list[Tensor] = field(default_factory=list)
    rows: slice | None = None

    def finish(self, dkv: KvAccumulator) -> None:
        """Wait for them and add them."""
        for work in self.works:
            work.wait()
        if self.received:
            dkv.add(*self.received, rows=self.rows)
