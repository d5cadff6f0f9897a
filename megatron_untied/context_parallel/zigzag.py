"""Attention over the whole sequence where it arrives in Megatron-LM's order.

Megatron-LM cuts the sequence into 2p blocks; rank r of p owns blocks r and 2p-1-r. After the head
exchange a rank holds the shards one after the other: blocks 0, 2p-1, 1, 2p-2, and so on. A causal
kernel wants them in the order of their positions.
"""

from torch import Tensor

from megatron_untied.context_parallel.kernels import AttentionKernel, Mask
from megatron_untied.context_parallel.workspace import Workspace


def megatron_blocks(num_ranks: int) -> list[int]:
    """Blocks of the sequence in the order in which the ranks' shards bring them."""
    return [block for rank in range(num_ranks) for block in (rank, 2 * num_ranks - 1 - rank)]


class InOrder:
    """A kernel for tensors whose blocks are in Megatron-LM's order.

    Stands in for the :class:`.AttentionKernel` that it calls. What that reads and writes are
    copies in order of position, in the workspace: another q, k, v and out of a chunk in forward,
    and d_out, dq, dk and dv in backward. Log-sum-exps stay in order of position.
    """

    def __init__(self, kernel: AttentionKernel, num_ranks: int, workspace: Workspace):
        self.kernel, self.workspace = kernel, workspace
        self.name, self.counter = kernel.name, kernel.counter
        self.blocks = megatron_blocks(num_ranks)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, mask: Mask, scale: float
    ) -> Tensor:
        """See :meth:`.AttentionKernel.forward`."""
        its_out = self._like("out", out)
        lse = self.kernel.forward(
            *self._in_order(q=q, k=k, v=v), out=its_out, mask=mask, scale=scale
        )
        self._put_back(its_out, out)
        return lse

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
        dk: Tensor,
        dv: Tensor,
        mask: Mask,
        scale: float,
    ) -> None:
        """See :meth:`.AttentionKernel.backward`."""
        reads = self._in_order(d_out=d_out, q=q, k=k, v=v, out=out)
        writes = {"dq": dq, "dk": dk, "dv": dv}
        its = {name: self._like(name, x) for name, x in writes.items()}
        self.kernel.backward(*reads, lse, **its, mask=mask, scale=scale)
        for name, x in writes.items():
            self._put_back(its[name], x)

    def _in_order(self, **tensors: Tensor) -> list[Tensor]:
        copies = []
        for name, x in tensors.items():
            its = self._like(name, x)
            for place, arrived in self._pairs(its, x):
                place.copy_(arrived)
            copies.append(its)
        return copies

    def _put_back(self, its: Tensor, x: Tensor) -> None:
        for place, arrived in self._pairs(its, x):
            arrived.copy_(place)

    def _pairs(self, its: Tensor, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each block of ``its`` with the same block of ``x``."""
        in_order = its.chunk(len(self.blocks))
        arrived = x.chunk(len(self.blocks))
        return [(in_order[block], part) for block, part in zip(self.blocks, arrived, strict=True)]

    def _like(self, name: str, x: Tensor) -> Tensor:
        return self.workspace.take(f"in_order_{name}", *x.shape, like=x)
