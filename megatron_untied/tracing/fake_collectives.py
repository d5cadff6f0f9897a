"""What megatron-core does that ranks without numbers and without each other cannot."""

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


@contextlib.contextmanager
def ranks_like_this_one() -> Iterator[None]:
    """Others are asked for objects (parameter groups): every one has what this rank has.

    megatron-core's generators of random numbers are replaced by its own ones that draw nothing,
    and its coalesced collectives by single ones.
    """

    def all_gather_object(objects: list[Any], mine: Any, group: Any = None) -> None:
        objects[:] = [mine] * len(objects)

    model_parallel_cuda_manual_seed(0, inference_rng_tracker=True, force_reset_rng=True)
    with (
        patch.object(dist, "all_gather_object", all_gather_object),
        patch.object(
            param_and_grad_buffer, "_coalescing_manager", lambda *_, **__: contextlib.nullcontext()
        ),
    ):
        yield


@contextlib.contextmanager
def fsdp_categories() -> Iterator[None]:
    """Attributes what torch's FSDP2 allocates: gathered weights, and gradients being reduced."""
    with contextlib.ExitStack() as patches:
        for name, category in (
            ("unshard", MemoryCategory.GATHERED),
            ("wait_for_unshard", MemoryCategory.GATHERED),
            ("post_backward", MemoryCategory.WEIGHT_GRADIENTS),
        ):
            method = _attributed(getattr(FSDPParamGroup, name), category)
            patches.enter_context(patch.object(FSDPParamGroup, name, method))
        yield


def _attributed(method: Callable[..., Any], category: MemoryCategory) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with allocating(category):
            return method(*args, **kwargs)

    return call


def update(sharding: Sharding) -> None:
    """The optimizer's step; megatron-core's without the norm, which it takes to the host."""
    if not isinstance(sharding, MegatronSharding):
        sharding.step()
        return
    for group in sharding.param_groups:
        group["fused"] = True  # as transformer-engine's and apex', which it has on GPUs
    sharding.finish_gradients()
    sharding.optimizer.prepare_grads()
    sharding.optimizer.step_with_ready_grads()


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
