"""What kernels count, and what they allocate when traced with fake tensors."""

import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_untied.context_parallel.kernels import (
    Attended,
    CpuFlash,
    Mask,
    Qkv,
    QkvGrads,
    Segments,
    TracedKernel,
)
from megatron_untied.context_parallel.kernels.cudnn import Cudnn
from megatron_untied.context_parallel.kernels.flash_attention import (
    ALL_HEADS_IN_32_BITS,
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
    TorchFlash,
)
from megatron_untied.context_parallel.kernels.matrix_products import MatrixProducts
from megatron_untied.context_parallel.kernels.split_calls import Shape
from tests.support import plain_attention

DOCUMENTS = (Segments.of((0, 1, 4, 21, 38)), Segments.of((0, 38)))
BLOCKS = Segments(queries=(0, 3, 7, 12), keys=(0, 0, 4, 9)),  # fmt: skip
MASKS = [
    (Mask(), 38, 38, 2),
    (Mask(causal=False), 38, 5, 2),
    (Mask(window=1), 38, 38, 2),
    (Mask(window=7, segments=DOCUMENTS), 38, 38, 2),
    (Mask(window=100, segments=DOCUMENTS), 38, 38, 2),
    (Mask(causal=False, segments=BLOCKS), 12, 9, 1),
]


@pytest.mark.parametrize(("mask", "s_q", "s_k", "b"), MASKS)
def test_pairs_are_those_of_the_mask_matrix(mask, s_q, s_k, b):
    visible = sum(int((~plain_attention.hidden_pairs(mask, i, s_q, s_k)).sum()) for i in range(b))
    assert mask.num_pairs(s_q, s_k, b) == visible


def run(kernel, mask, s, *, b=1, h=4, g=2, d=16, dtype=torch.bfloat16):
    q, out, dq, d_out = (torch.empty(s, b, h, d, dtype=dtype) for _ in range(4))
    k, v, dk, dv = (torch.empty(s, b, g, d, dtype=dtype) for _ in range(4))
    x = Qkv(q, k, v)
    lse = kernel.forward(x, out=out, mask=mask)
    kernel.backward(d_out, x, Attended(out, lse), into=QkvGrads(dq, dk, dv), mask=mask)
    return lse


def traced_flash_3():
    return TracedKernel(FlashAttention3)


@pytest.mark.parametrize("kernel", [CpuFlash, MatrixProducts, traced_flash_3])
def test_calls_and_work_are_counted(kernel):
    kernel = kernel()
    run(kernel, Mask(window=7, segments=DOCUMENTS), 38, b=2)
    run(kernel, Mask(), 38)
    pairs = Mask(window=7, segments=DOCUMENTS).num_pairs(38, 38, 2) + 38 * 39 // 2
    assert (kernel.counter.forward_calls, kernel.counter.backward_calls) == (2, 2)
    # Two products forward, five backward, each of 2 operations a pair, channel and query head.
    assert kernel.counter.flops == 14 * pairs * 4 * 16


@pytest.mark.parametrize("kernel", [CpuFlash, MatrixProducts, traced_flash_3, TorchFlash, Cudnn])
def test_traceable_with_fake_tensors(kernel):
    kernel = kernel()
    masks = [Mask()]
    if kernel.limits.documents:
        masks += [Mask(window=7), Mask(segments=(Segments.of((0, 1, 4, 38)),))]
    with FakeTensorMode():
        for mask in masks:
            assert run(kernel, mask, 38).shape == (1, 4, 38)


