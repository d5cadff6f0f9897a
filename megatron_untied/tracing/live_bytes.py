"""Counts the bytes of tensors alive, over real and fake tensors alike.

A storage counts from the operation that made it until nothing holds it any more, at the size it
has: where ``resize_`` of a storage gives memory back (FSDP2, parking), that counts. What a kernel
allocates for itself is not seen, nor what an allocator adds to a request.

Under any such mode autograd sums gradients that meet out of place, where otherwise it may add in
place. In a streamed layer that is the size of a tile.
"""

import weakref
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_iter

from megatron_untied.tracing.shortcuts import shortcut
from megatron_untied.tracing.stack import cause, phase


@dataclass(frozen=True, slots=True)
class Peak:
    """A moment when many bytes were alive."""

    num_bytes: int = 0
    by_cause: dict[str, int] = field(default_factory=dict)
    """Bytes by the line of code that allocated them; see :func:`.stack.cause`."""


@dataclass(slots=True)
class _Alive:
    reference: weakref.ref
    num_bytes: int
    cause: str


class LiveBytes(TorchDispatchMode):
    """While entered, counts the device memory of what operations make. Enter it once.

    Tensors on "meta" are host memory (see ``HostArena.for_tracing``), and so are real ones that
    :meth:`on_host` was told of; everything else is the device's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        """Alive now."""
        self.peaks: dict[str, Peak] = {}
        """The highest moment of each phase; see :func:`.stack.phase`."""
        self._by_cause: Counter[str] = Counter()
        self._alive: dict[int, _Alive] = {}

    @property
    def peak_phase(self) -> str:
        """The phase with the highest of all moments."""
        return max(self.peaks, key=lambda name: self.peaks[name].num_bytes)

    @property
    def peak(self) -> Peak:
        """The highest of all moments."""
        return self.peaks[self.peak_phase]

    def on_host(self, tensor: Tensor) -> Tensor:
        """Take a real tensor's memory for the host's."""
        self._track(tensor.untyped_storage(), num_bytes=0)
        return tensor

    def __enter__(self) -> "LiveBytes":
        # FSDP2 and parking free memory by resizing storages, which no dispatcher sees.
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._counted_resize()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor: it comes back with its local tensor
        kwargs = kwargs or {}
        quick = shortcut(func, args)
        if quick is not None:
            return quick(func, args, kwargs)
        result = func(*args, **kwargs)
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and _is_on_device(tensor):
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        alive = self._alive.get(storage._cdata)
        if alive is None:
            self._track(storage, storage.nbytes())
        elif alive.num_bytes:  # 0: the host's, or given back
            self._change(alive, storage.nbytes())

    def _track(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key, its_cause = storage._cdata, cause()
        reference = weakref.ref(storage, lambda _: self._forget(key))
        self._alive[key] = alive = _Alive(reference, 0, its_cause or "nobody")
        if its_cause is not None:
            self._change(alive, num_bytes)

    def _forget(self, key: int) -> None:
        self._change(self._alive.pop(key), 0)

    def _change(self, alive: _Alive, num_bytes: int) -> None:
        grown = num_bytes - alive.num_bytes
        alive.num_bytes = num_bytes
        self.num_bytes += grown
        self._by_cause[alive.cause] += grown
        if grown > 0:
            self._note_peak(phase())

    def _note_peak(self, name: str) -> None:
        if name not in self.peaks or self.num_bytes > self.peaks[name].num_bytes:
            by_cause = {each: size for each, size in self._by_cause.items() if size}
            self.peaks[name] = Peak(self.num_bytes, by_cause)

    def _counted_resize(self):
        resize = self._resize

        def resize_(storage: torch.UntypedStorage, num_bytes: int):
            result = resize(storage, num_bytes)
            alive = self._alive.get(storage._cdata)
            if alive is not None:
                self._change(alive, num_bytes)
            return result

        return resize_


def _is_on_device(tensor: Tensor) -> bool:
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return device.type != "meta"
