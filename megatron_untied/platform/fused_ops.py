"""What CUDA does in one kernel and a CPU in several: one operation on a CPU too.

An operation of its own allocates its results and nothing that anybody else sees. So a step on a
CPU, or traced with fake tensors, has the tensors that it has on CUDA, and no others.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_untied.dtypes import accumulation_dtype, widened


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; keeps x and 1/sqrt.

    As CUDA's fused kernel: arithmetic and the sum over tokens in at least fp32, results rounded
    once.
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
    d_weight = (wide * normalized).flatten(0, -2).sum(0)
    d_normalized = wide * widened(weight)
    along = (d_normalized * normalized).mean(-1, keepdim=True)
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
    # Not a view or alias of an operand, whatever the dtypes.
    return (a @ b).to(dtype)


@product.register_fake
def _(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


@torch.library.custom_op("megatron_untied::add_product_", mutates_args=("total",))
def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b`` with the operands widened to total's dtype."""
    total.addmm_(a.to(total.dtype), b.to(total.dtype))
