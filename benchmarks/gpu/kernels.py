"""Part: every attention kernel of this machine: values against float64, scratch, speed."""

from collections.abc import Iterator

import torch

from benchmarks.check_kernels import NAMES, measure, tensors
from benchmarks.check_kernels import run as attend
from benchmarks.gpu.record import Record
from benchmarks.gpu.sizes import Sizes
from megatron_untied.context_parallel.kernels import (
    AttentionKernel,
    Mask,
    Segments,
    TracedKernel,
)
from megatron_untied.context_parallel.kernels.matrix_products import MatrixProducts
from megatron_untied.context_parallel.kernels.registry import KERNELS
from megatron_untied.context_parallel.kernels.traced import SCRATCH
from megatron_untied.platform import device

ROWS = 1001
HEADS = {"h": 8, "g": 2}
LIMIT = 3e-2
"""Largest error over largest value, in bf16 (an epsilon of 0.4%); P is rounded to bf16 too."""


def masks(kernel: type[AttentionKernel]) -> Iterator[tuple[str, Mask]]:
    """Every kind of mask that ``kernel`` takes, by name."""
    yield "causal", Mask()
    yield "all keys", Mask(causal=False)
    if kernel.limits.windows:
        yield "window", Mask(window=100)
    if kernel.limits.documents:
        yield "documents", Mask(segments=(Segments.of((0, 1, 4, 21, 500, ROWS)),))


def run(record: Record, sizes: Sizes) -> None:
    """Check the kernels one after the other; one that raises is a problem, the others go on."""
    here, dtype = device.select_device(0), torch.bfloat16
    for kernel in dict.fromkeys(kernel for row in KERNELS.values() for kernel in row):
        missing = kernel.missing(here)
        if missing:
            record.row("kernels", kernel=kernel.name, state=f"needs {missing}")
            continue
        record.row("kernels", kernel=kernel.name, state="runs here")
        try:
            check_values(record, kernel, dtype)
            measure_lengths(record, kernel, dtype, sizes)
        except (RuntimeError, ValueError, TypeError) as error:  # of a kernel's own package
            record.expect(False, f"{kernel.name}: {type(error).__name__}: {error}")


def check_values(record: Record, kernel: type[AttentionKernel], dtype: torch.dtype) -> None:
    """Forward and backward, with dQ written over dO, beside the same values in float64."""
    for name, mask in masks(kernel):
        x = tensors(ROWS, **HEADS, dtype=dtype)
        exact = attend(MatrixProducts(), {each: t.double() for each, t in x.items()}, mask)
        found = attend(kernel(), x, mask)
        errors = {
            tensor: ((y.double() - e).abs().max() / e.abs().max()).item()
            for tensor, y, e in zip(NAMES, found, exact, strict=True)
        }
        record.row("error against float64, over the largest value", kernel=kernel.name, mask=name,
                   **errors)  # fmt: skip
        worst = max(errors, key=errors.get)
        is_close = max(errors.values()) < LIMIT  # False for nan
        record.expect(is_close, f"{kernel.name}, {name}: {worst} is off by {errors[worst]:.1e}")


def measure_lengths(
    record: Record, kernel: type[AttentionKernel], dtype: torch.dtype, sizes: Sizes
) -> None:
    """Causal forward and backward of 4 heads: scratch bytes beside the plan's, and speed."""
    lengths = sizes.kernel_lengths[:1] if kernel is MatrixProducts else sizes.kernel_lengths
    for tokens in lengths:
        scratch, rate = measure(kernel(), tokens, dtype)
        counted = None
        if kernel in SCRATCH:
            counted, _ = measure(TracedKernel(kernel), tokens, dtype)
        numbers = {"TFLOP/s": rate, "scratch, MiB": scratch, "planned, MiB": counted}
        record.row("speed of 4 heads", kernel=kernel.name, tokens=tokens, **numbers)
        if counted is not None and torch.cuda.is_available():
            problem = (
                f"{kernel.name} at {tokens}: {scratch:.0f} MiB of scratch, {counted:.0f} planned"
            )
            record.expect(scratch <= 1.03 * counted + 1, problem)
