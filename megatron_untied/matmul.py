"""Matrix products of bf16 operands with an fp32 result: one cuBLAS call, emulated on a CPU."""

import torch
from torch import Tensor

from megatron_untied.dtypes import accumulation_dtype
from megatron_untied.platform import fused_ops


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in the accumulation dtype: [i, k] x [k, j] -> [i, j].

    On a CPU a product of bf16 operands is rounded to bf16 before it is widened, on CUDA it is not.
    """
    dtype = accumulation_dtype(a.dtype)
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return fused_ops.product(a, b, dtype)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``total += a @ b`` in total's dtype: [i, k] x [k, j] into [i, j], which is returned.

    cuBLAS adds a product of bf16 operands to an fp32 total without a temporary of total's size. On
    a CPU the operands are widened: the same sum up to fp32 rounding.
    """
    if total.is_cuda and total.dtype != a.dtype:
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    fused_ops.add_product_(total, a, b)
    return total
