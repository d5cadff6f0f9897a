"""Counts the bytes of tensors alive, over real and fake tensors alike.

A storage counts from the operation that made it until nothing holds it any more, at the size it
has: where ``resize_`` of a storage gives memory back (FSDP2, parking), that counts. What a kernel
allocates for itself is not seen, nor what an allocator adds to a request.

Under any such mode autograd sums gradients that meet out of place, where otherwise it may add in
place. In a streamed layer that is the size of a tile.
"""

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_iter

from megatron_untied.phases import AllocationObserver
from megatron_untied.step_progress import StepProgress
from megatron_untied.tracing.fake_tensor_cache import may_allocate


@dataclass(frozen=True, slots=True)
class Peak:
    """A moment when many bytes were alive."""

    num_bytes: int = 0
    by_cause: dict[str, int] = field(default_factory=dict)
    """Bytes by what was stated with :func:`.phases.allocating` where they were allocated, most
    first; what was not is named by its phase."""


@dataclass(slots=True)
class _Alive:
    reference: weakref.ref
    num_bytes: int
    cause: str


class LiveBytes(AllocationObserver):
    """While entered, counts the device memory of what operations make. Enter it once.

    Tensors on "meta" are host memory (see ``HostArena.for_tracing``), and so are those that
    :meth:`move_to_host` was told of; everything else is the device's.
    """

    def __init__(
        self,
        progress: StepProgress,
        call: Callable[[OpOverload, tuple, dict], Any] | None = None,
    ) -> None:
        """``progress`` is where the step states its phases.

        ``call`` runs an operation; see :class:`.fast_fakes.FastFakes`.
        """
        super().__init__()
        self._progress = progress
        self._call = call or (lambda func, args, kwargs: func(*args, **kwargs))
        self.num_bytes = 0
        """Alive now."""
        self.host_bytes = 0
        """Of tensors that were moved to the host."""
        self.peaks: dict[str, Peak] = {}
        """The highest moment of each phase; see :class:`.phases.Phase`."""
        self.timeline: list[tuple[str, int]] = []
        """Phase after phase, as they came: its name and its highest moment."""
        self._by_cause: Counter[str] = Counter()
        self._alive: dict[int, _Alive] = {}
        self._is_paused = False
        self._patches = contextlib.ExitStack()

    @property
    def peak_phase(self) -> str:
        """The phase with the highest of all moments."""
        return max(self.peaks, key=lambda name: self.peaks[name].num_bytes)

    def move_to_host(self, tensor: Tensor) -> None:
        """Take a tensor's memory, from now on, for the host's."""
        storage = tensor.untyped_storage()
        alive = self._alive.get(storage._cdata) or self._track(storage)
        self.host_bytes += alive.num_bytes
        self._change(alive, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and the guard would cost as much as an operation

    def __enter__(self) -> "LiveBytes":
        # FSDP2 and parking free memory by resizing storages, which no dispatcher sees.
        resize, shapes_of = torch.UntypedStorage.resize_, "_propagate_tensor_meta_non_cached"
        uncounted = self._uncounted(getattr(ShardingPropagator, shapes_of))
        for owner, name, method in (
            (torch.UntypedStorage, "resize_", self._counted_resize(resize)),
            # DTensor computes shapes with fake tensors of its own, which stand for no memory.
            (ShardingPropagator, shapes_of, uncounted),
        ):
            self._patches.enter_context(patch.object(owner, name, method))
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        self._patches.close()
        super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for each in types:
            if each is not FakeTensor and is_traceable_wrapper_subclass_type(each):
                return NotImplemented  # a DTensor: it comes back with its local tensor
        result = self._call(func, args, kwargs or {})
        if not self._is_paused and may_allocate(func):
            for tensor in tree_iter(result):
                if isinstance(tensor, Tensor) and _is_on_device(tensor):
                    self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        alive = self._alive.get(storage._cdata)
        if alive is None:
            self._track(storage)
        elif alive.num_bytes:  # 0: the host's, or given back
            self._change(alive, storage.nbytes())

    def _track(self, storage: torch.UntypedStorage) -> _Alive:
        key, cause = (
            storage._cdata,
            self.category or f"other, made in {self._progress.current_phase}",
        )
        reference = weakref.ref(storage, lambda _: self._forget(key))
        self._alive[key] = alive = _Alive(reference, 0, cause)
        self._change(alive, storage.nbytes())
        return alive

    def _forget(self, key: int) -> None:
        self._change(self._alive.pop(key), 0)

    def _change(self, alive: _Alive, num_bytes: int) -> None:
        grown = num_bytes - alive.num_bytes
        alive.num_bytes = num_bytes
        self.num_bytes += grown
        self._by_cause[alive.cause] += grown
        if grown > 0:
            self._note_peak(self._progress.current_phase)

    def _note_peak(self, name: str) -> None:
        if not self.timeline or self.timeline[-1][0] != name:
            self.timeline.append((name, self.num_bytes))
        elif self.num_bytes > self.timeline[-1][1]:
            self.timeline[-1] = name, self.num_bytes
        if name not in self.peaks or self.num_bytes > self.peaks[name].num_bytes:
            by_cause = {each: size for each, size in self._by_cause.most_common() if size}
            self.peaks[name] = Peak(self.num_bytes, by_cause)

    def _uncounted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any) -> Any:
            outer, self._is_paused = self._is_paused, True
            try:
                return method(*args)
            finally:
                self._is_paused = outer

        return call

    def _counted_resize(self, resize: Callable[..., Any]) -> Callable[..., Any]:
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
