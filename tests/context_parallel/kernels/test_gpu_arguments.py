"""Kernels for GPUs hand their operators the right arguments: on a CPU, with stand-ins.

The stand-ins compute plainly in float64 whatever they are handed, so a wrong argument is a wrong
value. The tolerance is bf16's own precision.
"""

import ast
import inspect

import pytest
import torch
from torch.nn.attention import _fa4

from megatron_untied.context_parallel.kernels import Mask, Segments
from megatron_untied.context_parallel.kernels.cudnn import Cudnn
from megatron_untied.context_parallel.kernels.flash_attention import (
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
    TorchFlash,
)
from tests.context_parallel.kernels import stand_ins
from tests.context_parallel.kernels.test_values import BOUNDS, check

FLASH = {
    "flash-attention-4": lambda: FlashAttention4(stand_ins.Flash4Module()),
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


def test_flash_attention_4_is_called_with_the_arguments_that_torch_calls_it_with():
    """Torch registers it too: what torch passes by name is what its interface has to keep."""
    functions = {
        "_flash_attn_fwd": _fa4._fa4_run_forward,
        "_flash_attn_bwd": _fa4._fa4_run_backward,
    }
    for name, function in functions.items():
        passed = set()
        for node in ast.walk(ast.parse(inspect.getsource(function))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == name:
                passed |= {keyword.arg for keyword in node.keywords if keyword.arg}
            if isinstance(node, ast.Dict):
                passed |= {key.value for key in node.keys}
        stand_in = inspect.signature(getattr(stand_ins.Flash4Module, name))
        named = {p.name for p in stand_in.parameters.values() if p.kind is p.KEYWORD_ONLY}
        assert named
        assert named <= passed
