"""Counts the bytes of tensors alive, over real and fake tensors alike.

A storage counts from the operation that made it until its last reference is gone, at its current
size: where ``resize_`` of a storage frees memory (FSDP2), the count follows. Not counted
are what a kernel allocates for itself, but for the lookup's backward and attention, and what an
allocator adds to a request.

Under any dispatch mode autograd sums gradients that meet out of place, where otherwise it may add
in place. In a streamed layer that is the size of a tile.
"""

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
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

from megatron_untied.phases import AllocationObserver, MemoryCategory, allocating
from megatron_untied.planner.weights import lookup_scratch_bytes
from megatron_untied.step_progress import StepProgress
from megatron_untied.tracing.fake_tensor_cache import may_allocate


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of a phase when the most bytes were alive."""

    num_bytes: int = 0
    by_category: dict[str, int] = field(default_factory=dict)
    """Bytes by what was stated with :func:`.phases.allocating` where they were allocated, most
    first; bytes without a statement are named by their phase."""


@dataclass(slots=True)
class _Alive:
    reference: weakref.ref
    """Its callback ends the count, so it must live as long as the storage."""
    num_bytes: int
    category: str


class LiveBytes(AllocationObserver):
    """While entered, counts the device memory of what operations make. Enter it once.

    Tensors on "meta" are host memory (see ``HostArena.for_tracing``), and so are those given to
    :meth:`move_to_host`; everything else is the device's.
    """

    def __init__(
        self,
        progress: StepProgress,
        call: Callable[[OpOverload, tuple, dict], Any] | None = None,
    ) -> None:
        """``progress`` is where the step states its phases.

        ``call(func, args, kwargs)`` runs an operation, such as a :class:`.FakeTensorCache`.
        """
        super().__init__()
        self._progress = progress
        self._call = call or (lambda func, args, kwargs: func(*args, **kwargs))
        self.num_bytes = 0
        """Alive now."""
        self.host_bytes = 0
        """Of tensors that were moved to the host."""
        self.peaks: dict[str, Peak] = {}
        """By phase; see :class:`.phases.Phase`."""
        self.timeline: list[tuple[str, int]] = []
        """The phases in the order of the step, one as often as it occurs: its name and peak."""
        self._by_category: Counter[str] = Counter()
        self._alive: dict[int, _Alive] = {}
        """By address of the storage, which is unique as long as the storage lives."""
        self._is_paused = False
        self._patches = contextlib.ExitStack()

    def move_to_host(self, tensor: Tensor) -> None:
        """Count a tensor's memory as the host's from now on."""
        storage = tensor.untyped_storage()
        alive = self._alive.get(storage._cdata) or self._track(storage, is_on_host=True)
        self.host_bytes += storage.nbytes()
        self._change(alive, 0)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing that is allocated inside."""
        outer, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = outer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and the guard would cost as much as an operation

    def __enter__(self) -> "LiveBytes":
        # FSDP2 frees memory by resizing storages, which bypasses the dispatcher.
        original_resize = torch.UntypedStorage.resize_
        # DTensor computes shapes with fake tensors of its own, which stand for no memory.
        shapes_of = "_propagate_tensor_meta_non_cached"
        original_shapes = getattr(ShardingPropagator, shapes_of)

        def counted_resize(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = original_resize(storage, num_bytes)
            alive = self._alive.get(storage._cdata)
            if alive is not None:
                self._change(alive, num_bytes)
            return result

        @functools.wraps(original_shapes)
        def uncounted_shapes(*args: Any) -> Any:
            with self.paused():
                return original_shapes(*args)

        patches = (
            (torch.UntypedStorage, "resize_", counted_resize),
            (ShardingPropagator, shapes_of, uncounted_shapes),
        )
        for owner, name, method in patches:
            self._patches.enter_context(patch.object(owner, name, method))
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        self._patches.close()
        super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor_class in types:
            is_wrapper = is_traceable_wrapper_subclass_type(tensor_class)
            if is_wrapper and tensor_class is not FakeTensor:
                return NotImplemented  # a DTensor: it comes back with its local tensor
        result = self._call(func, args, kwargs or {})
        if self._is_paused or not may_allocate(func):
            return result
        # Results only: what an operation allocates and frees inside is the kernel's own.
        for tensor in tree_iter(result):
            if not isinstance(tensor, Tensor):
                continue
            device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
            if device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            alive = self._alive.get(storage._cdata)
            if alive is None:
                self._track(storage)
            elif alive.num_bytes:  # 0: on the host, or freed by a resize
                self._change(alive, storage.nbytes())
        if func is torch.ops.aten.embedding_dense_backward.default:
            self._count_lookup_scratch(*args)
        return result

    def _count_lookup_scratch(
        self, gradient: Tensor, indices: Tensor, num_rows: int, *_: object
    ) -> None:
        """Count what CUDA's kernel makes beside the gradient that it returns, for a moment."""
        num_bytes = lookup_scratch_bytes(indices.numel(), num_rows, gradient.shape[-1])
        num_bytes += 0 if gradient.is_contiguous() else gradient.nbytes
        with allocating(MemoryCategory.WEIGHT_GRADIENTS):
            self._track(indices.new_empty(num_bytes, dtype=torch.uint8).untyped_storage())

    def _track(self, storage: torch.UntypedStorage, *, is_on_host: bool = False) -> _Alive:
        """Count ``storage`` until its last reference is gone."""
        key, category = storage._cdata, self.category
        category = category or f"other, made in {self._progress.current_phase}"
        # The callback runs in whatever thread drops the last reference.
        reference = weakref.ref(storage, lambda _: self._change(self._alive.pop(key), 0))
        self._alive[key] = alive = _Alive(reference, 0, category)
        if not is_on_host:
            self._change(alive, storage.nbytes())
        return alive

    def _change(self, alive: _Alive, num_bytes: int) -> None:
        """Set the size of one storage, and note a new peak of the phase."""
        growth = num_bytes - alive.num_bytes
        alive.num_bytes = num_bytes
        self.num_bytes += growth
        self._by_category[alive.category] += growth
        if growth <= 0:  # less memory is no peak; a phase that only frees has none of its own
            return
        name = self._progress.current_phase
        if not self.timeline or self.timeline[-1][0] != name:
            self.timeline.append((name, self.num_bytes))
        elif self.num_bytes > self.timeline[-1][1]:
            self.timeline[-1] = name, self.num_bytes
        if name not in self.peaks or self.num_bytes > self.peaks[name].num_bytes:
            by_category = {
                category: size for category, size in self._by_category.most_common() if size
            }
            self.peaks[name] = Peak(self.num_bytes, by_category)
