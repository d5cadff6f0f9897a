"""Kernels for GPUs hand their operators the right arguments: on a CPU, with stand-ins.

The stand-ins compute plainly in float64 whatever they are handed, so a wrong argument is a wrong
value. The tolerance is bf16's own precision.
"""

import pytest
import torch

from megatron_untied.context_parallel.kernels import Mask, Segments
from megatron_untied.context_parallel.kernels.cudnn import Cudnn
from megatron_untied.context_parallel.kernels.flash_attention import (
    FlashAttention2,
    FlashAttention3,
    TorchFlash,
)
from tests.context_parallel.kernels import stand_ins
from tests.context_parallel.kernels.test_values import BOUNDS, check

FLASH = {
    "flash-attention-3": lambda: FlashAttention3(stand_ins.Flash3Operators()),
    "flash-attention-2": lambda: FlashAttention2(stand_ins.Flash2Module()),
    "torch-flash": lambda: TorchFlash(stand_ins.TorchOperators()),
}
ALL = FLASH | {"cudnn": lambda: Cudnn(stand_ins.TorchOperators())}


@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=False)])
def test_whole_sequences(kernel, mask):
    check(ALL[kernel](), mask, 17, 17, d=16, dtype=torch.bfloat16)


@pytest.mark.parametrize("kernel", FLASH)
@pytest.mark.parametrize("window", [1, 5, 100])
def test_windows(kernel, window):
    check(FLASH[kernel](), Mask(window=window), 17, 17, d=16, dtype=torch.bfloat16)


@pytest.mark.parametrize("kernel", FLASH)
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("window", [None, 2])
def test_documents_of_each_sample(kernel, bounds, window):
    mask = Mask(window=window, segments=tuple(map(Segments.of, bounds)))
    check(FLASH[kernel](), mask, 39, 39, d=16, dtype=torch.bfloat16)


@pytest.mark.parametrize("kernel", FLASH)
def test_segments_without_queries_or_without_keys_never_reach_the_operator(kernel):
    segments = Segments(queries=(0, 3, 7, 12, 14, 14, 20), keys=(0, 0, 4, 9, 11, 12, 18))
    check(FLASH[kernel](), Mask(causal=False, segments=(segments,)), 20, 18, b=1, d=16,
          dtype=torch.bfloat16)  # fmt: skip
