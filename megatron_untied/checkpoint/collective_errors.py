"""Ranks that succeed or fail together."""

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_untied.platform import device

T = TypeVar("T")

Gather = Callable[[Any], list[Any]]
"""This rank's value -> every rank's, in their order; collective over all ranks."""


def gather_objects(value: Any) -> list[Any]:
    """:data:`Gather` in the process group; without one there is a single rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_rare(value: Any) -> list[Any]:
    """The same for what is nearly always None: costs an all-reduce of a number where all are."""
    if dist.is_initialized():
        there = torch.tensor(value is not None, dtype=torch.int32, device=device.current_device())
        dist.all_reduce(there)
        if not there:
            return [None] * dist.get_world_size()
    return gather_objects(value)


def raise_on_all_ranks(action: Callable[[], T], gather: Gather = gather_rare) -> T:
    """This rank's result of ``action``; raises on every rank what it raised on the first that did.

    Collective over all ranks, so that none waits in a later collective for one that has failed. An
    error that not all ranks have names the first rank that has it, and its node.
    """
    result, failure = None, None
    try:
        result = action()
    except (ValueError, OSError) as error:
        failure = error
    failures = gather(failure and (failure, socket.gethostname()))
    if any(failures):
        raise _shared_failure(failure, failures)
    return result


def _shared_failure(
    mine: Exception | None, failures: list[tuple[Exception, str] | None]
) -> Exception:
    """One failure, with the same message on every rank."""
    rank, (first, host) = next((rank, each) for rank, each in enumerate(failures) if each)
    if all(each and str(each[0]) == str(first) for each in failures):
        return mine
    # Subclasses of ValueError may not be made from a message alone; those of OSError are.
    kind = type(first) if isinstance(first, OSError) else ValueError
    place = mine.__traceback__ if mine is not None else None
    return kind(f"{first} (rank {rank} on {host})").with_traceback(place)


def same_on_all_ranks(action: Callable[[], T], what: str, gather: Gather = gather_objects) -> T:
    """The result of ``action``, checked to be every rank's.

    Raises:
        ValueError: on every rank, if the results differ; ``what`` says what they are.
    """
    result = raise_on_all_ranks(action, gather)
    results = gather(result)
    for rank, other in enumerate(results):
        if other != results[0]:
            raise ValueError(
                f"{what} is {results[0]} on rank 0 and {other} on rank {rank}; "
                "all nodes must see the same file system there"
            )
    return result
