"""Attention on a whole sequence whose blocks are in Megatron-LM's zigzag order.

Megatron-LM splits the sequence into 2p blocks; rank i of p owns blocks i and 2p-1-i. After the head
exchange a rank holds the shards one after the other: blocks 0, 2p-1, 1, 2p-2, and so on. A causal
kernel needs them in the order of their positions.
"""

from torch import Tensor
from typing_extensions import override

from megatron_untied.context_parallel.buffer_plan import Buffer, ReorderBuffers
from megatron_untied.context_parallel.kernels import (
    Attended,
    AttentionKernel,
    Mask,
    Qkv,
    QkvGrads,
)
from megatron_untied.context_parallel.workspace import Workspace


def megatron_blocks(num_ranks: int) -> list[int]:
    """Blocks of the sequence in the order of the ranks' shards: 0, 2p-1, 1, 2p-2, ..."""
    return [block for rank in range(num_ranks) for block in (rank, 2 * num_ranks - 1 - rank)]


class ZigzagReorder:
    """A kernel for tensors whose blocks are in Megatron-LM's order.

    Wraps an :class:`.AttentionKernel`, which reads and writes copies in order of position. They
    cost a second q, k, v and out of a chunk in forward, and also d_out, dq, dk and dv in backward,
    all in the workspace. Log-sum-exps stay in order of position.
    """

    def __init__(self, kernel: AttentionKernel, num_ranks: int, workspace: Workspace):
        self.kernel, self.workspace = kernel, workspace
        self.name, self.counter = kernel.name, kernel.counter
        self.blocks = megatron_blocks(num_ranks)

    @override
    def forward(self, x: Qkv, *, out: Tensor, mask: Mask) -> Tensor:
        # Named buffers of the workspace: every chunk and layer takes the same memory again.
        buffers = ReorderBuffers.plan(x.q.shape, x.k.shape, x.q.dtype)
        ordered_out = self._take(buffers.out, out)
        ordered = Qkv(*map(self._gather, buffers.qkv, x))
        lse = self.kernel.forward(ordered, out=ordered_out, mask=mask)
        self._scatter(ordered_out, out)
        return lse

    @override
    def backward(self, d_out: Tensor, x: Qkv, y: Attended, *, into: QkvGrads, mask: Mask) -> None:
        buffers = ReorderBuffers.plan(x.q.shape, x.k.shape, x.q.dtype)
        # Not gathered: the kernel writes all of them.
        grads = QkvGrads(*map(self._take, buffers.grads, into))
        self.kernel.backward(
            self._gather(buffers.d_out, d_out),
            Qkv(*map(self._gather, buffers.qkv, x)),
            Attended(self._gather(buffers.out, y.out), y.lse),
            into=grads,
            mask=mask,
        )
        for ordered, arrived in zip(grads, into, strict=True):
            self._scatter(ordered, arrived)

    def _gather(self, buffer: Buffer, x: Tensor) -> Tensor:
        """A copy of ``x`` in order of position."""
        ordered = self._take(buffer, x)
        for block, part in self._pairs(ordered, x):
            block.copy_(part)  # one copy per block: 2p kernels, no index tensor
        return ordered

    def _scatter(self, ordered: Tensor, x: Tensor) -> None:
        """The inverse: into ``x``, in Megatron-LM's order."""
        for block, part in self._pairs(ordered, x):
            part.copy_(block)

    def _pairs(self, ordered: Tensor, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each block of ``ordered`` with the same block of ``x``: views [s/2p, b, heads, d]."""
        by_position = ordered.chunk(len(self.blocks))
        return [
            (by_position[block], part)
            for block, part in zip(self.blocks, x.chunk(len(self.blocks)), strict=True)
        ]

    def _take(self, buffer: Buffer, like: Tensor) -> Tensor:
        return self.workspace.take(buffer, like.device).view(like.shape)
