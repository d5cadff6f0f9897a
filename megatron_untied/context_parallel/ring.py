"""Attention over a sequence that a ring of ranks shares.

A rank holds two blocks of the sequence, an early and a late one (:mod:`.layout`), of the heads in
use. In step t it borrows keys and values from the rank t places before it in the ring:

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

Buffers besides those of :mod:`.untied`, in bf16 chunks of q and of k: 2 q for the fp32 sum of out
or of dq; 2 k in a ring of 2, 4 k in one of 3, 6 k in a longer one for what is borrowed; and in
backward, from a ring of 3 on, 2 k for the dk and dv on their way. The sums of dk and dv, those of
:mod:`.key_value_gradients`, are always fp32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_untied.context_parallel.all_to_all import ExchangeCounter
from megatron_untied.context_parallel.kernels import AttentionKernel, Mask, Segments
from megatron_untied.context_parallel.key_value_gradients import GradientTarget
from megatron_untied.context_parallel.layout import ring_blocks
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

        What is returned must be waited for before ``receive`` is read or ``send`` written.
        """
        self.counter.calls += 1
        self.counter.sent_bytes += sum(x.numel() * x.element_size() for x in send)
        operations = [dist.P2POp(dist.isend, x, group=self.group, group_peer=to) for x in send]
        operations += [
            dist.P2POp(dist.irecv, x, group=self.group, group_peer=source) for x in receive
        ]
        return dist.batch_isend_irecv(operations)


class RingAttention:
    """See :class:`.untied.Attend`; k and v are this rank's blocks. Collective over the ring."""

    sums_gradients = True

    def __init__(
        self,
        kernel: AttentionKernel,
        ring: Ring,
        workspace: Workspace,
        *,
        documents: tuple[Segments, ...] | None,
        scale: float,
        progress: StepProgress | None = None,
    ):
        """``documents`` of each sample, over the whole sequence; None is one for each.

        ``progress`` is told of every step of the ring; None is nobody.
        """
        self.kernel, self.ring, self.workspace = kernel, ring, workspace
        self.documents, self.scale = documents, scale
        self.progress = progress or StepProgress()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> Tensor:
        """See :class:`.untied.Attend`."""
        (s, b, h, _), total = q.shape, self._zeros_like(out)
        total_lse = total.new_full((b, h, s), -torch.inf)
        for step, its_k, its_v in self._borrowed(k, v):
            rows, mask = step.queries, self._mask(step, s // 2)
            lse = self.kernel.forward(
                q[rows], its_k, its_v, out=out[rows], mask=mask, scale=self.scale
            )
            self.progress.called()
            merge(total[rows], total_lse[..., rows], out[rows], lse)
        out.copy_(total)
        return total_lse

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
        """See :class:`.untied.Attend`."""
        total, returning = self._zeros_like(dq), _Returning()
        for step, its_k, its_v in self._borrowed(k, v):
            # What the step before made is still being sent, except step 0's.
            free = target.buffers(max(step.index - 1, 0) % 2)
            dk, dv = (x[: len(its_k)] for x in free)
            rows, mask = step.queries, self._mask(step, len(q) // 2)
            reads = d_out[rows], q[rows], its_k, its_v, out[rows], lse[..., rows]
            writes = {"dq": dq[rows], "dk": dk, "dv": dv}
            self.kernel.backward(*reads, **writes, mask=mask, scale=self.scale)
            self.progress.called()
            total[rows].add_(dq[rows])
            returning.finish(target)
            if step.index == 0:
                target.add(dk, dv)
            else:
                returning = self._give_back(step, dk, dv, like=k)
        returning.finish(target)
        dq.copy_(total)

    def _borrowed(self, k: Tensor, v: Tensor) -> Iterator[tuple[RingStep, Tensor, Tensor]]:
        """Each step with the keys and values that it sees; those of the next are on their way."""
        steps = ring_steps(self.ring.rank, self.ring.size, len(k) // 2)
        own = [self._contiguous("own_k", k), self._contiguous("own_v", v)]
        arriving, works = own, []
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            _wait(works)
            present = arriving
            if following is not None:
                lent = [x[following.lent] for x in own]
                arriving = [x[following.keys] for x in self._places(following, k)]
                works = self.ring.trade(lent, following.reader, arriving, following.owner)
            yield step, *present

    def _give_back(self, step: RingStep, dk: Tensor, dv: Tensor, like: Tensor) -> "_Returning":
        """Start sending gradients to their owner, and receiving those of what was lent.

        They arrive where the keys and values of this step were, which nothing reads any more.
        """
        arriving = [x[step.lent] for x in self._places(step, like)]
        works = self.ring.trade([dk, dv], step.owner, arriving, step.reader)
        return _Returning(works, arriving, step.lent)

    def _places(self, step: RingStep, like: Tensor) -> list[Tensor]:
        """Where the keys and values of a step arrive.

        While a step computes, the next one's arrive, and gradients where the last one's were.
        """
        names = (f"ring_{kind}{step.index % 3}" for kind in "kv")
        return [self.workspace.take(name, *like.shape, like=like) for name in names]

    def _contiguous(self, name: str, x: Tensor) -> Tensor:
        if x.is_contiguous():
            return x
        return self.workspace.take(f"ring_{name}", *x.shape, like=x).copy_(x)

    def _zeros_like(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return self.workspace.take("ring_total", *x.shape, like=x, dtype=dtype).zero_()

    def _mask(self, step: RingStep, block_size: int) -> Mask:
        """No mask but its documents, except among a rank's own tokens."""
        queries = self._tokens(self.ring.rank, step.queries, block_size)
        keys = self._tokens(step.owner, step.keys, block_size)
        segments = self.documents and tuple(each.blocks(queries, keys) for each in self.documents)
        return Mask(causal=step.index == 0, segments=segments)

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

    def finish(self, target: GradientTarget) -> None:
        """Add them, once they are here."""
        _wait(self.works)
        if self.arriving:
            target.add(*self.arriving, rows=self.rows)


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
