"""RMSNorm and LayerNorm for megatron-core's norm slots, on torch's own functions.

Megatron-core's torch norm refuses sequence parallelism, its others need transformer-engine or
apex. These run anywhere, with one kernel each way.

Statistics, arithmetic and the sums over tokens in the weights' gradients are fp32 for a bf16 input;
results are rounded once. What autograd keeps of a bf16 input of H bytes, besides 4 to 8 bytes a
token of statistics: RMSNorm the input itself (0 H more), LayerNorm one fp32 copy (2 H).
In a streamed layer H is that of one tile.
"""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

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
        # In bf16 the backward of the CPU kernel adds tokens up in bf16: at 8192 tokens the bias
        # gradient is off by a quarter.
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = self.weight.to(wide), self.bias.to(wide)
        y = functional.layer_norm(x.to(wide), weight.shape, weight, bias, self.eps)
        return y.to(x.dtype)


def deferred(norm: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """``norm`` for a slot whose caller is to hand its input through, to normalize it later.

    Fills the slot of megatron-core's final norm: the loss calls ``normalize`` on a chunk of tokens
    at a time, so that the normalized hidden states never exist at once.
    """

    class Deferred:
        def __new__(cls, **arguments: Any) -> torch.nn.Module:
            built = norm(**arguments)  # transformer-engine's decides its class by the config
            built.__class__ = type(type(built).__name__, (_HandsThrough, type(built)), {})
            return built

    return Deferred


class _HandsThrough:
    def forward(self, x: Tensor) -> Tensor:
        return x

    def normalize(self, x: Tensor) -> Tensor:
        return super().forward(x)


def _parameter(value: Tensor, config: TransformerConfig) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(value)
    # Under sequence parallelism a rank sees its tokens only; megatron-core's finalize_model_grads
    # sums the gradients so marked over the tensor-parallel ranks.
    parameter.sequence_parallel = config.sequence_parallel
    return parameter
