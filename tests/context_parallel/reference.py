"""Attention and rotation written out plainly, on the whole sequence."""

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [s, b, h, d] with k, v [s, b, g, d]."""
    share = q.shape[2] // k.shape[2]
    q, k, v = (
        x.permute(1, 2, 0, 3)
        for x in (q, k.repeat_interleave(share, 2), v.repeat_interleave(share, 2))
    )
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, float("-inf"))
    return (scores.softmax(-1) @ v).permute(2, 0, 1, 3)


def rotate(x: Tensor, base: float = 10000.0) -> Tensor:
    """[s, b, heads, d] rotated to positions 0 .. s-1."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x)).double()[:, None] * base ** (-torch.arange(half).double() / half)
    cos, sin = (f(angle)[:, None, None].to(x.dtype) for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
