"""The tensors of attention, in three tuples.

q, out and their gradients are [s_q, b, h, d]; k, v and theirs [s_k, b, g, d]. Only the last
dimension has to be contiguous. h / g query heads share each key-value head.
"""

from typing import NamedTuple

from torch import Tensor


class Qkv(NamedTuple):
    """What attention reads. In self-attention q and k are rotated to their positions."""

    q: Tensor  # [s_q, b, h, d]
    k: Tensor  # [s_k, b, g, d]
    v: Tensor  # [s_k, b, g, d]


class Attended(NamedTuple):
    """The result of attention, which its backward reads beside q, k, v.

    Both are over all keys that a query sees, even if a call holds only some of them.
    """

    out: Tensor  # [s_q, b, h, d]
    lse: Tensor  # [b, h, s_q] log-sum-exp of the scaled scores, in at least fp32


class QkvGrads(NamedTuple):
    """Outputs of backward. ``dq`` may be the memory of dO: every kernel writes it last."""

    dq: Tensor  # [s_q, b, h, d]
    dk: Tensor  # [s_k, b, g, d]
    dv: Tensor  # [s_k, b, g, d]


def bhsd(x: Tensor) -> Tensor:
    """The view that torch's own operators take: [s, b, heads, d] -> [b, heads, s, d]."""
    return x.permute(1, 2, 0, 3)


def sbhd(x: Tensor) -> Tensor:
    """Its inverse: [b, heads, s, d] -> [s, b, heads, d]."""
    return x.permute(2, 0, 1, 3)
