"""Operations that are one kernel on CUDA and several on a CPU, as one custom op on the CPU.

To callers, autograd and fake tensors a custom op allocates its results and nothing else. So a step
on a CPU, or traced with fake tensors, has exactly the tensors that it has on CUDA.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_untied.dtypes import accumulation_dtype, widened


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension: [..., m] -> [..., m].

    Saves x and 1/sqrt for backward. As in CUDA's fused kernel, arithmetic and the sum over tokens
    are at least fp32, and results are rounded once.
    """
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = _rms_norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        return *_rms_norm_backward(gradient, *ctx.saved_tensors), None


@torch.library.custom_op("megatron_untied::rms_norm_forward", mutates_args=())
def _rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = widened(x)
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()  # [..., 1]
    return (wide * scale * widened(weight)).to(x.dtype), scale


@_rms_norm_forward.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(x.dtype)
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=dtype)


@torch.library.custom_op("megatron_untied::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    normalized, wide = widened(x) * scale, widened(gradient)
    d_weight = (wide * normalized).flatten(0, -2).sum(0)  # [..., m] -> [tokens, m] -> [m]
    d_normalized = wide * widened(weight)
    # The norm ignores the length of x: remove the gradient's component along x.
    along = (d_normalized * normalized).mean(-1, keepdim=True)  # [..., 1]
    dx = (d_normalized - normalized * along) * scale
    return dx.to(x.dtype), d_weight.to(weight.dtype)


@_rms_norm_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@torch.library.custom_op("megatron_untied::product", mutates_args=())
def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b``, rounded to their dtype and then widened to ``dtype``: [i, k] x [k, j] -> [i, j].

    Widening the operands would be exact and ten times slower.
    """
    # A custom op may not return a view or alias of an operand: a product is neither.
    return (a @ b).to(dtype)


@product.register_fake
def _(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


@torch.library.custom_op("megatron_untied::add_product_", mutates_args=("total",))
def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b`` with the operands widened to total's dtype."""
    total.addmm_(a.to(total.dtype), b.to(total.dtype))
