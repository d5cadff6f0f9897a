"""The dtype that sums over tokens, heads or ranks are held in."""

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums of ``dtype`` values: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def widened(x: Tensor) -> Tensor:
    """``x`` in its accumulation dtype, same shape; ``x`` itself if it is wide enough."""
    return x.to(accumulation_dtype(x.dtype))
