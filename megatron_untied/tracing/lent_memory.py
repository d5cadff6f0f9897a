"""Collectives on tensors that do not own their memory, so that a real step can be counted.

gloo's worker thread holds the tensors of a collective, and drops them some time after ``wait``
returned: on a busy machine later than what follows in the step. A count of live bytes would depend
on that thread.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only


def call_lending(func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """``func(*args, **kwargs)``; if it is a collective, on :func:`lent` tensors.

    The caller keeps the tensors until it has waited, as it has to for any collective.
    """
    if func.namespace == "c10d":
        args, kwargs = tree_map_only(Tensor, lent, (args, kwargs))
    return func(*args, **kwargs)


def lent(x: Tensor) -> Tensor:
    """The same values in the same memory of the CPU, which ends with ``x`` and not with this."""
    storage = x.untyped_storage()
    if not storage.nbytes():
        return x
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return x.new_empty(0).set_(whole, x.storage_offset(), x.shape, x.stride())
