"""Ending a run early: on a signal, after a time, or at an interval.

Python calls a signal handler between two bytecodes of the main thread. During a collective or a
kernel of a long step, that may be hours later. The C part of the handler writes the number of the
signal to a socket at once, and a thread reads it there.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from select import select
from types import FrameType

import torch
import torch.distributed as dist

from megatron_untied.config.run import LoopConfig, RunConfig
from megatron_untied.platform import device
from megatron_untied.step_progress import StepPosition, StepProgress
from megatron_untied.training.initialize import Launch
from megatron_untied.training.liveness import Heartbeat
from megatron_untied.training.reporting import Reporter

WATCHED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LISTEN_SECONDS = 1.0
"""How often rank 0 checks the store for signals of other ranks."""
UNWIND_SECONDS = 5.0
"""How long the training thread may take to unwind and close its files before ``os._exit``."""


class StepDropped(Exception):
    """All ranks have abandoned a step at the same point; weights and moments are as before it."""


class StepDrop:
    """Lets all ranks abandon the step in flight at one mark of their :class:`StepProgress`.

    Until then it costs one comparison per mark. After :meth:`request` on any rank, the signal
    thread of each rank holds its training thread at the next mark and publishes the last one. The
    training threads stop at the first mark after all of those, so every collective that one rank
    has begun is completed by all. Publishing never waits for a training thread, which may be in a
    collective with one that is held.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        progress: StepProgress,
        timeout: timedelta,
    ):
        """``store``: for the signal thread alone. ``timeout``: of a collective."""
        self._store, self._progress, self._timeout = store, progress, timeout
        self._keys = [f"mark of {each}" for each in range(world_size)]
        self._own = self._keys[rank]
        self._holds = self._is_wanted = self._published = False
        self._agreed = threading.Event()
        self._last_mark = 0  # of all ranks; valid once agreed
        progress.on_enter = self._on_enter

    def request(self) -> None:
        """Hold this rank at its next mark and ask all to drop the step; for any thread."""
        self._holds = self._is_wanted = True

    def poll(self) -> None:
        """Take part in the agreement, if any rank has asked for it; for the signal thread."""
        if self._agreed.is_set():
            return
        if self._is_wanted:
            self._store.set("drop", "")
        elif not self._store.check(["drop"]):
            return
        # In this order: a mark that the training thread passes unheld is in what is read next.
        self._holds = True
        if not self._published:
            self._store.set(self._own, str(self._progress.marks))
            self._published = True
        if self._store.check(self._keys):
            self._last_mark = max(int(mark) for mark in self._store.multi_get(self._keys))
            self._agreed.set()

    def _on_enter(self, mark: int) -> None:
        if not self._holds:
            return
        if not self._agreed.wait(self._timeout.total_seconds()):
            raise RuntimeError("timed out: not all ranks answered that the step is to be dropped")
        if mark > self._last_mark:
            raise StepDropped


