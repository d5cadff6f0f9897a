"""cuDNN's attention, through PyTorch."""

from typing import Any

import torch
from torch import Tensor

from megatron_untied.context_parallel.kernels.cut import Call, Limits
from megatron_untied.context_parallel.kernels.kernel import (
    AttentionKernel,
    BackwardTensors,
    ForwardTensors,
)


class Cudnn(AttentionKernel):
    """Whole sequences only. It makes its results itself: one copy of each."""

    name = "cudnn"
    limits = Limits(
        dtypes=(torch.bfloat16, torch.float16),
        head_width_multiple=8,
        max_head_width=128,
        alignment_bytes=16,
        windows=False,
        documents=False,  # each length would be compiled anew
        indexes_calls_in_32_bits=True,  # nothing is promised above
    )

    def __init__(self, operators: Any = None):
        """``operators`` stands in for ``torch.ops.aten``."""
        super().__init__()
        self.operators = operators or torch.ops.aten

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """See :class:`.AttentionKernel`."""
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
            return "an Ampere or newer GPU"
        return None if torch.backends.cudnn.is_available() else "cuDNN"

    def _forward(self, x: ForwardTensors, call: Call, scale: float) -> Tensor:
        out, lse, *_ = self.operators._scaled_dot_product_cudnn_attention(
            *map(_bhsd, (x.q, x.k, x.v)), None, True, 0.0, call.causal, False, scale=scale
        )
        x.out.copy_(_sbhd(out))
        return lse.view(lse.shape[:3])  # it has a fourth dimension of 1

    def _backward(self, x: BackwardTensors, call: Call, scale: float) -> None:
        no_dropout = (torch.zeros((), dtype=torch.int64, device=x.q.device) for _ in range(2))
        gradients = self.operators._scaled_dot_product_cudnn_attention_backward(
            *map(_bhsd, (x.d_out, x.q, x.k, x.v, x.out)),
            x.lse[..., None],
            *no_dropout,
            None,  # attention bias
            None,  # cumulative lengths
            None,
            len(x.q),
            len(x.k),
            0.0,
            call.causal,
            scale=scale,
        )
        for result, gradient in zip((x.dq, x.dk, x.dv), gradients, strict=True):
            result.copy_(_sbhd(gradient))


def _bhsd(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)  # [s, b, heads, d] -> [b, heads, s, d]


def _sbhd(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1, 3)  # [b, heads, s, d] -> [s, b, heads, d]
