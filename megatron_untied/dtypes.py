"""The dtype that sums over tokens, heads or ranks are held in; checksums of any dtype's bits."""

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums of ``dtype`` values: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def widened(x: Tensor) -> Tensor:
    """``x`` in its accumulation dtype, same shape; ``x`` itself if it is wide enough."""
    return x.to(accumulation_dtype(x.dtype))


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PART = 2**20  # elements; far below what a sum of int32 in int64 can hold
CHECKSUM_FACTOR = 1_000_003
"""Between the checksums of parts, which are a polynomial in it: their order counts."""


def bit_checksum(x: Tensor) -> Tensor:
    """A checksum of the bits of ``x``: int64 [], on its device, without a copy if contiguous.

    One flipped bit always changes it. Equal values with other bits count as different: 0.0, -0.0.
    """
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in x.detach().reshape(-1).view(_INTEGERS[x.element_size()]).split(_PART):
        # int64 wraps around, which loses nothing that a checksum needs.
        total = total * CHECKSUM_FACTOR + part.sum(dtype=torch.int64)
    return total
