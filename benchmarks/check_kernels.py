r"""Check every attention kernel of this machine: its values, its scratch memory, its speed.

Values are compared with matrix products in fp32. At full length the kernel runs with a window,
which makes long sequences cheap: the last rows must equal those of a short call on them, although
their addresses are beyond the range of 32-bit indices.

    python benchmarks/check_kernels.py                          # a GPU: minutes
    python benchmarks/check_kernels.py --tokens 4096 --long 8192 --dtype float32    # a laptop
"""

import argparse
import time

import torch
from torch import Tensor

from megatron_untied.context_parallel.kernels import (
    Attended,
    AttentionKernel,
    Mask,
    Qkv,
    QkvGrads,
    Segments,
    TracedKernel,
)
from megatron_untied.context_parallel.kernels.matrix_products import MatrixProducts
from megatron_untied.context_parallel.kernels.registry import KERNELS
from megatron_untied.context_parallel.kernels.traced import SCRATCH
from megatron_untied.platform import device

HEAD_WIDTH, WINDOW, TAIL = 128, 1024, 2048
FAR_HEADS = {"h": 4, "g": 4}
"""At the default length more than kernels with 32-bit addresses take in one call, so that they are
split; shared key-value heads would stay together and be refused."""
LONG = 5 << 20
NAMES = ("out", "lse", "dq", "dk", "dv")


def tensors(s: int, *, h: int, g: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a forward and a backward, by name: [s, 1, heads, HEAD_WIDTH]."""
    heads = {"q": h, "k": g, "v": g, "d_out": h, "out": h, "dq": h, "dk": g, "dv": g}
    generator = torch.Generator(device.current_device()).manual_seed(0)
    options = {"device": device.current_device(), "dtype": dtype, "generator": generator}
    return {name: torch.randn(s, 1, n, HEAD_WIDTH, **options) for name, n in heads.items()}


def run(kernel: AttentionKernel, x: dict[str, Tensor], mask: Mask) -> list[Tensor]:
    """Forward and backward; returns out, lse, dq, dk and dv, as NAMES."""
    qkv = Qkv(x["q"], x["k"], x["v"])
    lse = kernel.forward(qkv, out=x["out"], mask=mask)
    into = QkvGrads(x["dq"], x["dk"], x["dv"])
    d_out = into.dq.copy_(x["d_out"])  # a chunk's backward writes dQ over dO
    kernel.backward(d_out, qkv, Attended(x["out"], lse), into=into, mask=mask)
    return [x["out"], lse, *into]


def errors(found: list[Tensor], expected: list[Tensor]) -> str:
    """Largest difference per tensor, relative to its largest value."""
    pairs = zip(NAMES, found, expected, strict=True)
    return "  ".join(
        f"{name} {((x.float() - e.float()).abs().max() / e.abs().max()).item():.0e}"
        for name, x, e in pairs
    )


def check_values(kernel: AttentionKernel, dtype: torch.dtype) -> None:
    """Compare with matrix products, under every kind of mask that the kernel supports."""
    documents = (Segments.of((0, 1, 4, 21, 500, 1001)),)
    masks = {"causal": Mask(), "all keys": Mask(causal=False)}
    if kernel.limits.windows:
        masks["window"] = Mask(window=100)
    if kernel.limits.documents:
        masks["documents"] = Mask(segments=documents)
    for name, mask in masks.items():
        expected = run(MatrixProducts(), tensors(1001, h=8, g=2, dtype=dtype), mask)
        found = run(kernel, tensors(1001, h=8, g=2, dtype=dtype), mask)
        print(f"    {name:10}{errors(found, expected)}")


def check_far_rows(kernel: AttentionKernel, s: int, dtype: torch.dtype) -> None:
    """Compare the last rows of a long call with a short call on them."""
    mask = Mask(window=WINDOW)
    x = tensors(s, **FAR_HEADS, dtype=dtype)
    tail = {name: value[-TAIL - WINDOW :].clone() for name, value in x.items()}
    found = run(kernel, x, mask)
    found[1] = found[1].transpose(0, 2)  # lse: [1, h, s] -> [s, h, 1]
    expected = run(kernel, tail, mask)
    expected[1] = expected[1].transpose(0, 2)
    rows = slice(-TAIL, None)  # the window of these rows is inside of both calls
    print(f"    {s} rows  {errors([y[rows] for y in found], [y[rows] for y in expected])}")


def measure(kernel: AttentionKernel, s: int, dtype: torch.dtype) -> tuple[float, float]:
    """MiB that a causal forward and backward allocate at the peak, and their TFLOP/s."""
    x = tensors(s, h=4, g=4, dtype=dtype)
    run(kernel, x, Mask())  # compiles, loads, fills caches
    device.synchronize()
    device.reset_peak_device_bytes()
    held, flops, began = device.peak_device_bytes(), kernel.counter.flops, time.perf_counter()
    run(kernel, x, Mask())
    device.synchronize()
    seconds = time.perf_counter() - began
    scratch = (device.peak_device_bytes() - held) / 2**20
    return scratch, (kernel.counter.flops - flops) / seconds / 1e12


def main() -> None:
    """Check the kernels one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1 << 16, help="of the measurement")
    parser.add_argument("--long", type=int, default=LONG, help="rows of the long call")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = parser.parse_args()
    dtype, here = getattr(torch, args.dtype), device.select_device(0)
    kernels = dict.fromkeys(kernel for row in KERNELS.values() for kernel in row)
    for kernel_class in kernels:
        missing = kernel_class.missing(here)
        print(f"{kernel_class.name}" + (f": needs {missing}" if missing else ""), flush=True)
        if not missing and dtype in kernel_class.limits.dtypes:
            check_values(kernel_class(), dtype)
            if kernel_class.limits.windows and kernel_class is not MatrixProducts:
                check_far_rows(kernel_class(), args.long, dtype)
            s = min(args.tokens, 4096) if kernel_class is MatrixProducts else args.tokens
            scratch, rate = measure(kernel_class(), s, dtype)
            counted = ""
            if kernel_class in SCRATCH:
                traced, _ = measure(TracedKernel(kernel_class), s, dtype)
                counted = f" ({traced:,.0f} in plans)"
            print(f"    {s} tokens: {scratch:,.0f} MiB of scratch{counted}, {rate:.2f} TFLOP/s")


if __name__ == "__main__":
    main()
