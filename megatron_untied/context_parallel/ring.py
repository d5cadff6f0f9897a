"""Attention over a sequence that a ring of ranks shares.

A rank holds two blocks of the sequence, an early and a late one (:mod:`.sequence`), of the heads
in use. In step t it borrows keys and values from the rank t places before it in the ring:

* step 0, its own: causal over [early; late] in one call, as all of early comes before all of late;
* of a rank earlier in the sequence: all its queries see that rank's early block whole, none sees
  the late one;
* of a rank later in the sequence: its late queries see both blocks whole, its early ones nothing.

So every step but the first is block x 2 block pairs on every rank, without a mask. Parts of the
output meet by their log-sum-exps. In backward a step ends with the gradients of what was borrowed
on their way back to its owner, who sums them.

Blocks come from their owner instead of being relayed from neighbor to neighbor. A relayed block
travels whole, while a rank later in the sequence needs half of it: 3/4 of the bytes. Gradients
that are summed on their way travel in fp32 and one hop more; sent straight home they are in the
dtype the kernel made them in, and summed in fp32 there: less than 3/8 of the bytes.

Buffers besides those of :mod:`.ulysses`, in bf16 chunks of q and of k: 2 q for the fp32 sum of out
or of dq; 2 k in a ring of 2, 4 k in one of 3, 6 k in a longer one for what is borrowed; and in
backward, from a ring of 3 on, 2 k for the dk and dv on their way. The sums of dk and dv, those of
:mod:`.kv_gradients`, are always fp32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from megatron_untied.context_parallel.buffer_plan import Buffer, RingBuffers
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
from megatron_untied.step_progress import StepProgress


@dataclass(frozen=True, kw_only=True, slots=True)
class RingStep:
    """What one rank does in one step, in rows of its own or another rank's [early; late]."""

    index: int
    owner: int
    """Whose keys it sees: the rank ``index`` places before it."""
    queries: slice
    """Those of its own rows that see them."""
    keys: slice
    """The owner's rows that they see."""
    reader: int
    """Who sees its keys: the rank ``index`` places after it."""
    lent: slice
    """Those of its own rows that the reader sees."""


def ring_steps(rank: int, num_ring: int, block_size: int) -> list[RingStep]:
    """The steps of a rank, its own keys first."""
    steps = []
    for index in range(num_ring):
        owner, reader = (rank - index) % num_ring, (rank + index) % num_ring
        queries, keys = _visible(rank, owner, block_size)
        _, lent = _visible(reader, rank, block_size)
        steps.append(
            RingStep(index=index, owner=owner, queries=queries, keys=keys, reader=reader, lent=lent)
        )
    return steps


def _visible(reader: int, owner: int, block_size: int) -> tuple[slice, slice]:
    """Rows of the reader's queries and of the owner's keys between which anything is visible."""
    early, late = slice(0, block_size), slice(block_size, 2 * block_size)
    both = slice(0, 2 * block_size)
    if owner == reader:
        return both, both
    return (both, early) if owner < reader else (late, both)


