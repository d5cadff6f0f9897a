"""Printing an error of the user once per run instead of once per rank.

Ranks with an error wait for each other in the store, because several ranks usually fail with the
same message. The lowest rank that has a message prints it.
"""

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

ERROR_WAIT_SECONDS = 20.0
"""How long a rank with an error waits for others that may have the same one."""


@contextlib.contextmanager
def print_error_once(launch: Launch) -> Iterator[None]:
    """Exit with status 1 on a :class:`UserError`, which one rank prints; with 130 on Ctrl-C."""
    try:
        yield
    except UserError as error:
        print_once(str(error), launch)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        if launch.rank == 0:
            sys.stderr.write("interrupted before training\n")
        raise SystemExit(130) from None


def print_once(message: str, launch: Launch) -> None:
    """Print ``message`` on the lowest rank that has it; return when all of them may exit.

    If some ranks have no error, or another one, the line lists the ranks that have this one.
    """
    try:
        store = dist.PrefixStore("errors", open_store(launch))
    except (ValueError, dist.DistError):  # the error may be that there is no store
        if launch.local_rank == 0:  # once per node: without a store nodes cannot agree
            sys.stderr.write(f"{message}\n")
        return

    def failed_ranks() -> list[int]:
        return [r for r in range(launch.world_size) if store.check([f"error of {r}"])]

    with _print_on_sigterm(message) as printed, contextlib.suppress(dist.DistError):
        store.set(f"error of {launch.rank}", message)
        _wait_until(lambda: len(failed_ranks()) == launch.world_size)
        failed = failed_ranks()
        ranks = [rank for rank in failed if store.get(f"error of {rank}").decode() == message]
        if ranks[0] == launch.rank:
            where = "" if len(ranks) == launch.world_size else f" [{listed_ranks(ranks)}]"
            sys.stderr.write(f"{message}{where}\n")
            store.set(f"printed by {launch.rank}", "")
        _wait_until(lambda: store.check([f"printed by {ranks[0]}"]))
        printed.append(True)
        # A launcher terminates the others when the first rank exits.
        store.add("leaving", 1)
        num_failed = len(failed_ranks())
        _wait_until(lambda: store.add("leaving", 0) >= num_failed)
        # Rank 0 may host the store; if it exits first, the others print torch's stack traces.
        if launch.rank:
            store.add("left", 1)
        else:
            _wait_until(lambda: store.add("left", 0) >= num_failed - 1)


@contextlib.contextmanager
def _print_on_sigterm(message: str) -> Iterator[list[bool]]:
    """Print ``message`` if SIGTERM arrives while the yielded list is empty, then exit.

    A launcher sends SIGTERM when another rank has failed, so the message would be lost.
    """
    printed: list[bool] = []

    def on_signal(*_: object) -> None:
        if not printed:
            sys.stderr.write(f"{message}\n")
            os._exit(1)

    previous = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield printed
    finally:
        signal.signal(signal.SIGTERM, previous)


def _wait_until(condition: Callable[[], bool]) -> None:
    """Poll ``condition`` for at most ``ERROR_WAIT_SECONDS``."""
    deadline = time.monotonic() + ERROR_WAIT_SECONDS
    # Polling instead of store.wait(), in whose C++ code no signal handler of Python would run.
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
