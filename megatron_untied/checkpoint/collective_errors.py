"""Makes ranks succeed or fail together: an error on one rank is raised on all of them.

Otherwise the other ranks would wait in their next collective until it times out.
"""

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_untied.platform import device

T = TypeVar("T")

Gather = Callable[[Any], list[Any]]
"""This rank's value -> the values of all ranks in rank order; collective over all ranks."""


def gather_objects(value: Any) -> list[Any]:
    """A :data:`Gather` over the default process group; without one there is a single rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather_rare(value: Any) -> list[Any]:
    """The same for values that are nearly always None: then it costs one all-reduce of a number."""
    if dist.is_initialized():
        is_given = torch.tensor(
            value is not None, dtype=torch.int32, device=device.current_device()
        )
        dist.all_reduce(is_given)  # all_gather_object costs two collectives and pickling
        if not is_given:
            return [None] * dist.get_world_size()
    return gather_objects(value)


def raise_on_all_ranks(action: Callable[[], T], gather: Gather = gather_rare) -> T:
    """This rank's result of ``action``; raises on every rank what it raised on the first that did.

    Collective over all ranks. An error that some ranks do not have names the first rank that has
    it, and its node.
    """
    result, failure = None, None
    try:
        result = action()
    # Not Exception: a bug should end this rank at once with its own traceback.
    except (ValueError, OSError) as error:
        failure = error
    failures = gather(failure and (failure, socket.gethostname()))
    if not any(failures):
        return result
    rank, (first, host) = next((r, failure) for r, failure in enumerate(failures) if failure)
    if all(failure and str(failure[0]) == str(first) for failure in failures):
        raise failure  # the same error everywhere needs no rank
    # A subclass of ValueError may need more than a message, UnicodeDecodeError for example.
    kind = type(first) if isinstance(first, OSError) else ValueError
    traceback = failure.__traceback__ if failure is not None else None
    raise kind(f"{first} (rank {rank} on {host})").with_traceback(traceback)


def same_on_all_ranks(action: Callable[[], T], what: str, gather: Gather = gather_objects) -> T:
    """The result of ``action``, which must be the same on all ranks.

    Raises:
        ValueError: on every rank, if the results differ; ``what`` is their name in the message.
    """
    result = raise_on_all_ranks(action, gather)
    # Rank 0 is not simply followed: a rank whose folder differs would read other files later.
    results = gather(result)
    for rank, other in enumerate(results):
        if other != results[0]:
            raise ValueError(
                f"{what} is {results[0]} on rank 0 and {other} on rank {rank}; "
                "all nodes must see the same file system there"
            )
    return result
