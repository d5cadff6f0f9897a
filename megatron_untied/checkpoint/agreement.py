"""Ranks that succeed or fail together."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

Gather = Callable[[Any], list[Any]]
"""This rank's value -> every rank's, in their order; collective over all ranks."""


def gather_objects(value: Any) -> list[Any]:
    """:data:`Gather` in the process group; without one there is a single rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_every_rank(action: Callable[[], T], gather: Gather = gather_objects) -> T:
    """This rank's result of ``action``; raises on every rank what it raised on the first that did.

    Collective over all ranks, so that none waits in a later collective for one that has failed.
    """
    result, failure = None, None
    try:
        result = action()
    except (ValueError, OSError) as error:
        failure = error
    failures = [one for one in gather(failure) if one is not None]
    if failures:
        # This rank's own error, where it is the same, knows the place in the code.
        own = str(failure) == str(failures[0])
        raise raised_everywhere(failure if own else failures[0])
    return result


def same_on_every_rank(action: Callable[[], T], what: str, gather: Gather = gather_objects) -> T:
    """The result of ``action``, checked to be every rank's.

    Raises:
        ValueError: on every rank, if the results differ; ``what`` says what they are.
    """
    result = on_every_rank(action, gather)
    results = gather(result)
    for rank, other in enumerate(results):
        if other != results[0]:
            raise raised_everywhere(
                ValueError(
                    f"{what} is {results[0]} on rank 0 and {other} on rank {rank}; "
                    "all nodes must see the same file system there"
                )
            )
    return result


def raised_everywhere(error: E) -> E:
    """``error``, marked as one that every rank raises alike: rank 0 alone needs to print it."""
    error.raised_everywhere = True
    return error
