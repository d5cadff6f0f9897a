"""PyTorch's flash attention for CPUs."""

import torch
from torch import Tensor
from typing_extensions import override

from megatron_untied.context_parallel.kernels.kernel import AttentionKernel, Platform
from megatron_untied.context_parallel.kernels.split_calls import Call, Limits, query_blocks
from megatron_untied.context_parallel.kernels.tensors import Attended, Qkv, QkvGrads, bhsd, sbhd
from megatron_untied.dtypes import accumulation_dtype


class CpuFlash(AttentionKernel):
    """One operator call per segment, or one per block of queries if a window hides any key.

    The operator has no window: a block passes a band mask of ``block_size`` x (``block_size`` +
    window) elements instead.
    """

    name = "cpu-flash"
    platform = Platform(device_type="cpu", name="tensors on a CPU")
    limits = Limits(dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16))

    def __init__(self, block_size: int = 512):
        super().__init__()
        self.block_size = block_size

    @override
    def _forward(self, x: Qkv, out: Tensor, call: Call) -> Tensor:
        if call.window is None:
            result, lse = _operator(x, call, causal=call.causal)
            out.copy_(result)
            return lse
        lse_parts = []
        for block in query_blocks(len(x.q), call, self.block_size, x.q.device):
            rows, keys = block.queries, block.keys
            block_x = Qkv(x.q[rows], x.k[keys], x.v[keys])
            out[rows], lse = _operator(block_x, call, hidden=block.hidden)
            lse_parts.append(lse)  # [b, h, rows of the block]
        return torch.cat(lse_parts, -1)

    @override
    def _backward(self, d_out: Tensor, x: Qkv, y: Attended, into: QkvGrads, call: Call) -> None:
        if call.window is None:
            gradients = _backward_operator(d_out, x, y, call, causal=call.causal)
            for result, gradient in zip(into, gradients, strict=True):
                result.copy_(gradient)
            return
        sum_dtype = accumulation_dtype(x.k.dtype)
        # Neighboring blocks see some of the same keys, so their gradients are summed.
        dk, dv = torch.zeros_like(x.k, dtype=sum_dtype), torch.zeros_like(x.v, dtype=sum_dtype)
        for block in query_blocks(len(x.q), call, self.block_size, x.q.device):
            rows, keys = block.queries, block.keys
            into.dq[rows], dk_part, dv_part = _backward_operator(
                d_out[rows],
                Qkv(x.q[rows], x.k[keys], x.v[keys]),
                Attended(y.out[rows], y.lse[..., rows]),
                call,
                hidden=block.hidden,
            )
            dk[keys] += dk_part
            dv[keys] += dv_part
        into.dk.copy_(dk)  # rounded once, after the sum
        into.dv.copy_(dv)


def _operator(
    x: Qkv, call: Call, *, causal: bool = False, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Out [s_q, b, h, d] and log-sum-exp [b, h, s_q]; ``hidden`` as in a block of queries."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *map(bhsd, x), 0.0, causal, attn_mask=_added_mask(hidden, x.q.dtype), scale=call.scale
    )
    return sbhd(out), lse


def _backward_operator(
    d_out: Tensor,
    x: Qkv,
    y: Attended,
    call: Call,
    *,
    causal: bool = False,
    hidden: Tensor | None = None,
) -> QkvGrads:
    """Gradients dq [s_q, b, h, d] and dk, dv [s_k, b, g, d]."""
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *map(bhsd, (d_out, *x, y.out)),
        y.lse,
        0.0,
        causal,
        attn_mask=_added_mask(hidden, x.q.dtype),
        scale=call.scale,
    )
    return QkvGrads(*map(sbhd, gradients))


def _added_mask(hidden: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as the operator takes it: 0 or -inf, [queries, keys], added to the scores."""
    # A bool mask would be copied to one of these for each call of the operator.
    if hidden is None:
        return None
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
