"""The only place that knows attention kernels: one contract, one class a kernel.

q, out and their gradients are [s_q, b, heads, d], k and v and theirs [s_k, b, kv heads, d], any
strides with the last dimension contiguous; heads / kv heads query heads share each key-value head.
The log-sum-exp is [b, heads, s_q] in fp32 (float64 for float64 inputs). Results are written into
buffers that the caller gives.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """Which keys a query sees."""

    causal: bool = True
    """Only keys at its own position and before; needs s_q == s_k."""


class AttentionKernel(Protocol):
    """Exact softmax attention."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, mask: Mask, scale: float
    ) -> Tensor:
        """Write softmax(scale q k^T) v into ``out``; returns the log-sum-exp."""

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
        """Write the gradients into ``dq``, ``dk``, ``dv``."""


class CpuFlash:
    """PyTorch's flash attention for CPUs."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, mask: Mask, scale: float
    ) -> Tensor:
        """See :class:`AttentionKernel`."""
        result, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *map(_bhsd, (q, k, v)), 0.0, mask.causal, scale=scale
        )
        out.copy_(result.permute(2, 0, 1, 3))
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
        """See :class:`AttentionKernel`."""
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(_bhsd, (d_out, q, k, v, out)), lse, 0.0, mask.causal, scale=scale
        )
        for result, gradient in zip((dq, dk, dv), gradients, strict=True):
            result.copy_(gradient.permute(2, 0, 1, 3))


def _bhsd(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)  # [s, b, heads, d] -> [b, heads, s, d]
