"""Host memory for what a layer saves: slots that are written and read back beside compute.

A slot is host memory for one tensor. Memory grows by whole segments, one for each slot that finds
no released segment of its size: allocated exactly (rounded up to 4 KiB), registered with CUDA once,
then reused. So the first step sizes the arena, no list of all layers' activations is needed, and
later steps allocate nothing. One slot per segment cannot fragment, and the cost of registering
grows with bytes, not with calls.

Forward of one layer, with the residual updated in place, and its backward by tiles::

    slot = arena.reserve(residual.shape, residual.dtype)
    copied = slot.write(residual)            # starts behind the compute queued so far
    ...                                      # attention: reads the residual, does not write it
    copied.wait()                            # compute, not the host, waits for the copy
    residual += output                       # now it may change

    room = torch.empty(2, tile_numel, dtype=slot.dtype, device=device)
    for x_tile in prefetch(((slot, tile) for tile in tiles), room):
        ...                                  # the next tile arrives meanwhile
    slot.release()                           # after its last read was started

With a disk a slot can give up its memory until it is read again: :meth:`HostSlot.to_disk` starts to
write it there, :meth:`HostSlot.leave` frees the memory once it is written, and
:meth:`HostSlot.fetch` starts to bring it back, at the latest at the next read. Streams cannot wait
for a disk: the host does, before it queues the copy. That copies were done before the disk reads or
overwrites their host memory is up to the threads of the disk, which wait for the copies' events.

Call ``arena.engine.wait_all()`` after a failed step.
"""

import contextlib
import functools
import itertools
import mmap
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_untied.config import MemoryConfig
from megatron_untied.streaming.copy_engine import Copy, CopyEngine, CpuStreams, CudaStreams
from megatron_untied.streaming.disk import ActivationDisk, Extent, Transfer

PAGE_BYTES = 4096
Index = slice | int | tuple[slice | int, ...]


@dataclass(slots=True)
class _Segment:
    """Memory of one slot at a time, and the copies that the next slot on it must come after."""

    memory: Tensor  # uint8, whole pages
    last_write: Copy | None = None
    last_read: Copy | None = None

    def after(self, *copies: Copy | None) -> list[Callable[[], None]]:
        """What a thread of the disk calls before it touches the memory."""
        return [copy.wait_on_host for copy in copies if copy is not None]


