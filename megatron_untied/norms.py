"""RMSNorm and LayerNorm for megatron-core's norm slots, on torch's own functions.

Megatron-core's torch norm refuses sequence parallelism, its others need transformer-engine or
apex. These run on any machine, with one kernel forward and one backward on CUDA.

Statistics, arithmetic and the sums over tokens in the weights' gradients are fp32 for a bf16 input;
results are rounded once. For backward RMSNorm saves its input, LayerNorm an fp32 copy of it (twice
the bytes of a bf16 input), both 4 to 8 bytes of statistics per token. A streamed layer pays that
for one tile at a time.
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from megatron_untied.dtypes import widened
from megatron_untied.platform import fused_ops


class RMSNorm(torch.nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, same shape and dtype."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = _parameter(torch.ones(hidden_size, dtype=config.params_dtype), config)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> [..., hidden_size]."""
        if x.is_cuda:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return fused_ops.rms_norm(x, self.weight, self.eps)


class LayerNorm(torch.nn.Module):
    """Mean 0, variance 1 over the last dimension, times ``weight``, plus ``bias``."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = _parameter(torch.ones(hidden_size, dtype=config.params_dtype), config)
        self.bias = _parameter(torch.zeros(hidden_size, dtype=config.params_dtype), config)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> [..., hidden_size]."""
        # In bf16 the backward of the CPU kernel sums tokens in bf16: at 8192 tokens the bias
        # gradient is off by a quarter.
        weight, bias = widened(self.weight), widened(self.bias)
        y = functional.layer_norm(widened(x), weight.shape, weight, bias, self.eps)
        return y.to(x.dtype)


def _parameter(value: Tensor, config: TransformerConfig) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(value)
    # Under sequence parallelism each rank has the gradient of its own tokens only. Megatron-core's
    # finalize_model_grads sums gradients with this mark over the tensor-parallel ranks.
    parameter.sequence_parallel = config.sequence_parallel
    return parameter
