"""FlashAttention-3 that allocates and does not compute, for counting memory and work."""

import torch
from torch import Tensor

from megatron_untied.context_parallel.kernels.flash_attention import FlashAttention3
from megatron_untied.context_parallel.kernels.kernel import Platform
from megatron_untied.context_parallel.kernels.mask import Mask
from megatron_untied.context_parallel.kernels.split_calls import Shape, split_calls
from megatron_untied.phases import MemoryCategory, allocating


class TracedFlashAttention3(FlashAttention3):
    """What :class:`.FlashAttention3` allocates on a Hopper GPU, on any device, real or fake.

    Checks, splits and counts as the real kernel. Outputs are not written.
    """

    name = "flash-attention-3, traced"
    platform = Platform()

    def __init__(self) -> None:
        super().__init__(_Allocations())

    def backward_bytes(self, shape: Shape) -> int:
        """The most that one call of a causal backward of ``shape`` allocates for itself."""
        most = 0
        for call in split_calls(shape, Mask(), self.limits):
            q_parts = call.samples, call.queries, call.heads
            k_parts = call.samples, call.keys, call.kv_heads
            q, k = (  # [b, s, heads, d], as the operator takes them, without memory
                torch.empty(*(x.stop - x.start for x in parts), shape.d, device="meta")
                for parts in (q_parts, k_parts)
            )
            scratch = self.operators.bwd(q, q, k, k, is_causal=call.causal)
            most = max(most, sum(x.nbytes for x in scratch))
        return most


class _Allocations:
    """Allocations of FlashAttention-3's operators, all live while one runs.

    Forward: log-sum-exp, fp32 [b, h, s_q]. Backward: the row sums of dO * O, a scaled log-sum-exp
    and dq of each query head, all fp32; and if query heads share key-value heads, fp32 dk and dv
    of each key-value head. Rows and width are rounded up to the kernel's blocks; cumulative lengths
    add one more block per segment.
    """

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        """``out`` as given and the log-sum-exp, [b, h, s_q] or [h, tokens]."""
        lengths = q.shape[:1] if q.dim() == 3 else q.shape[:2]
        lse_shape = (*lengths[:-1], q.shape[-2], lengths[-1])
        with allocating(MemoryCategory.KEPT):
            return options["out"], q.new_empty(lse_shape, dtype=torch.float32)

    def bwd(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Tensor, **options: object
    ) -> list[Tensor]:
        """The scratch that is live when the kernel runs."""
        width = _width(q.shape[-1])
        # Rows of q and of k in a block of the backward kernel.
        query_rows = {64: 128, 128: 64 if options["is_causal"] else 80}.get(width, 64)
        key_rows = {192: 96, 256: 80}.get(width, 128)
        num_segments = len(options["cu_seqlens_q"]) - 1 if q.dim() == 3 else 0
        rows, heads = _padded(q, query_rows, num_segments), q.shape[-2]
        sizes = [(rows, heads, size) for size in (1, 1, width)]
        if heads != k.shape[-2]:
            rows, heads = _padded(k, key_rows, num_segments), k.shape[-2]
            sizes += [(rows, heads, width) for _ in "kv"]
        with allocating(MemoryCategory.KERNEL):
            return [q.new_empty(size, dtype=torch.float32) for size in sizes]


def _width(d: int) -> int:
    """The head width that the kernel pads ``d`` to."""
    widths = (64, 96, 128, 192, 256)
    if d > widths[-1]:
        raise ValueError(
            f"--kv-channels {d} (hidden size / heads, unless given): FlashAttention-3, which "
            f"memory is counted for, takes heads of up to {widths[-1]} channels; give more heads "
            "or fewer channels"
        )
    return next(width for width in widths if d <= width)


def _padded(x: Tensor, block: int, num_segments: int) -> int:
    """Rows over all samples, or over all segments of one."""
    num_samples, rows = (1, len(x)) if num_segments else x.shape[:2]
    rows += num_segments * block
    return num_samples * -(-rows // block) * block