class HostArena:
    """Slots of host memory for one device.

    Args:
        engine: makes the copies.
        allocate: takes a multiple of ``PAGE_BYTES`` and gives a uint8 tensor of exactly that many
            bytes. Its memory is freed with the last view of it, so copies in flight reference it.
        disk: where slots go that give up their memory.
    """

    def __init__(
        self,
        engine: CopyEngine,
        allocate: Callable[[int], Tensor],
        disk: ActivationDisk | None = None,
    ):
        self.engine = engine
        self.disk = disk
        self._allocate = allocate
        self._released: dict[int, deque[_Segment]] = defaultdict(deque)  # by bytes
        self.reserved_bytes = 0
        """Host memory taken from the system."""
        self.used_bytes = 0
        """Host memory of slots not released."""
        self.peak_used_bytes = 0
        self.num_allocations = 0
        """Segments allocated so far; constant once the first step is over."""

    @classmethod
    def for_device(cls, device: torch.device, memory: MemoryConfig | None = None) -> "HostArena":
        """An arena for a CUDA device (registered memory) or the CPU (pageable).

        ``memory`` names the disks, if there are any.
        """
        disk = ActivationDisk.of(memory or MemoryConfig())
        if device.type == "cuda":
            allocate = RegisteredMemory(torch.cuda.cudart(), device)
            return cls(CopyEngine(CudaStreams(device)), allocate, disk)
        return cls(CopyEngine(CpuStreams()), allocate_pageable, disk)

    @classmethod
    def for_tracing(cls, memory: MemoryConfig | None = None) -> "HostArena":
        """An arena that counts bytes and has none, for a step under FakeTensorMode."""
        # On "meta": the tracer counts every other tensor as the device's.
        empty = functools.partial(torch.empty, dtype=torch.uint8, device="meta")
        disk = ActivationDisk.of(memory or MemoryConfig(), counts_only=True)
        return cls(CopyEngine(CpuStreams()), empty, disk)

    def reserve(self, shape: Iterable[int], dtype: torch.dtype) -> "HostSlot":
        """Host memory for one tensor, uninitialized."""
        shape = torch.Size(shape)
        num_pages = -(-shape.numel() * dtype.itemsize // PAGE_BYTES)
        num_bytes = max(1, num_pages) * PAGE_BYTES  # mmap refuses a length of 0
        return HostSlot(self, self._take(num_bytes), shape, dtype)

    def _take(self, num_bytes: int) -> _Segment:
        released = self._released[num_bytes]
        if released:
            # The segment released first: its last copies are the most likely to be done.
            segment = released.popleft()
        else:
            segment = _Segment(self._allocate(num_bytes))
            self.num_allocations += 1
            self.reserved_bytes += num_bytes
        self.used_bytes += num_bytes
        self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)
        return segment

    def _give_back(self, segment: _Segment) -> None:
        self.used_bytes -= segment.memory.nbytes
        self._released[segment.memory.nbytes].append(segment)

    def trim(self) -> None:
        """Free released memory once running copies are done. Blocks the host.

        For a change of sequence length, and before an arena is dropped.
        """
        self.engine.synchronize()
        self._released.clear()
        self.reserved_bytes = self.used_bytes
        if self.disk is not None:
            self.disk.trim()


