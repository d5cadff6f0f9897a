"""Products with fp32 results: exact sums of bf16 operands, wherever they are computed."""

import pytest
import torch

from megatron_untied.dtypes import accumulation_dtype
from megatron_untied.matmul import add_product_, product

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def operands(dtype, device):
    """total [5, 3] in the accumulation dtype, a [5, 7] (a transposed view), b [7, 3]."""
    torch.manual_seed(0)
    total = torch.randn(5, 3, device=device, dtype=accumulation_dtype(dtype))
    a = torch.randn(7, 5, device=device, dtype=torch.float64).to(dtype).t()
    return total, a, torch.randn(7, 3, device=device, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_product_keeps_the_accumulation_dtypes_precision(dtype, device):
    total, a, b = operands(dtype, device)
    expected = total.double() + a.double() @ b.double()
    assert add_product_(total, a, b) is total
    # fp32 sums of 8 terms; rounding a bf16 product instead would be off by 4e-3.
    torch.testing.assert_close(total.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_product_is_in_the_accumulation_dtype(dtype, device):
    _, a, b = operands(dtype, device)
    expected = a.double() @ b.double()
    actual = product(a, b)
    assert actual.dtype == accumulation_dtype(dtype)
    rounded = dtype == torch.bfloat16 and device == "cpu"  # to bf16, and then widened
    torch.testing.assert_close(
        actual.double(), expected, rtol=4e-3 if rounded else 0, atol=1e-2 if rounded else 2e-6
    )
