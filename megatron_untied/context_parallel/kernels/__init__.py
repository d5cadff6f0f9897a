"""The only place that knows attention kernels: one contract, one class a kernel, one table.

:mod:`.kernel` is the contract: what a caller may ask of any kernel, and the one place where a
call is checked and cut into what the kernel can take. :mod:`.mask` says which keys a query sees.
:mod:`.choice` is the table, from which ``--attention-backend`` picks.

q, out and their gradients are [s_q, b, h, d], k and v and theirs [s_k, b, g, d], any strides with
the last dimension contiguous; h / g query heads share each key-value head. The log-sum-exp is
[b, h, s_q] in fp32 (float64 for float64 inputs). Results are written into buffers that the caller
gives.
"""

from megatron_untied.context_parallel.kernels.choice import (
    ATTENTION_BACKENDS,
    AttentionBackend,
    choose_kernel,
)
from megatron_untied.context_parallel.kernels.cpu_flash import CpuFlash
from megatron_untied.context_parallel.kernels.kernel import AttentionKernel, KernelCounter
from megatron_untied.context_parallel.kernels.mask import Mask, Segments
from megatron_untied.context_parallel.kernels.traced import TracedFlashAttention3

__all__ = [
    "ATTENTION_BACKENDS",
    "AttentionBackend",
    "AttentionKernel",
    "CpuFlash",
    "KernelCounter",
    "Mask",
    "Segments",
    "TracedFlashAttention3",
    "choose_kernel",
]