class SignalWatch:
    """Handles SIGINT, SIGTERM and SIGHUP while the context is entered, in the main thread.

    By default a signal ends this process with status 128 + its number, and the first rank that
    receives it prints one line. With ``announce``, SIGTERM and SIGHUP are stored in
    :attr:`postponed` instead, and rank 0 announces the first of them on any rank. A signal that was
    ignored when the process started stays ignored.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        *,
        advice: Callable[[], str],
        announce: Callable[[str], None] | None = None,
        drop: StepDrop | None = None,
        drops: bool = False,
    ):
        """Prepare the handlers.

        Args:
            store: shared by all ranks. This connection must not be used by another thread.
            rank: of this process.
            advice: returns the text after "SIGINT received on rank 0: exiting now; ".
            announce: called on rank 0, in another thread, with "SIGTERM received on rank 1".
            drop: drops the step in flight when that is requested.
            drops: whether a postponed signal requests it; otherwise the step is finished.
        """
        self._store, self._rank = store, rank
        self._advice, self._announce, self.drop, self._drops = advice, announce, drop, drops
        # SIGINT is never postponed: at a terminal, a step of hours is too long to wait for.
        self._postponable = () if announce is None else (signal.SIGTERM, signal.SIGHUP)
        self._announced = False
        self._ending = 0  # number of the signal that ends this process
        self.postponed = 0
        """Number of the signal that takes effect at the end of the step; 0 for none."""

    def __enter__(self) -> "SignalWatch":
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)  # required by set_wakeup_fd
        self._fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        handled = [n for n in WATCHED_SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._on_signal) for number in handled}
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._left.set()
        if not self._ending:  # otherwise a second signal would interrupt the exit with a traceback
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd)
        # Forked data workers hold copies of the socket, so closing it would not end the thread.
        self._writer.shutdown(socket.SHUT_WR)
        # Not for ever: with a drop it may be in a call to a store that is cut off.
        self._thread.join(UNWIND_SECONDS)
        self._writer.close()
        self._reader.close()
        if self._ending:  # the handler's SystemExit may have been replaced by another exception
            raise SystemExit(128 + self._ending) from error

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number in self._postponable:
            self.postponed = number
        elif not self._ending:
            self._ending = number
            raise SystemExit(128 + number)

    def _run(self) -> None:
        while True:
            announces = self._rank == 0 and self._announce is not None and not self._announced
            listens = announces or self.drop is not None
            # These wake up to look into the store; the other ranks sleep until a signal.
            ready, _, _ = select([self._reader], [], [], LISTEN_SECONDS if listens else None)
            numbers = self._reader.recv(64) if ready else b""  # one byte per signal
            if ready and not numbers:  # the writer was shut down
                return
            # The descriptor gets every signal that has a handler in Python, those of other code
            # too.
            for number in sorted(set(numbers) & set(self._previous)):
                self._handle(number)
            if announces:
                self._announce_of_any_rank()
            if self.drop is not None:
                with contextlib.suppress(dist.DistError):  # the next collective reports that
                    self.drop.poll()

    def _handle(self, number: int) -> None:
        if number in self._postponable:
            self.postponed = number
            self._first("postponed", number)
            if self._drops:
                self.drop.request()
            return
        if self._first("immediate", number) == [number, self._rank]:
            name = signal.Signals(number).name
            sys.stderr.write(
                f"{name} received on rank {self._rank}: exiting now; {self._advice()}\n"
            )
            sys.stderr.flush()
        # The main thread may be in C++ code, where the handler's SystemExit cannot reach it.
        if not self._left.wait(UNWIND_SECONDS):
            sys.stdout.flush()
            os._exit(128 + number)

    def _first(self, kind: str, number: int) -> list[int]:
        """Number and rank of the first signal of ``kind`` on any rank, recording this one."""
        mine = [number, self._rank]
        try:
            # Atomic, so exactly one rank is the first.
            return json.loads(self._store.compare_set(f"first {kind}", "", json.dumps(mine)))
        except dist.DistError:  # without the store, each rank prints its own signal
            return mine

    def _announce_of_any_rank(self) -> None:
        try:
            if not self._store.check(["first postponed"]):
                return
            number, rank = json.loads(self._store.get("first postponed"))
        except dist.DistError:  # the store's host has exited; the next collective reports that
            return
        self._announced = True
        self._announce(f"{signal.Signals(number).name} received on rank {rank}")


class EarlyExit:
    """Decides after each iteration whether the run ends early, alike on all ranks."""

    def __init__(self, loop: LoopConfig, signals: SignalWatch):
        self._loop, self._signals = loop, signals
        self._began = time.monotonic()

    def signal(self) -> str | None:
        """Name of the signal that is postponed on any rank, or None; collective over all ranks."""
        if not self._loop.exit_signal_handler:
            return None
        number = _max_over_ranks(self._signals.postponed)
        return signal.Signals(number).name if number else None

    def reason(self, iteration: int) -> str | None:
        """Reason to exit after ``iteration``, or None to continue; collective over all ranks."""
        if name := self.signal():
            return name
        limit, interval = self._loop.exit_duration_in_mins, self._loop.exit_interval
        minutes = (time.monotonic() - self._began) / 60
        if limit is not None and _max_over_ranks(minutes > limit):  # clocks of ranks differ
            return f"--exit-duration-in-mins {limit:g}"
        if interval is not None and iteration % interval == 0:
            return f"--exit-interval {interval}"
        return None


def _max_over_ranks(number: int) -> int:
    """The greatest ``number`` of all ranks; collective over them."""
    greatest = torch.tensor(int(number), device=device.current_device())
    dist.all_reduce(greatest, op=dist.ReduceOp.MAX)
    return int(greatest)


def watch_training(
    config: RunConfig,
    store: dist.Store,
    launch: Launch,
    report: Reporter,
    heartbeat: Heartbeat,
    progress: StepProgress,
) -> SignalWatch:
    """The signal handlers of a training loop.

    With ``--exit-signal-handler``, SIGTERM and SIGHUP take effect at the end of the step, and rank
    0 prints at once what happens next and how long the step still takes. With
    ``--save-on-signal-now`` too, they end the step within seconds, without its result. So does a
    disk of saved activations that fails.
    """
    drops, drop = config.loop.save_on_signal_now, None

    def announce(signaled: str) -> None:
        position, time_left = heartbeat.time_left()
        follows = what_follows(position, config.checkpoint.save, time_left, drops=drops)
        report.say(f"{signaled}: {follows}")

    if drops or config.memory.activation_disk:
        timeout = timedelta(minutes=config.distributed.timeout_minutes)
        drop = StepDrop(store, launch.rank, launch.world_size, progress, timeout)
    return SignalWatch(
        store,
        launch.rank,
        advice=report.summary.resume_advice,
        announce=announce if config.loop.exit_signal_handler else None,
        drop=drop,
        drops=drops,
    )


def what_follows(
    position: StepPosition, save: str | None, time_left: timedelta | None, *, drops: bool = False
) -> str:
    """Text on what happens after a postponed signal, and when.

    Args:
        position: of this rank.
        save: folder of checkpoints, if any.
        time_left: estimated time to the end of the step, if known.
        drops: the step is not finished.
    """
    if position.step == StepPosition().step:
        return "exiting before the first iteration"
    if drops and not position.step.startswith("checkpoint"):
        return f"dropping {position.step}, then saving what was done before to {save} and exiting"
    then = "then exiting"
    if not position.step.startswith("checkpoint"):
        then = f"then saving to {save} and exiting" if save else "then exiting without --save"
    left = f"; about {time_left} left" if time_left is not None else ""
    return f"finishing {position.step}, {then}{left}"
