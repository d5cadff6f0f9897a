"""Page-aligned host memory for the arena: registered with CUDA, pageable, or only counted.

Each allocator takes a number of bytes, a multiple of ``PAGE_BYTES``, and returns a uint8 tensor of
exactly that size. Reference that tensor while its memory is copied from or to: the memory is freed
with the last view of it.
"""

import contextlib
import mmap
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

PAGE_BYTES = 4096


def allocate_pageable(num_bytes: int) -> Tensor:
    """Plain memory, zero, on pages of its own. Nothing is resident until it is written.

    The mapping is private, in huge pages where the kernel has them. Registration faults in and pins
    page by page: 512 times fewer of them, and page tables smaller by as much.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A forked data loader worker would make private pages copy-on-write, and the next write here
    # would move a page that is registered: a worker does not get them.
    memory.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without huge pages: 4 KiB ones serve as well
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def allocate_counted(num_bytes: int) -> Tensor:
    """No memory, for a trace with fake tensors: on "meta", so it is not counted as the device's."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


class RegisteredMemory:
    """Allocates memory that the device copies from and to directly, beside compute.

    ``cudaHostRegister`` takes exactly the bytes it is given; ``pin_memory`` would round them up to
    a power of two. If CUDA refuses, one warning is given and all later memory is pageable: results
    are the same, but copies are slower and block the host.

    Args:
        cudart: ``torch.cuda.cudart()``.
        device: the CUDA device whose context is current.
    """

    def __init__(self, cudart: Any, device: torch.device):
        self._cudart = cudart
        self._device = device
        self._refused = False

    def __call__(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], registered unless CUDA has refused."""
        memory = allocate_pageable(num_bytes)
        if self._refused:
            return memory
        error = self._cudart.cudaHostRegister(memory.data_ptr(), num_bytes, 0)
        if int(error) == 0:
            # Registered pages outlive their mapping and would make the next one there fail.
            unregister = weakref.finalize(
                memory, self._cudart.cudaHostUnregister, memory.data_ptr()
            )
            unregister.atexit = False  # the CUDA context is gone by then
            return memory
        self._refused = True
        # CUDA's "last error" is still set, and torch would raise it at some later kernel launch.
        # torch does not expose cudaGetLastError; the check behind a launch reads and clears it.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)
        warnings.warn(
            f"could not register {num_bytes} bytes ({num_bytes / 2**30:.1f} GiB) of pinned host "
            f"memory with CUDA: {self._cudart.cudaGetErrorString(error)}. Training continues "
            "with pageable memory, whose copies are slower and do not overlap with compute. Raise "
            "the memlock limit (ulimit -l unlimited) or the container's memory limit.",
            stacklevel=2,
        )
        return memory
