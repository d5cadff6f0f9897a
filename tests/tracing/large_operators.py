"""Every operator of a traced step that is given more than 2^31 elements, and who calls it.

A kernel that counts elements in 32 bits is wrong from there on, on a GPU alone. Two kinds of call:
``large``, an argument or result whose elements span more than 2^31, so the kernel's own indices
must be 64-bit; and ``far``, where each spans less but begins beyond 2^31 elements of its storage,
which only the pointer passed to the kernel must express. Views launch no kernel and are left out.
"""

import sys
from collections import defaultdict
from types import FrameType
from typing import Any
from unittest import mock

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from megatron_untied.cli.arguments import parse_arguments
from megatron_untied.tracing.fake_tensor_cache import FakeTensorCache
from megatron_untied.tracing.step import trace_step

LIMIT = 2**31
Calls = dict[str, dict[str, dict[str, str]]]
"""``large`` or ``far``, operator, file of the caller -> shape in the first call there."""

CODE = ("/megatron_untied/", "/megatron/core/", "/torch/distributed/fsdp/")


def large_calls(flags: str, world_size: int) -> Calls:
    """The calls in a step of rank 0. Run it in a process of its own, as every trace."""
    calls: Calls = {"large": defaultdict(dict), "far": defaultdict(dict)}
    original = FakeTensorCache.__call__

    def recorded(cache: FakeTensorCache, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        result = original(cache, func, args, kwargs)
        if func.namespace != "prim" and not is_view(func):
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
            largest = max(tensors, key=span, default=None)
            farthest = max(tensors, key=lambda x: x.storage_offset() + span(x), default=None)
            if largest is not None and span(largest) > LIMIT:
                calls["large"][str(func)].setdefault(caller(), describe(largest))
            elif farthest is not None and farthest.storage_offset() + span(farthest) > LIMIT:
                calls["far"][str(func)].setdefault(caller(), describe(farthest))
        return result

    with mock.patch.object(FakeTensorCache, "__call__", recorded):
        trace_step(parse_arguments(flags.split(), world_size=world_size), world_size=world_size)
    return {kind: dict(operators) for kind, operators in calls.items()}


def is_view(func: OpOverload) -> bool:
    """Whether ``func`` returns a part of its first argument and writes nothing."""
    returned = [value.alias_info for value in func._schema.returns]
    return not func._schema.is_mutable and bool(returned) and all(returned)


def span(x: Tensor) -> int:
    """Elements from the first to the last, gaps between them included."""
    if not x.numel():
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))


def describe(x: Tensor) -> str:
    """Shape, and where a view lies in its storage."""
    return f"{list(x.shape)}" + (f" at {x.storage_offset()}" if x.storage_offset() else "")


def caller() -> str:
    """File of the innermost frame of the model's, the layers' or FSDP2's code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/tracing/" not in name and any(code in name for code in CODE):
            for root in ("/megatron_untied/", "/site-packages/"):
                name = name.rpartition(root)[2]
            return name
        frame = frame.f_back
    return "autograd"
