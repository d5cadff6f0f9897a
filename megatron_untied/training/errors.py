"""A user's mistakes, printed once instead of by every rank."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

from megatron_untied.training.initialize import Launch, UserError
from megatron_untied.training.liveness import listed_ranks
from megatron_untied.training.rendezvous import open_store

MEETING_SECONDS = 20.0
"""How long ranks with an error wait for others that may have the same one."""


@contextlib.contextmanager
def print_error_once(launch: Launch) -> Iterator[None]:
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
    """Print ``message`` on one of the ranks that have it; returns when all of them may exit.

    Ranks that have no error, or another one, make the line name those that have this one.
    """
    try:
        store = dist.PrefixStore("errors", open_store(launch))
    except (ValueError, dist.DistError):  # the error may be that ranks cannot meet
        if launch.local_rank == 0:
            _print(message)
        return
    with _last_words(message) as told, contextlib.suppress(dist.DistError):
        store.set(f"error of {launch.rank}", message)
        ranks = _ranks_with(message, store, launch.world_size)
        if ranks[0] == launch.rank:
            everywhere = len(ranks) == launch.world_size
            _print(message if everywhere else f"{message} [{listed_ranks(ranks)}]")
            store.set(f"told by {launch.rank}", "")
        _wait_until(lambda: store.check([f"told by {ranks[0]}"]))
        told.append(True)
        # A launcher ends the others when the first rank exits.
        store.add("leaving", 1)
        erring = len(_erring(store, launch.world_size))
        _wait_until(lambda: store.add("leaving", 0) >= erring)
        # Rank 0 may host the store: without it the others would end with torch's stack traces.
        if launch.rank:
            store.add("left", 1)
        else:
            _wait_until(lambda: store.add("left", 0) >= erring - 1)


@contextlib.contextmanager
def _last_words(message: str) -> Iterator[list[bool]]:
    """Print ``message`` if SIGTERM comes before something is added to the list.

    The launcher sends it when another rank has failed.
    """
    told: list[bool] = []

    def on_signal(*_: object) -> None:
        if not told:
            _print(message)
            os._exit(1)

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)


def _ranks_with(message: str, store: dist.Store, world_size: int) -> list[int]:
    _wait_until(lambda: len(_erring(store, world_size)) == world_size)
    erring = _erring(store, world_size)
    return [rank for rank in erring if store.get(f"error of {rank}").decode() == message]


def _erring(store: dist.Store, world_size: int) -> list[int]:
    return [rank for rank in range(world_size) if store.check([f"error of {rank}"])]


def _wait_until(condition: Callable[[], bool]) -> None:
    """At most ``MEETING_SECONDS``; signals are heeded meanwhile."""
    deadline = time.monotonic() + MEETING_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
