"""GPU kernels that allocate what the real ones do and compute nothing: for counting memory.

How much a kernel allocates follows the host code of the versions in ``requirements-gpu.txt``, in
the files that :data:`SCRATCH` names. Semaphores and schedules are left out: below 0.02% of the
sums. The tracer allocates these bytes and the planner adds them up;
``benchmarks/check_kernels.py`` measures them on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from megatron_untied.context_parallel.kernels.cudnn import Cudnn
from megatron_untied.context_parallel.kernels.flash_attention import (
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
    TorchFlash,
)
from megatron_untied.context_parallel.kernels.kernel import AttentionKernel, Platform
from megatron_untied.context_parallel.kernels.mask import Mask
from megatron_untied.context_parallel.kernels.split_calls import Call, Limits, Shape, split_calls
from megatron_untied.context_parallel.kernels.tensors import Attended, Qkv, QkvGrads
from megatron_untied.phases import MemoryCategory, allocating

_FP32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Scratch:
    """What the operators of a kernel allocate beside their arguments and the log-sum-exp.

    All of it is live while one runs. The backward of all of them sums dq in fp32, as every block
    of keys adds to it.
    """

    returns_out: bool = False
    """The output is a new tensor, copied to where it belongs."""
    returns_gradients: bool = False
    copies_strided: bool = False
    """dO and the output are copied where they are not contiguous."""
    row_sums: int = 1
    """fp32 numbers per row and query head: of dO x O, and in some a scaled log-sum-exp."""
    widths: tuple[int, ...] = ()
    """Head widths of fp32 sums; a width between two takes the larger."""
    query_rows: Callable[[int, bool], int] = lambda width, causal: 128
    """Rows that sums over q are padded to, by width and whether the mask is causal."""
    key_rows: Callable[[int], int] = lambda width: 128
    sums_shared_heads: bool = False
    """Where query heads share key-value heads, dk and dv are fp32 sums per key-value head;
    otherwise they are in q's dtype, of every query head, and added up afterwards."""

    def num_bytes(
        self, shape: Shape, itemsize: int, *, causal: bool, num_segments: int = 0, strided: int = 0
    ) -> tuple[int, int]:
        """Of one call of a forward, and of a backward.

        Args:
            shape: of the call.
            itemsize: of q.
            causal: its mask.
            num_segments: of cumulative lengths, each padded to blocks; 0 is a call without.
            strided: tensors among dO and output that are not contiguous.
        """
        b, h, g, d = shape.b, shape.h, shape.g, shape.d
        width = next((width for width in self.widths if d <= width), d)
        samples, segments = (1, num_segments) if num_segments else (b, 0)
        padded_rows = []
        for rows, block in (
            (shape.num_queries, self.query_rows(width, causal)),
            (shape.num_keys, self.key_rows(width)),
        ):
            padded_rows.append(samples * -(-(rows + segments * block) // block) * block)
        of_q, of_keys = (b * n * d * itemsize for n in (shape.num_queries, shape.num_keys))
        total = padded_rows[0] * h * (self.row_sums + width) * _FP32
        if h != g and self.sums_shared_heads:
            total += 2 * padded_rows[1] * g * width * _FP32
        elif h != g:
            total += 2 * of_keys * h
        if self.returns_gradients:
            total += of_q * h + 2 * of_keys * g
        total += self.copies_strided * strided * of_q * h
        return self.returns_out * of_q * h, total


_FLASH_2_WIDTHS = (32, 64, 96, 128, 192, 256)

SCRATCH: dict[type[AttentionKernel], Scratch] = {
    # flash_attn/cute/interface.py, _flash_attn_bwd, 4.0.0b36: blocks of 128; from heads of 128 on
    # two blocks of keys work as a pair. It is called as torch calls it: gradients are new tensors.
    FlashAttention4: Scratch(
        returns_gradients=True,
        row_sums=2,
        widths=(32, 64, 96, 128),
        key_rows=lambda width: 256 if width == 128 else 128,
        sums_shared_heads=True,
    ),
    # hopper/flash_api_stable.cpp, mha_bwd, as on main in 2026: blocks of Hopper's kernels.
    FlashAttention3: Scratch(
        row_sums=2,
        widths=(64, 96, 128, 192, 256),
        query_rows=lambda width, causal: {64: 128, 128: 64 if causal else 80}.get(width, 64),
        key_rows=lambda width: {192: 96, 256: 80}.get(width, 128),
        sums_shared_heads=True,
    ),
    # csrc/flash_attn/flash_api.cpp, mha_fwd and mha_bwd, 2.8.3.post1. With segments the sums are
    # not rounded up to blocks: up to 127 rows are counted too many.
    FlashAttention2: Scratch(returns_out=True, widths=_FLASH_2_WIDTHS),
    # aten/src/ATen/native/transformers/cuda: flash_attn/flash_api.cpp as FlashAttention-2's, and
    # _flash_attention_backward in attention_backward.cu copies strided dO and output.
    TorchFlash: Scratch(returns_gradients=True, copies_strided=True, widths=_FLASH_2_WIDTHS),
    # aten/src/ATen/native/cudnn/MHA.cpp allocates results and a workspace of the size that cuDNN
    # names at run time. Of it cudnn-frontend's CompositeSDPABackwardNode fixes the sum of dq and
    # the row sums. That dk and dv of every query head, in q's dtype, are memory too, and that a
    # forward needs none, is assumed: only a GPU tells.
    Cudnn: Scratch(returns_out=True, returns_gradients=True, query_rows=lambda width, causal: 1),
}
"""By kernel, the fastest first."""


class TracedKernel(AttentionKernel):
    """What a kernel allocates on its GPU, on any device, real or fake.

    Checks, splits and counts as the real one. Outputs are not written.
    """

    platform = Platform()

    def __init__(self, kind: type[AttentionKernel], limits: Limits | None = None):
        """``limits``: of the installed version, if it is not the one that is tested."""
        super().__init__()
        self.kind, self.name, self.scratch = kind, f"{kind.name}, traced", SCRATCH[kind]
        self.limits = limits or kind.limits

    def most_bytes(
        self, shape: Shape, itemsize: int, *, num_heads: int, causal: bool = True
    ) -> tuple[int, int]:
        """The most that one call of a forward of ``shape`` allocates, and of a backward.

        ``num_heads``: of the tensors that the query heads of ``shape`` lie in.

        Raises:
            ValueError: for a size that the kernel cannot index.
        """
        most, calls = (0, 0), split_calls(shape, Mask(causal=causal), self.limits)
        for call in calls:
            part = call.shape(shape.d)
            is_strided = shape.b > 1 or part.h < num_heads
            forward, backward = self.scratch.num_bytes(
                part, itemsize, causal=causal, strided=2 * is_strided
            )
            if len(calls) > 1:  # its log-sum-exp, before it is copied to that of all heads
                forward += part.b * part.h * part.num_queries * _FP32
            most = max(most[0], forward), max(most[1], backward)
        return most

    @override
    def _forward(self, x: Qkv, out: Tensor, call: Call) -> Tensor:
        shape = Shape.of(x)
        num_bytes, _ = self.scratch.num_bytes(shape, x.q.element_size(), causal=call.causal)
        with allocating(MemoryCategory.KERNEL):
            _scratch = x.q.new_empty(num_bytes, dtype=torch.uint8)
        with allocating(MemoryCategory.KEPT):
            return x.q.new_empty((shape.b, shape.h, shape.num_queries), dtype=torch.float32)

    @override
    def _backward(self, d_out: Tensor, x: Qkv, y: Attended, into: QkvGrads, call: Call) -> None:
        _, num_bytes = self.scratch.num_bytes(
            Shape.of(x),
            x.q.element_size(),
            causal=call.causal,
            num_segments=len(call.run.queries) - 1 if call.run else 0,
            strided=sum(not z.transpose(0, 1).is_contiguous() for z in (d_out, y.out)),
        )
        with allocating(MemoryCategory.KERNEL):
            x.q.new_empty(num_bytes, dtype=torch.uint8)
