"""Fake tensors made faster: what allocates nothing need not go through all of FakeTensorMode.

A step of a long sequence is a million operations on tiles, most of them views and writes in place.
FakeTensorMode takes 0.1 ms for each.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

Shortcut = Callable[[Any, tuple, dict], Any]


def shortcut(func: torch._ops.OpOverload, args: tuple) -> Shortcut | None:
    """How to do ``func`` on these arguments without FakeTensorMode; None if it has to."""
    if args and isinstance(args[0], FakeTensor):
        return _kind(func)
    return None


@cache
def _kind(func: torch._ops.OpOverload) -> Shortcut | None:
    if func is torch.ops.prim.device.default:
        return _device
    schema = func._schema
    if func.namespace != "aten" or not schema.returns or func in _CHANGE_SIZE:
        return None
    alias = [each.alias_info for each in schema.returns]
    if any(info is None for info in alias):
        return None
    first = schema.arguments[0].alias_info
    if all(info.is_write for info in alias):
        # It writes into its first argument and returns that.
        return _in_place if len(alias) == 1 and first is not None and first.is_write else None
    return _view if first is not None and not first.is_write else None


_CHANGE_SIZE = {torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default}


def _device(func, args: tuple, kwargs: dict) -> torch.device:
    return args[0].fake_device


def _in_place(func, args: tuple, kwargs: dict) -> FakeTensor:
    return args[0]


def _view(func, args: tuple, kwargs: dict) -> FakeTensor | list[FakeTensor]:
    mode, device = args[0].fake_mode, args[0].fake_device
    with in_kernel_invocation_manager(mode):
        result = func(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        return FakeTensor(mode, result, device)
    return [FakeTensor(mode, each, device) for each in result]