class Allocations(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of everything that operators made new."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default):
            self.num_bytes += result.numel() * result.element_size()
        return result


def allocated(mask, s, *, h, g, d, kind=FlashAttention3):
    with FakeTensorMode():
        kernel = TracedKernel(kind)
        q, out = (torch.empty(s, 1, h, d, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.empty(s, 1, g, d, dtype=torch.bfloat16) for _ in range(2))
        with Allocations() as forward:
            lse = kernel.forward(Qkv(q, k, v), out=out, mask=mask)
        with Allocations() as backward:
            y, into = Attended(out, lse), QkvGrads(q, k, v)
            kernel.backward(out, Qkv(q, k, v), y, into=into, mask=mask)
    return forward.num_bytes, backward.num_bytes


def test_flash_attention_3_allocates_fp32_queries_gradient_and_two_row_sums():
    s = 5 << 20  # a multiple of the kernel's blocks
    assert allocated(Mask(), s, h=1, g=1, d=128) == (4 * s, 4 * s * (128 + 2))


def test_shared_heads_add_fp32_gradients_of_keys_and_values():
    s = 1 << 16
    assert allocated(Mask(), s, h=4, g=2, d=128)[1] == 4 * s * (4 * 130 + 2 * 2 * 128)


def test_rows_and_width_are_rounded_up_to_blocks():
    # 300 rows are 5 blocks of 64 queries and 3 of 128 keys; 80 channels are 96.
    expected = 4 * (320 * 2 * 98 + 2 * 384 * 96)
    assert allocated(Mask(), 300, h=2, g=1, d=80)[1] == expected


def test_segments_add_a_block_each():
    mask = Mask(segments=(Segments.of((0, 100, 228, 256)),))
    rows = 256 + 3 * 64
    assert allocated(mask, 256, h=1, g=1, d=128) == (4 * 256, 4 * rows * 130)


def test_kernels_that_return_tensors_allocate_them():
    """4 query heads, 2 key-value heads, rows that are whole blocks; bytes of bf16 and fp32."""
    s, h, g, d = 1 << 14, 4, 2, 128
    of_q, of_keys, lse = 2 * s * h * d, 2 * s * g * d, 4 * s * h
    sums = 4 * s * h * (1 + d)  # dq, and the row sums of dO x O
    every_head = 2 * of_q  # dk and dv before they are added up
    returned = of_q + 2 * of_keys
    expected = {
        FlashAttention2: (lse + of_q, sums + every_head),
        TorchFlash: (lse, sums + every_head + returned),
        Cudnn: (lse + of_q, sums + every_head + returned),
        FlashAttention4: (lse, sums + 4 * s * h + 2 * 4 * s * g * d + returned),
    }
    for kind, num_bytes in expected.items():
        assert allocated(Mask(), s, h=h, g=g, d=d, kind=kind) == num_bytes, kind


@pytest.mark.parametrize("kind", [FlashAttention4, FlashAttention3, FlashAttention2, TorchFlash,
                                  Cudnn])  # fmt: skip
@pytest.mark.parametrize("limits", [None, ALL_HEADS_IN_32_BITS])
@pytest.mark.parametrize(("b", "num_heads"), [(1, 4), (2, 4), (1, 8)])
def test_the_planner_counts_what_a_call_allocates(kind, limits, b, num_heads):
    """In one call, in calls split by heads and samples, and on part of a chunk's heads."""
    s, h, g, d = (3 << 20) - 77, 4, 2, 128
    with FakeTensorMode():
        kernel = TracedKernel(kind, limits)
        q, out, d_out = (
            torch.empty(s, b, num_heads, d, dtype=torch.bfloat16)[:, :, :h] for _ in range(3)
        )
        k, v = (torch.empty(s, b, g, d, dtype=torch.bfloat16) for _ in range(2))
        live = LargestAtOnce()
        with live:
            lse = kernel.forward(Qkv(q, k, v), out=out, mask=Mask())
        forward, kept = live.largest, lse.nbytes
        live = LargestAtOnce()
        with live:
            kernel.backward(d_out, Qkv(q, k, v), Attended(out, lse),
                            into=QkvGrads(d_out, k, v), mask=Mask())  # fmt: skip
    shape = Shape(num_queries=s, num_keys=s, b=b, h=h, g=g, d=d)
    expected = kernel.most_bytes(shape, 2, num_heads=num_heads)
    assert (forward - kept, live.largest) == expected


class LargestAtOnce(Allocations):
    """Of everything new that was alive at the same time, the largest sum of bytes."""

    def __init__(self):
        super().__init__()
        self.alive = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.num_bytes
        result = super().__torch_dispatch__(func, types, args, kwargs)
        added = self.num_bytes - before
        if func is torch.ops.aten.new_full.default:
            added = result.nbytes
        if added:
            self.alive += added
            weakref.finalize(result, self.freed, added)
        self.largest = max(self.largest, self.alive)
        return result

    def freed(self, num_bytes):
        self.alive -= num_bytes
