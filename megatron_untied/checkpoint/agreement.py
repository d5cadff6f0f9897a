"""Ranks that succeed or fail together."""

import socket
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_untied.platform import device

T = TypeVar("T")


def on_every_rank(action: Callable[[], T]) -> T:
    """This rank's result of ``action``; raises on every rank what it raised on any.

    Collective over all ranks, so that none waits in a later collective for one that has failed.
    Costs one all-reduce of a number where all succeed. An error that not all ranks have names the
    first rank that has it, and its node.
    """
    result, failure = None, None
    try:
        result = action()
    except (ValueError, OSError) as error:
        failure = error
    if not dist.is_initialized():
        if failure is not None:
            raise failure
        return result
    failed = torch.tensor(failure is not None, dtype=torch.int32, device=device.current_device())
    dist.all_reduce(failed)
    if failed:
        raise _shared_failure(failure)
    return result


def _shared_failure(mine: Exception | None) -> Exception:
    """The same failure on every rank, gathered from all; ``mine`` is this rank's."""
    failures = [None] * dist.get_world_size()
    dist.all_gather_object(failures, (mine, socket.gethostname()))
    messages = {str(failure) for failure, _ in failures}
    if len(messages) == 1:
        return mine
    rank, (first, host) = next(
        (rank, each) for rank, each in enumerate(failures) if each[0] is not None
    )
    # Subclasses of ValueError may not be made from a message alone; those of OSError are.
    kind = type(first) if isinstance(first, OSError) else ValueError
    place = mine.__traceback__ if mine is not None else None
    return kind(f"{first} (rank {rank} on {host})").with_traceback(place)


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
