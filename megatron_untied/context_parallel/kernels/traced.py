"""FlashAttention-3 that allocates and does not compute, for counting memory and work."""

import torch
from torch import Tensor
from typing_extensions import override

from megatron_untied.context_parallel.kernels.flash_attention import FlashAttention3
from megatron_untied.context_parallel.kernels.mask import Mask
from megatron_untied.context_parallel.kernels.split_calls import Call, Shape, split_calls
from megatron_untied.phases import MemoryCategory, allocating


class TracedFlashAttention3(FlashAttention3):
    """What :class:`.FlashAttention3` allocates on a Hopper GPU, on any device, real or fake.

    Checks, splits and counts as the real one. Outputs are left as they are.
    """

    name = "flash-attention-3, traced"

    def __init__(self) -> None:
        super().__init__(_Allocations())

    @override
    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        return None

    def backward_bytes(self, shape: Shape) -> int:
        """Most that one call of a causal backward of ``shape`` allocates for itself."""
        calls = split_calls(shape, Mask(), self.limits)
        return max(self._call_bytes(call, shape.d) for call in calls)

    def _call_bytes(self, call: Call, d: int) -> int:
        def some(samples: slice, rows: slice, heads: slice) -> Tensor:
            sizes = [part.stop - part.start for part in (samples, rows, heads)]
            return torch.empty(*sizes, d, device="meta")

        q = some(call.samples, call.queries, call.heads)
        k = some(call.samples, call.keys, call.kv_heads)
        scratch = self.operators.bwd(q, q, k, k, is_causal=call.causal)
        return sum(x.nbytes for x in scratch)


class _Allocations:
    """Allocations of FlashAttention-3's operators, alive together while one runs.

    Forward: log-sum-exp, fp32 [b, h, s_q]. Backward: for each query head the row sums of
    dO * O, a scaled log-sum-exp, and dq, all fp32; and where query heads share a key-value head
    dk and dv of each of those, fp32. Rows and width are rounded up to the kernel's blocks; with
    cumulative lengths there is room for one more block a segment.
    """

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        """Out and log-sum-exp."""
        lengths = q.shape[:1] if q.dim() == 3 else q.shape[:2]
        lse_shape = (*lengths[:-1], q.shape[-2], lengths[-1])
        with allocating(MemoryCategory.KEPT):
            return options["out"], q.new_empty(lse_shape, dtype=torch.float32)

    def bwd(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Tensor, **options: object
    ) -> list[Tensor]:
        """The scratch that is alive when the kernel runs."""
        width = _width(q.shape[-1])
        query_rows, key_rows = _block_rows(width, masked=options["is_causal"])
        num_segments = len(options["cu_seqlens_q"]) - 1 if q.dim() == 3 else 0
        rows, heads = _padded(q, query_rows, num_segments), q.shape[-2]
        sizes = [(rows, heads, size) for size in (1, 1, width)]
        if heads != k.shape[-2]:
            rows, heads = _padded(k, key_rows, num_segments), k.shape[-2]
            sizes += [(rows, heads, width) for _ in "kv"]
        with allocating(MemoryCategory.KERNEL):
            return [q.new_empty(size, dtype=torch.float32) for size in sizes]


def _width(d: int) -> int:
    widths = (64, 96, 128, 192, 256)
    if d > widths[-1]:
        raise ValueError(
            f"--kv-channels {d} (hidden size / heads, unless given): FlashAttention-3, which "
            f"memory is counted for, takes heads of up to {widths[-1]} channels; give more heads "
            "or fewer channels"
        )
    return next(width for width in widths if d <= width)


def _block_rows(width: int, *, masked: bool) -> tuple[int, int]:
    """Rows of q and of k in a block of the backward kernel."""
    query_rows = {64: 128, 128: 64 if masked else 80}.get(width, 64)
    return query_rows, {192: 96, 256: 80}.get(width, 128)


def _padded(x: Tensor, block: int, num_segments: int) -> int:
    """Rows over all samples, or over all segments of one."""
    if num_segments:
        return _round_up(len(x) + num_segments * block, block)
    return x.shape[0] * _round_up(x.shape[1], block)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
