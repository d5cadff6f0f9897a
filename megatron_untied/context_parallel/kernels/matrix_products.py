"""Attention in plain matrix products: the reference that runs on every device."""

import torch
from torch import Tensor
from typing_extensions import override

from megatron_untied.context_parallel.kernels.kernel import AttentionKernel
from megatron_untied.context_parallel.kernels.split_calls import (
    Call,
    Limits,
    QueryBlock,
    query_blocks,
)
from megatron_untied.context_parallel.kernels.tensors import Attended, Qkv, QkvGrads
from megatron_untied.dtypes import widened


class MatrixProducts(AttentionKernel):
    """Scores of a block of queries at a time, in fp32 or, for float64 inputs, in float64.

    They are ``block_size`` x keys elements per head: practical for a few thousand tokens.
    """

    name = "matrix-products"
    limits = Limits(
        dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
        materializes_scores=True,
    )

    def __init__(self, block_size: int = 128):
        super().__init__()
        self.block_size = block_size

    @override
    def _forward(self, x: Qkv, out: Tensor, call: Call) -> Tensor:
        k, v = map(widened, (x.k, x.v))
        lse_parts = []
        for block in query_blocks(len(x.q), call, self.block_size, x.q.device):
            rows, keys = block.queries, block.keys
            scores = _scores(x.q[rows], k[keys], block, call.scale)
            lse = scores.logsumexp(-1)  # [b, g, h/g, queries]
            weights = scores.sub_(lse[..., None]).exp_()  # in place: the largest tensor here
            out[rows] = torch.einsum("bgrqk,kbgd->qbgrd", weights, v[keys]).flatten(2, 3)
            lse_parts.append(lse.flatten(1, 2))
        return torch.cat(lse_parts, -1)

    @override
    def _backward(self, d_out: Tensor, x: Qkv, y: Attended, into: QkvGrads, call: Call) -> None:
        k, v = map(widened, (x.k, x.v))
        dk, dv, g = torch.zeros_like(k), torch.zeros_like(v), k.shape[2]
        for block in query_blocks(len(x.q), call, self.block_size, x.q.device):
            rows, keys = block.queries, block.keys
            q, do, o = (widened(z[rows]).unflatten(2, (g, -1)) for z in (x.q, d_out, y.out))
            lse = y.lse[..., rows].unflatten(1, (g, -1))  # [b, g, h/g, queries]
            weights = _scores(x.q[rows], k[keys], block, call.scale).sub_(lse[..., None]).exp_()
            row_sums = (do * o).sum(-1).permute(1, 2, 3, 0)  # [b, g, h/g, queries]
            d_weights = torch.einsum("qbgrd,kbgd->bgrqk", do, v[keys])
            # Softmax: dS = P * (dP - rowsum(dO * O)), where the row sum is over d.
            d_scores = d_weights.sub_(row_sums[..., None]).mul_(weights).mul_(call.scale)
            dk[keys] += torch.einsum("bgrqk,qbgrd->kbgd", d_scores, q)
            dv[keys] += torch.einsum("bgrqk,qbgrd->kbgd", weights, do)
            # Last: dq may be the memory of dO, whose rows no later block reads.
            into.dq[rows] = torch.einsum("bgrqk,kbgd->qbgrd", d_scores, k[keys]).flatten(2, 3)
        into.dk.copy_(dk)
        into.dv.copy_(dv)


def _scores(q: Tensor, k: Tensor, block: QueryBlock, scale: float) -> Tensor:
    """[queries, b, h, d], [keys, b, g, d] -> [b, g, h/g, queries, keys]; -inf where hidden."""
    # The heads that share a key-value head side by side: k is not repeated for them.
    grouped = widened(q).unflatten(2, (k.shape[2], -1))  # [queries, b, g, h/g, d]
    scores = torch.einsum("qbgrd,kbgd->bgrqk", grouped, k).mul_(scale)
    return scores if block.hidden is None else scores.masked_fill_(block.hidden, -torch.inf)
