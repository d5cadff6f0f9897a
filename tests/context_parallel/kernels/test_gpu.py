"""The kernels of this machine's GPU against attention with a whole mask matrix, in bf16."""

import pytest
import torch

from megatron_untied.context_parallel.kernels import Mask, Segments
from megatron_untied.context_parallel.kernels.cudnn import Cudnn
from megatron_untied.context_parallel.kernels.flash_attention import (
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
    TorchFlash,
)
from megatron_untied.context_parallel.kernels.matrix_products import MatrixProducts
from tests.context_parallel.kernels.test_values import BOUNDS, check

pytestmark = pytest.mark.gpu
KERNELS = [FlashAttention4, FlashAttention3, FlashAttention2, TorchFlash, Cudnn, MatrixProducts]
MASKS = {
    "causal": Mask(),
    "all keys": Mask(causal=False),
    "window": Mask(window=5),
    **{f"documents {i}": Mask(segments=tuple(map(Segments.of, b))) for i, b in enumerate(BOUNDS)},
    "documents, window": Mask(window=2, segments=tuple(map(Segments.of, BOUNDS[0]))),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("d", [64, 128])
def test_equals_plain_attention(kernel, mask, d):
    missing, mask = kernel.missing(torch.device("cuda", 0)), MASKS[mask]
    if missing:
        pytest.skip(f"needs {missing}")
    limits = kernel.limits
    if (mask.window and not limits.windows) or (mask.segments and not limits.documents):
        pytest.skip("refused")
    check(kernel(), mask, 39, 39, d=d, dtype=torch.bfloat16, device="cuda")
