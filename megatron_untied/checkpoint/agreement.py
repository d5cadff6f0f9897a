"""Ranks that succeed or fail together."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def on_every_rank(action: Callable[[], T]) -> T:
    """This rank's result of ``action``; raises on every rank what it raised on any.

    Collective over all ranks, so that none waits in a later collective for one that has failed.
    """
    result, failure = None, None
    try:
        result = action()
    except (ValueError, OSError) as error:
        failure = error
    if dist.is_initialized():
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        failure = failure or next((one for one in failures if one is not None), None)
    if failure is not None:
        raise failure
    return result


def same_on_every_rank(action: Callable[[], T], what: str) -> T:
    """The result of ``action``, checked to be every rank's.

    Raises:
        ValueError: on every rank, if the results differ; ``what`` says what they are.
    """
    result = on_every_rank(action)
    if dist.is_initialized():
        results = [None] * dist.get_world_size()
        dist.all_gather_object(results, result)
        for rank, other in enumerate(results):
            if other != results[0]:
                raise ValueError(
                    f"{what} is {results[0]} on rank 0 and {other} on rank {rank}; "
                    "all nodes must see the same file system there"
                )
    return result