class HostSlot:
    """Host memory for a tensor of one shape and dtype; made by :meth:`HostArena.reserve`.

    Writes start behind all reads of this memory, reads behind all writes, both behind the compute
    queued so far. Each returns a :class:`~megatron_untied.streaming.copy_engine.Copy` that must be
    waited for before compute changes the tensor written, or uses the tensor read into. Tensors may
    be strided in their first dimensions; each contiguous piece is a copy of its own.
    """

    def __init__(self, arena: HostArena, segment: _Segment, shape: torch.Size, dtype: torch.dtype):
        self.shape = shape
        self.dtype = dtype
        self._arena = arena
        self._num_bytes = segment.memory.nbytes
        self._is_written = self._is_arriving = self._is_released = False
        self._extent: Extent | None = None  # on the disk
        self._transfer: Transfer = ()
        """Between memory and disk, not waited for yet."""
        # None while only the disk has it, or once it is released.
        self._segment: _Segment | None = segment
        self._view: Tensor | None = None

    def write(self, tensor: Tensor, index: Index = ()) -> Copy:
        """Start copying ``tensor`` to ``slot[index]``, by default the whole slot."""
        segment = self._live_segment()
        assert self._extent is None, "this slot is written to after it went to the disk"
        copy = self._arena.engine.copy_out(tensor, self._host[index], after=segment.last_read)
        # The copy-out stream runs in order: the last write is behind all others.
        segment.last_write = copy
        self._is_written = True
        return copy

    def read(self, out: Tensor, index: Index = (), *, leaving: Copy | None = None) -> Copy:
        """Start copying ``slot[index]``, by default the whole slot, into ``out`` on the device.

        Blocks the host while the slot is on its way from the disk.

        ``leaving``: the copy of what is in ``out`` so far, if compute does not wait for it.
        """
        self.fetch()
        segment = self._live_segment()
        assert self._is_written, "this slot is read before anything was written to it"
        if self._is_arriving:
            self._settle()
        copy = self._arena.engine.copy_in(
            self._host[index], out, after=segment.last_write, leaving=leaving
        )
        segment.last_read = copy
        return copy

    def shape_of(self, index: Index) -> torch.Size:
        """The shape that :meth:`read` at ``index`` expects."""
        self.fetch()
        return self._host[index].shape

    def to_disk(self) -> None:
        """Start to write the slot to the disk, if there is one with room; it stays readable.

        Nothing may be written to it any more.
        """
        disk, segment = self._arena.disk, self._live_segment()
        if disk is None or self._extent is not None:
            return
        self._extent = disk.reserve(self._num_bytes)
        if self._extent is not None:
            after = segment.after(segment.last_write)
            self._transfer = disk.write(self._extent, segment.memory, after)

    def leave(self) -> None:
        """Free the memory of a slot that is on the disk, which has to be done with writing it.

        A slot for which there was no room stays where it is.
        """
        if self._extent is not None and self._segment is not None:
            self._settle()
            self._arena._give_back(self._segment)
            self._segment = self._view = None

    def fetch(self) -> None:
        """Start to read the slot from the disk, if only that has it."""
        assert not self._is_released, "this slot was released"
        if self._segment is not None:
            return
        segment = self._arena._take(self._num_bytes)
        after = segment.after(segment.last_write, segment.last_read)
        self._transfer = self._arena.disk.read(self._extent, segment.memory, after)
        segment.last_write = segment.last_read = None  # those of the slot before are done
        self._is_arriving, self._segment = True, segment

    def release(self) -> None:
        """Let another slot reuse the memory: its writes will wait for reads started here."""
        assert not self._is_released, "this slot was released"
        self._settle(raises=False)  # nobody reads it any more
        if self._segment is not None:
            self._arena._give_back(self._segment)
        if self._extent is not None:
            self._arena.disk.release(self._extent)
        self._is_released = True
        self._segment = self._view = None  # a view left here would keep memory that trim frees

    def __del__(self):
        # A forward whose graph is dropped without a backward must not lose host memory.
        if not self._is_released:
            self.release()

    @property
    def _host(self) -> Tensor:
        """The memory as a tensor; made at the first use, as plans reserve thousands without one."""
        if self._view is None:
            num_bytes = self.shape.numel() * self.dtype.itemsize
            self._view = self._segment.memory[:num_bytes].view(self.dtype).view(self.shape)
        return self._view

    def _settle(self, *, raises: bool = True) -> None:
        """Block the host until no transfer of this slot is in flight."""
        if self._extent is not None:
            is_done = all(request.done() for request in self._transfer)
            waits = self._arena.engine.waits
            with contextlib.nullcontext() if is_done else waits.counted("disk"):
                self._arena.disk.wait(self._transfer, raises=raises)
        self._transfer, self._is_arriving = (), False

    def _live_segment(self) -> _Segment:
        assert not self._is_released, "this slot was released"
        assert self._segment is not None, "this slot is on the disk"
        return self._segment


def prefetch(reads: Iterable[tuple[HostSlot, Index]], room: Tensor) -> Iterator[Tensor]:
    """Yield each read on the device, contiguous, while the next one is copied.

    Args:
        reads: slots and what to read of them; consumed one ahead of what is yielded.
        room: [2, k] on the device, of the slots' dtype, k the elements of the largest read. A
            yielded tensor lies in it and is valid until the next is requested.
    """
    ahead: tuple[Copy, Tensor] | None = None
    # A half is fetched into behind all compute so far, so behind every use of its previous tensor.
    for (slot, index), half in zip(reads, itertools.cycle(room)):
        shape = slot.shape_of(index)
        out = half[: shape.numel()].view(shape)
        copy = slot.read(out, index)
        if ahead is not None:
            ahead[0].wait()
            yield ahead[1]
        ahead = copy, out
    if ahead is not None:
        ahead[0].wait()
        yield ahead[1]


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
            "with pageable memory, whose copies are slower and do not overlap with compute. Look "
            "at the container's memory limit, then at what the driver says (dmesg) and ulimit -l.",
            stacklevel=2,
        )
        return memory
