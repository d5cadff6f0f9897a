"""Attention and rotation written out plainly, on the whole sequence, with a whole mask matrix."""

from itertools import pairwise

import torch
from torch import Tensor

from megatron_untied.context_parallel.kernels import Mask, Segments


def hidden_pairs(mask: Mask, sample: int, num_queries: int, num_keys: int) -> Tensor:
    """Bool [s_q, s_k]: True where a query does not see a key."""
    segments = (
        mask.segments[sample]
        if mask.segments
        else Segments(queries=(0, num_queries), keys=(0, num_keys))
    )
    hidden = torch.ones(num_queries, num_keys, dtype=torch.bool)
    for (q_start, q_stop), (k_start, k_stop) in zip(
        pairwise(segments.queries), pairwise(segments.keys), strict=True
    ):
        distance = torch.arange(q_stop - q_start)[:, None] - torch.arange(k_stop - k_start)
        part = torch.zeros(distance.shape, dtype=torch.bool)
        if mask.causal:
            part |= distance < 0
        if mask.window is not None:
            part |= distance >= mask.window
        hidden[q_start:q_stop, k_start:k_stop] = part
    return hidden


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    """Out [s_q, b, h, d] and log-sum-exp [b, h, s_q]; differentiable."""
    share = q.shape[2] // k.shape[2]
    q, k, v = (
        x.permute(1, 2, 0, 3)
        for x in (q, k.repeat_interleave(share, 2), v.repeat_interleave(share, 2))
    )
    hidden = torch.stack(
        [hidden_pairs(mask, i, q.shape[2], k.shape[2]) for i in range(len(q))]
    ).unsqueeze(1)
    scores = (q @ k.mT * scale).masked_fill(hidden, -torch.inf)
    blind = hidden.all(-1, keepdim=True)  # queries without a key
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return (weights @ v).permute(2, 0, 1, 3), scores.logsumexp(-1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Out [s, b, h, d] of q in that layout and k, v [s, b, g, d]."""
    return attention(q, k, v, Mask(causal=True), q.shape[-1] ** -0.5)[0]


def rotate(x: Tensor, base: float = 10000.0) -> Tensor:
    """[s, b, heads, d] rotated to positions 0 .. s-1."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x)).double()[:, None] * base ** (-torch.arange(half).double() / half)
    cos, sin = (f(angle)[:, None, None].to(x.dtype) for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
