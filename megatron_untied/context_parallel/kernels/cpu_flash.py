"""PyTorch's flash attention for CPUs."""

import torch
from torch import Tensor

from megatron_untied.context_parallel.kernels.cut import Call, Limits
from megatron_untied.context_parallel.kernels.kernel import (
    AttentionKernel,
    BackwardTensors,
    ForwardTensors,
)
from megatron_untied.context_parallel.kernels.query_blocks import query_blocks


class CpuFlash(AttentionKernel):
    """One operator call a segment; where a window hides anything, one a block of queries.

    A block takes a band mask of ``block_size`` x (``block_size`` + window) numbers.
    """

    name = "cpu-flash"
    limits = Limits(dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16))

    def __init__(self, block_size: int = 512):
        super().__init__()
        self.block_size = block_size

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """See :class:`.AttentionKernel`."""
        return None if device.type == "cpu" else "tensors on a CPU"

    def _forward(self, x: ForwardTensors, call: Call, scale: float) -> Tensor:
        if not _hides(call):
            out, lse = _operator(x.q, x.k, x.v, causal=call.causal, scale=scale)
            x.out.copy_(out)
            return lse
        lse_parts = []
        for block in query_blocks(len(x.q), call, self.block_size, x.q.device):
            rows, keys = block.queries, block.keys
            mask = _added(block.hidden, x.q.dtype)
            out, lse = _operator(x.q[rows], x.k[keys], x.v[keys], mask=mask, scale=scale)
            x.out[rows] = out
            lse_parts.append(lse)
        return torch.cat(lse_parts, -1)

    def _backward(self, x: BackwardTensors, call: Call, scale: float) -> None:
        reads, writes = x[:6], x[6:]
        if not _hides(call):
            gradients = _backward_operator(*reads, causal=call.causal, scale=scale)
            for result, gradient in zip(writes, gradients, strict=True):
                result.copy_(gradient)
            return
        sum_dtype = torch.promote_types(x.k.dtype, torch.float32)
        dk, dv = (torch.zeros_like(each, dtype=sum_dtype) for each in (x.k, x.v))
        for block in query_blocks(len(x.q), call, self.block_size, x.q.device):
            rows, keys = block.queries, block.keys
            x.dq[rows], dk_part, dv_part = _backward_operator(
                x.d_out[rows],
                x.q[rows],
                x.k[keys],
                x.v[keys],
                x.out[rows],
                x.lse[..., rows],
                mask=_added(block.hidden, x.q.dtype),
                scale=scale,
            )
            dk[keys] += dk_part
            dv[keys] += dv_part
        x.dk.copy_(dk)
        x.dv.copy_(dv)


def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Out [s_q, b, h, d] and log-sum-exp [b, h, s_q]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *map(_bhsd, (q, k, v)), 0.0, causal, attn_mask=mask, scale=scale
    )
    return _sbhd(out), lse


def _backward_operator(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float,
) -> list[Tensor]:
    """Gradients of q, k and v in their own shapes."""
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *map(_bhsd, (d_out, q, k, v, out)), lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    return list(map(_sbhd, gradients))


def _hides(call: Call) -> bool:
    return call.window is not None and call.window < call.keys.stop - call.keys.start


def _added(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as the operator wants it: 0 or -inf, to be added to the scores."""
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)


def _bhsd(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)  # [s, b, heads, d] -> [b, heads, s, d]


def _sbhd(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3)  # [b, heads, s, d] -> [s, b, heads, d]
