"""A user's mistakes, printed once instead of by every rank."""

import contextlib
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from megatron_untied.training.initialize import Launch, UserError
from megatron_untied.training.meeting import open_store
from megatron_untied.training.whereabouts import listed_ranks

MEETING_SECONDS = 10.0
"""How long ranks with an error wait for others that may have the same one."""


@contextlib.contextmanager
def errors_told_once(launch: Launch) -> Iterator[None]:
    """Ends the process with status 1 on a :class:`UserError`, which the lowest such rank prints.

    An interrupt from the keyboard ends it with status 130.
    """
    try:
        yield
    except UserError as error:
        tell_once(str(error), launch)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        if launch.rank == 0:
            _print("interrupted before training")
        raise SystemExit(130) from None


def tell_once(message: str, launch: Launch) -> None:
    """Print ``message`` on one of the ranks that have it; returns when it is printed.

    Ranks that have no error, or another one, make the line name those that have this one.
    """
    try:
        store = dist.PrefixStore("errors", open_store(launch))
    except (ValueError, dist.DistError):  # the error may be that ranks cannot meet
        if launch.local_rank == 0:
            _print(message)
        return
    store.set(f"error of {launch.rank}", message)
    ranks = _ranks_with(message, store, launch.world_size)
    if ranks[0] == launch.rank:
        everywhere = len(ranks) == launch.world_size
        _print(message if everywhere else f"{message} [{listed_ranks(ranks)}]")
        store.set(f"told by {launch.rank}", "")
    with contextlib.suppress(dist.DistError):
        store.wait([f"told by {ranks[0]}"], timedelta(seconds=MEETING_SECONDS))
        store.add("leaving", 1)
        if launch.rank == 0:  # it may be the host of the store
            _wait_until_all_leave(store, launch.world_size)


def _ranks_with(message: str, store: dist.Store, world_size: int) -> list[int]:
    keys = [f"error of {rank}" for rank in range(world_size)]
    with contextlib.suppress(dist.DistError):
        store.wait(keys, timedelta(seconds=MEETING_SECONDS))
    told = {rank: store.get(key) for rank, key in enumerate(keys) if store.check([key])}
    return [rank for rank, other in told.items() if other.decode() == message]


def _wait_until_all_leave(store: dist.Store, world_size: int) -> None:
    erring = sum(store.check([f"error of {rank}"]) for rank in range(world_size))
    deadline = time.monotonic() + MEETING_SECONDS
    while store.add("leaving", 0) < erring and time.monotonic() < deadline:
        time.sleep(0.05)


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
