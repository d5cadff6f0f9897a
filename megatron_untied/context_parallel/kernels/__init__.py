"""All attention kernels: one contract, one class per kernel, one table.

:mod:`.kernel` is the contract: what a caller may ask of any kernel, and the one place where that
is checked and split into calls within the kernel's limits. :mod:`.tensors` are the values it reads
and writes, :mod:`.mask` is which keys a query sees, and :mod:`.registry` is the table from which
``--attention-backend`` picks. The caller provides the buffers for results.
"""

from megatron_untied.context_parallel.kernels.cpu_flash import CpuFlash
from megatron_untied.context_parallel.kernels.kernel import AttentionKernel, KernelCounter
from megatron_untied.context_parallel.kernels.mask import Mask, Segments
from megatron_untied.context_parallel.kernels.registry import (
    choose_kernel,
)
from megatron_untied.context_parallel.kernels.tensors import Attended, Qkv, QkvGrads
from megatron_untied.context_parallel.kernels.traced import TracedKernel

__all__ = [
    "Attended",
    "AttentionKernel",
    "CpuFlash",
    "KernelCounter",
    "Mask",
    "Qkv",
    "QkvGrads",
    "Segments",
    "TracedKernel",
    "choose_kernel",
]
