"""Every kernel that runs here against attention with a whole mask matrix, in float64."""

from dataclasses import replace

import pytest
import torch

from megatron_untied.context_parallel.kernels import (
    Attended,
    CpuFlash,
    Mask,
    Qkv,
    QkvGrads,
    Segments,
)
from megatron_untied.context_parallel.kernels.matrix_products import MatrixProducts
from tests.support import plain_attention

KERNELS = {
    "cpu-flash": CpuFlash,
    "cpu-flash, small blocks": lambda: CpuFlash(block_size=5),
    "matrix-products": MatrixProducts,
    "matrix-products, small blocks": lambda: MatrixProducts(block_size=7),
}
# float64: rounding of a few hundred additions. fp32 and bf16: of the inputs' own precision.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
SCALE = 0.3


def strided(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Random values in a view [rows, b, heads, d] that is contiguous in d only."""
    num_rows, b, heads, d = shape
    wide = torch.randn(num_rows, b + 1, heads + 2, 2 * d, dtype=torch.float64)
    return wide.to(device, dtype)[:, 1:, 1:-1, d:]


def check(kernel, mask, s_q, s_k, *, b=2, h=4, g=2, d=8, dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    mask = replace(mask, scale=SCALE)
    q_shape, k_shape, kind = (s_q, b, h, d), (s_k, b, g, d), {"dtype": dtype, "device": device}
    q, d_out, out, dq = (strided(*q_shape, **kind) for _ in range(4))
    k, v, dk, dv = (strided(*k_shape, **kind) for _ in range(4))
    leaves = [x.cpu().double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = plain_attention.attention(*leaves, mask, SCALE)
    expected_gradients = torch.autograd.grad(expected, leaves, d_out.cpu().double())

    for x in (out, dq, dk, dv):
        x.fill_(torch.nan)
    qkv = Qkv(q, k, v)
    lse = kernel.forward(qkv, out=out, mask=mask)
    y = Attended(out, lse)
    kernel.backward(d_out, qkv, y, into=QkvGrads(dq, dk, dv), mask=mask)
    assert lse.shape == (b, h, s_q)
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    blind = expected_lse == -torch.inf
    assert torch.equal((lse == -torch.inf).cpu(), blind)
    seen = {"lse": lse.cpu().masked_fill(blind, 0.0), "out": out, "dq": dq, "dk": dk, "dv": dv}
    wanted = expected_lse.masked_fill(blind, 0.0), expected, *expected_gradients
    compare(seen, wanted, TOLERANCE[dtype])
    if not blind.any():  # dQ may be written over dO
        for x in (dk, dv):
            x.fill_(torch.nan)
        kernel.backward(d_out, qkv, y, into=QkvGrads(d_out, dk, dv), mask=mask)
        compare({"dq": d_out, "dk": dk, "dv": dv}, expected_gradients, TOLERANCE[dtype])


def compare(found, expected, tolerance):
    for (name, x), e in zip(found.items(), expected, strict=True):
        error = (x.cpu().double() - e).abs().max() / e.abs().max().clamp(min=1.0)
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("s", [1, 3, 17, 129])
@pytest.mark.parametrize("window", [None, 1, 2, 16, 128, 1000])
def test_causal_and_windowed(kernel, s, window):
    check(KERNELS[kernel](), Mask(window=window), s, s)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("s_q", "s_k"), [(1, 3), (17, 5), (3, 129)])
def test_all_keys_of_another_block(kernel, s_q, s_k):
    check(KERNELS[kernel](), Mask(causal=False), s_q, s_k)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("h", "g"), [(1, 1), (5, 5), (6, 2), (7, 1)])
def test_shared_key_value_heads(kernel, h, g):
    check(KERNELS[kernel](), Mask(), 17, 17, h=h, g=g, d=12)
    check(KERNELS[kernel](), Mask(window=4), 17, 17, h=h, g=g, d=12)


BOUNDS = ((0, 1, 4, 21, 38, 39), (0, 39)), ((0, 3, 20, 39), (0, 1, 2, 39))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("window", [None, 2, 16])
def test_documents_of_each_sample(kernel, bounds, window):
    segments = tuple(map(Segments.of, bounds))
    check(KERNELS[kernel](), Mask(window=window, segments=segments), 39, 39)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [False, True])
def test_segments_without_queries_or_without_keys(kernel, causal):
    """As where q and k are different blocks of the sequence."""
    sizes = ((0, 3), (4, 0), (5, 5), (2, 2), (0, 1), (6, 6), (3, 0))
    queries, keys = (
        tuple(torch.tensor([0, *side]).cumsum(0).tolist()) for side in zip(*sizes, strict=True)
    )
    segments = Segments(queries=queries, keys=keys)
    check(KERNELS[kernel](), Mask(causal=causal, segments=(segments,)), 20, 17, b=1)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_query_sees_a_key(kernel):
    segments = Segments(queries=(0, 0, 5), keys=(0, 4, 4))
    check(KERNELS[kernel](), Mask(causal=False, segments=(segments,)), 5, 4, b=1)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes(kernel, dtype):
    segments = (Segments.of((0, 20, 129)), Segments.of((0, 129)))
    check(KERNELS[kernel](), Mask(segments=segments), 129, 129, dtype=dtype)
    check(KERNELS[kernel](), Mask(window=10), 129, 129, dtype=dtype)


@pytest.mark.parametrize("kernel", KERNELS)
def test_parts_of_the_keys_add_up(kernel):
    """Backward against two blocks of keys, with the output of both, sums to the whole."""
    torch.manual_seed(0)
    kernel, mask = KERNELS[kernel](), Mask(causal=False, scale=SCALE)
    q, d_out = (torch.randn(9, 1, 4, 8).double() for _ in range(2))
    k, v = (torch.randn(13, 1, 2, 8).double() for _ in range(2))

    def backward(k, v, y):
        into = QkvGrads(*(torch.empty_like(x) for x in (q, k, v)))
        kernel.backward(d_out, Qkv(q, k, v), y, into=into, mask=mask)
        return into

    out = torch.empty_like(q)
    y = Attended(out, kernel.forward(Qkv(q, k, v), out=out, mask=mask))
    whole = backward(k, v, y)
    parts = [backward(k[rows], v[rows], y) for rows in (slice(0, 5), slice(5, 13))]
    (first_dq, *first), (second_dq, *second) = parts
    summed = first_dq + second_dq, *map(torch.cat, zip(first, second, strict=True))
    for x, e in zip(summed, whole, strict=True):
        assert torch.allclose(x, e, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_are_scaled_by_the_head_width_unless_told(kernel):
    kernel = KERNELS[kernel]()
    x = Qkv(*(torch.randn(9, 1, 2, 16).double() for _ in "qkv"))
    plain_out, told_out = torch.empty_like(x.q), torch.empty_like(x.q)
    kernel.forward(x, out=plain_out, mask=Mask())
    kernel.forward(x, out=told_out, mask=Mask(scale=0.25))
    assert torch.equal(plain_out, told_out)
    kernel.forward(x, out=told_out, mask=Mask(scale=0.5))
    assert not torch.allclose(plain_out, told_out)
