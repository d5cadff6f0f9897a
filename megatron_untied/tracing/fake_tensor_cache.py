"""A cache that makes fake tensors faster: a long step is millions of operations on equal tiles.

FakeTensorMode takes 0.1 ms per operation. Here views and writes in place, which allocate nothing,
bypass it, and of any other operation it is asked once per combination of arguments: equal sizes,
strides and dtypes give equal results.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


@dataclass(frozen=True, slots=True)
class _Layout:
    """Everything that defines a fake tensor with a storage of its own."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class FakeTensorCache:
    """Calls operations under a FakeTensorMode that is active."""

    def __init__(self, mode: FakeTensorMode):
        self._mode = mode
        self._results: dict[Hashable, list[_Layout | None] | None] = {}
        """By operation and arguments; None where results alias an argument."""
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        self._meta_tensors = _MetaTensors(mode)

    def __call__(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        """What ``func(*args, **kwargs)`` returns under the mode."""
        first = args[0] if args else None
        # Subclasses and factory functions, which are few, take FakeTensorMode's own way.
        if type(first) is not FakeTensor:
            return func(*args, **kwargs)
        kind = _kind(func)
        if kind == "device":  # more than half of all calls: autograd asks for it at every view
            return first._fake_device
        if kind == "in place":  # nothing to compute: a fake tensor has no values
            return first
        if kind == "nothing":
            return None
        if kind == "view":
            return self._view(func, args, kwargs)
        if kind == "function":
            return self._function(func, args, kwargs)
        return func(*args, **kwargs)

    def _view(self, func: OpOverload, args: tuple, kwargs: dict) -> FakeTensor | list[FakeTensor]:
        """Runs ``func`` on the meta tensors alone, so that the result shares their storage."""
        with self._meta_tensors:
            result = func(*args, **kwargs)
        device = args[0]._fake_device
        if isinstance(result, Tensor):
            return self._fake(result, device)
        return [self._fake(view, device) for view in result]

    def _function(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        # A key holds no fake tensor: one that the cache kept alive would count as live bytes.
        key = func, _key(args), _key(kwargs.items())
        if key not in self._results:
            results = func(*args, **kwargs)
            self._results[key] = _layouts(results, args)
            return results
        layouts = self._results[key]
        if layouts is None:  # a result is an argument, such as ``to`` without a conversion
            return self._view(func, args, kwargs)
        results: list[FakeTensor | None] = []
        for layout in layouts:
            if layout is None:
                results.append(None)
                continue
            with self._meta_tensors:
                meta = torch.empty_strided(
                    layout.size, layout.stride, dtype=layout.dtype, device="meta"
                )
            results.append(self._fake(meta, layout.device))
        return tuple(results) if len(func._schema.returns) > 1 else results[0]

    def _fake(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """``FakeTensor(mode, meta, device)`` in a third of the time."""
        if device not in self._attributes:
            fake = FakeTensor(self._mode, meta, device)
            self._attributes[device] = dict(fake.__dict__)
            return fake
        # The constructor checks its arguments and sets the same attributes one by one.
        fake = Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        fake.__dict__.update(self._attributes[device])
        return fake


@dataclass
class _MetaTensors:
    """While entered, fake tensors are the meta tensors that they are made of.

    torch's ``in_kernel_invocation_manager``, which as a generator takes longer than an operation.
    """

    mode: FakeTensorMode

    def __enter__(self) -> None:
        self._guards = torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard()
        for guard in self._guards:
            guard.__enter__()
        self.mode.in_kernel_invocation = True
        torch._C._set_meta_in_tls_dispatch_include(True)

    def __exit__(self, *exception: object) -> None:
        self.mode.in_kernel_invocation = False
        for guard in reversed(self._guards):  # they restore thread-local state as a stack
            guard.__exit__(*exception)


Kind = Literal["device", "in place", "nothing", "view", "function"]

_CHANGE_SIZE = {torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default}
_SPECIAL_TAGS = {
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.inplace_view,
}


@cache
def _kind(func: OpOverload) -> Kind | None:
    """What ``func`` does with its first argument; None for what only FakeTensorMode can do."""
    if func is torch.ops.prim.device.default:
        return "device"
    if func.namespace not in ("aten", "megatron_untied") or func in _CHANGE_SIZE:
        return None
    # Results that depend on values or that change the metadata of an argument cannot be cached.
    if _SPECIAL_TAGS & set(func.tags):
        return None
    schema = func._schema
    returned = [value.alias_info for value in schema.returns]
    first = schema.arguments[0].alias_info
    if not schema.is_mutable:
        if any(info is not None for info in returned):
            return "view" if first is not None else None
        return "function" if returned else None
    # An out= argument is not the first one: such a write is left to FakeTensorMode.
    if first is None or not first.is_write:
        return None
    return "in place" if len(returned) == 1 else "nothing" if not returned else None


def may_allocate(func: OpOverload) -> bool:
    """Whether a tensor that ``func`` returns may have other memory than its arguments."""
    if func.namespace == "c10d":  # a collective writes to tensors that it is given
        return False
    return _kind(func) in (None, "function")


def _key(values: Iterable[Any]) -> tuple[Hashable, ...]:
    """A hashable description of arguments, in which tensors stand for their layout."""
    key: list[Hashable] = []
    for value in values:
        if isinstance(value, FakeTensor):
            key.append((value.shape, value.stride(), value.dtype, value.fake_device))
        elif isinstance(value, (list, tuple)):
            key.append(_key(value))
        else:
            key.append((type(value), value))  # 1, 1.0 and True are equal but not the same
    return tuple(key)


def _layouts(results: Any, args: Sequence[Any]) -> list[_Layout | None] | None:
    """The layouts of ``results``; None if any of them aliases an argument."""
    results = results if isinstance(results, (list, tuple)) else [results]
    storages = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
    layouts: list[_Layout | None] = []
    for x in results:
        if not isinstance(x, FakeTensor):
            layouts.append(None)
            continue
        if x.untyped_storage()._cdata in storages:
            return None
        layouts.append(_Layout(x.shape, x.stride(), x.dtype, x.fake_device))
    return layouts