class Ring:
    """A process group whose ranks trade with each other in pairs."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.size, self.rank = group.size(), group.rank()
        self.counter = ExchangeCounter()

    def trade(
        self, send: Sequence[Tensor], to: int, receive: Sequence[Tensor], source: int
    ) -> list[dist.Work]:
        """Send to rank ``to`` and receive from rank ``source``; collective over the group.

        ``receive`` may be read and ``send`` written once the returned works were waited for.
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
    ):
        """``mask`` is that of the whole sequence, causal and without a window.

        ``progress`` is given every step of the ring.
        """
        self.kernel, self.mask, self.ring, self.workspace = kernel, mask, ring, workspace
        self.num_ring = ring.size
        self.progress = progress or StepProgress()

    @override
    def forward(self, x: Qkv, *, out: Tensor) -> Tensor:
        buffers, (s, b, h, _) = self._buffers(x), out.shape
        total = self._take(buffers.total, out).zero_()  # fp32 [s/r, b, h, d]
        total_lse = total.new_full((b, h, s), -torch.inf)
        for step, k, v in self._borrowed(x, buffers):
            rows = step.queries
            lse = self.kernel.forward(
                Qkv(x.q[rows], k, v), out=out[rows], mask=self._mask(step, s // 2)
            )
            self.progress.kernel_call_completed()
            merge(total[rows], total_lse[..., rows], out[rows], lse)
        out.copy_(total)
        return total_lse

    @override
    def backward(
        self, d_out: Tensor, x: Qkv, y: Attended, *, dq: Tensor, dkv: KvAccumulator
    ) -> None:
        buffers, returning = self._buffers(x), _Returning()
        total = self._take(buffers.total, dq).zero_()  # fp32 [s/r, b, h, d]
        for step, k, v in self._borrowed(x, buffers):
            # The step before still sends what it wrote to the other pair, except for step 0.
            dk, dv = (each[: len(k)] for each in dkv.scratch(max(step.index - 1, 0) % 2))
            rows = step.queries
            self.kernel.backward(
                d_out[rows],
                Qkv(x.q[rows], k, v),
                Attended(y.out[rows], y.lse[..., rows]),
                into=QkvGrads(dq[rows], dk, dv),
                mask=self._mask(step, len(x.q) // 2),
            )
            self.progress.kernel_call_completed()
            total[rows].add_(dq[rows])
            returning.finish(dkv)
            if step.index == 0:
                dkv.add(dk, dv)
            else:
                # What comes back arrives where the keys and values of this step were, which
                # nothing reads any more.
                arriving = [each[step.lent] for each in self._room(buffers, step, x.k)]
                works = self.ring.trade([dk, dv], step.owner, arriving, step.reader)
                returning = _Returning(works, arriving, step.lent)
        returning.finish(dkv)
        dq.copy_(total)

    def _borrowed(self, x: Qkv, buffers: RingBuffers) -> Iterator[tuple[RingStep, Tensor, Tensor]]:
        """Each step with the keys and values that it sees; those of the next are on their way."""
        steps = ring_steps(self.ring.rank, self.ring.size, len(x.k) // 2)
        own = [
            each if each.is_contiguous() else self._take(buffer, each).copy_(each)
            for each, buffer in zip((x.k, x.v), buffers.own, strict=True)
        ]
        arriving, works = own, []
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            _wait(works)
            present = arriving
            if following is not None:
                lent = [each[following.lent] for each in own]
                arriving = [each[following.keys] for each in self._room(buffers, following, x.k)]
                works = self.ring.trade(lent, following.reader, arriving, following.owner)
            yield step, *present

    def _buffers(self, x: Qkv) -> RingBuffers:
        return RingBuffers.plan(x.q.shape, x.k.shape, x.q.dtype)

    def _room(self, buffers: RingBuffers, step: RingStep, like: Tensor) -> list[Tensor]:
        """Where keys and values of a step arrive, and gradients after it: [s/r, b, heads, d]."""
        return [self._take(each, like) for each in buffers.borrowed[step.index % 3]]

    def _take(self, buffer: Buffer, like: Tensor) -> Tensor:
        return self.workspace.take(buffer, like.device).view(like.shape)

    def _mask(self, step: RingStep, block_size: int) -> Mask:
        """No mask but its documents, except among a rank's own tokens."""
        queries = self._tokens(self.ring.rank, step.queries, block_size)
        keys = self._tokens(step.owner, step.keys, block_size)
        documents = self.mask.segments
        segments = documents and tuple(each.blocks(queries, keys) for each in documents)
        return replace(self.mask, causal=step.index == 0, segments=segments)

    def _tokens(self, rank: int, rows: slice, block_size: int) -> tuple[range, ...]:
        """Positions in the sequence of some rows of a rank's [early; late]."""
        blocks = ring_blocks(rank, self.ring.size, block_size=block_size)
        return blocks[rows.start // block_size : rows.stop // block_size]


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Turn ``out`` [s, b, h, d] and ``lse`` [b, h, s] into those of their keys and the part's."""
    # e^lse = e^lse_a + e^lse_b, and out = out_a e^(lse_a - lse) + out_b e^(lse_b - lse). The two
    # weights are sigmoids of lse_a - lse_b and of its negative: they cannot overflow, and sum to 1
    # however often lse has been rounded.
    difference = (lse - part_lse).permute(2, 0, 1).unsqueeze(-1)  # [s, b, h, 1]
    out.mul_(torch.sigmoid(difference)).addcmul_(part, torch.sigmoid(-difference))
    torch.logaddexp(lse, part_lse, out=lse)


@dataclass(frozen=True, slots=True)
class _Returning:
    """Gradients of this rank's keys and values on their way home."""

    works: list[dist.Work] = field(default_factory=list)
    arriving: list[Tensor] = field(default_factory=list)
    rows: slice | None = None

    def finish(self, dkv: KvAccumulator) -> None:
        """Add them, once they are here."""
        _wait(self.works)
        if self.arriving:
            dkv.add(*self.arriving, rows=self.rows)


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
