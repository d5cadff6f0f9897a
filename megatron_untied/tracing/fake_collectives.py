"""Replacements for what a traced step cannot run: collectives, random numbers, host norms.

A traced rank has no peers and its tensors have no values. Here are the patches of megatron-core and
of torch's FSDP2 that a trace needs, the optimizer's step without a norm, and, for steps on real
tensors, collectives that keep no memory alive.
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._pytree import tree_map_only

from megatron_untied.phases import MemoryCategory, allocating
from megatron_untied.sharding.interface import Sharding
from megatron_untied.sharding.zero1 import MegatronSharding

_FSDP_CATEGORIES = {
    "unshard": MemoryCategory.GATHERED,
    "wait_for_unshard": MemoryCategory.GATHERED,
    "post_backward": MemoryCategory.WEIGHT_GRADIENTS,
}
"""By method of FSDP2's parameter group: what it allocates for."""


def _gather_own_object(objects: list[Any], mine: Any, group: Any = None) -> None:
    """``all_gather_object`` where every rank has the same as this one."""
    objects[:] = [mine] * len(objects)


@contextlib.contextmanager
def equal_ranks() -> Iterator[None]:
    """Answers for peers: gathered objects (parameter groups) are those of this rank.

    megatron-core's random number generators are replaced by its own that draw nothing, and its
    coalesced collectives by single ones.
    """
    model_parallel_cuda_manual_seed(0, inference_rng_tracker=True, force_reset_rng=True)
    with (
        patch.object(dist, "all_gather_object", _gather_own_object),
        patch.object(
            param_and_grad_buffer, "_coalescing_manager", lambda *_, **__: contextlib.nullcontext()
        ),
    ):
        yield


@contextlib.contextmanager
def fsdp_categories() -> Iterator[None]:
    """Attributes what torch's FSDP2 allocates: gathered weights, and gradients being reduced."""
    with contextlib.ExitStack() as patches:
        for name, category in _FSDP_CATEGORIES.items():
            original = getattr(FSDPParamGroup, name)
            # A partialmethod passes self on, as a plain partial would not.
            method = functools.partialmethod(_call_in_category, original, category)
            patches.enter_context(patch.object(FSDPParamGroup, name, method))
        yield


def _call_in_category(
    group: FSDPParamGroup,
    method: Callable[..., Any],
    category: MemoryCategory,
    *args: Any,
    **kwargs: Any,
) -> Any:
    with allocating(category):
        return method(group, *args, **kwargs)


def optimizer_step(sharding: Sharding) -> None:
    """The optimizer's step; megatron-core's without the norm, which it takes to the host."""
    if not isinstance(sharding, MegatronSharding):
        sharding.update(sharding.gradient_norm())
        return
    for group in sharding.param_groups:
        group["fused"] = True  # as transformer-engine's and apex', which it uses on GPUs
    sharding.finish_gradients()
    # The two halves of its step() without the norm and the clipping between them.
    sharding.optimizer.prepare_grads()
    sharding.optimizer.step_with_ready_grads()


def call_with_borrowed_memory(func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """``func(*args, **kwargs)``; collectives get tensors that :func:`borrow` the memory.

    A collective's work holds its tensors until a thread of gloo drops it, at any later time, so
    the count of bytes alive would depend on that thread. The caller keeps the memory until it has
    waited, as it must for any collective.
    """
    if func.namespace == "c10d":
        args, kwargs = tree_map_only(Tensor, borrow, (args, kwargs))
    return func(*args, **kwargs)


def borrow(x: Tensor) -> Tensor:
    """A tensor with the values, shape and CPU memory of ``x`` that does not keep the memory."""
    storage = x.untyped_storage()
    if not storage.nbytes():  # freed by a resize: there is no address to borrow
        return x
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return x.new_empty(0).set_(whole, x.storage_offset(), x.shape, x.stride())
