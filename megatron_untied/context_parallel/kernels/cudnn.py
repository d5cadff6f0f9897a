"""cuDNN's attention, through PyTorch."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron_untied.context_parallel.kernels.kernel import AMPERE, AttentionKernel
from megatron_untied.context_parallel.kernels.split_calls import Call, Limits
from megatron_untied.context_parallel.kernels.tensors import Attended, Qkv, QkvGrads, bhsd, sbhd


class Cudnn(AttentionKernel):
    """Whole sequences only. The operators allocate their results: one copy of each."""

    name = "cudnn"
    platform = AMPERE
    limits = Limits(
        dtypes=(torch.bfloat16, torch.float16),
        head_width_multiple=8,
        max_head_width=128,
        alignment_bytes=16,
        windows=False,
        documents=False,  # cuDNN compiles a plan per length
        # torch's key of a compiled plan has 32-bit strides (aten/src/ATen/native/cudnn/MHA.cpp),
        # and no documentation of larger tensors was found.
        indexes_calls_in_32_bits=True,
    )

    def __init__(self, operators: Any = None):
        """``operators``: by default ``torch.ops.aten``."""
        super().__init__()
        self.operators = operators or torch.ops.aten
        self._no_dropout: dict[torch.device, Tensor] = {}

    @override
    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        if missing := super().missing(device):
            return missing
        return None if torch.backends.cudnn.is_available() else "cuDNN"

    @override
    def _forward(self, x: Qkv, out: Tensor, call: Call) -> Tensor:
        result, lse, *_ = self.operators._scaled_dot_product_cudnn_attention(
            *map(bhsd, x), None, True, 0.0, call.causal, False, scale=call.scale
        )
        out.copy_(sbhd(result))
        return lse.view(lse.shape[:3])  # [b, h, s, 1] -> [b, h, s]

    @override
    def _backward(self, d_out: Tensor, x: Qkv, y: Attended, into: QkvGrads, call: Call) -> None:
        # Seed and offset of dropout, which is 0 here: the operator requires both and writes
        # neither, so one 0 serves all calls.
        device = x.q.device
        if device not in self._no_dropout:
            self._no_dropout[device] = torch.zeros((), dtype=torch.int64, device=device)
        gradients = self.operators._scaled_dot_product_cudnn_attention_backward(
            *map(bhsd, (d_out, *x, y.out)),
            y.lse[..., None],
            self._no_dropout[device],
            self._no_dropout[device],
            None,  # attention bias
            None,  # cumulative lengths
            None,
            len(x.q),
            len(x.k),
            0.0,
            call.causal,
            scale=call.scale,
        )
        for result, gradient in zip(into, gradients, strict=True):
            result.copy_(sbhd(gradient))
