"""Signals that end a run, noticed while the training thread is in a collective or a kernel.

Python calls a signal's handler between two bytecodes of the main thread, which may be hours away.
The C part of the handler writes the signal's number to a socket at once; a thread reads it there.
"""

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
from megatron_untied.step_progress import StepPosition
from megatron_untied.training.initialize import Launch
from megatron_untied.training.liveness import Heartbeat
from megatron_untied.training.reporting import Reporter

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LISTEN_SECONDS = 1.0
"""How often rank 0 asks the store whether another rank was signaled."""
UNWIND_SECONDS = 5.0
"""How long the training thread may take to leave on its own, closing its files."""


class SignalWatch:
    """Watches SIGINT, SIGTERM and SIGHUP while it is entered, in the main thread.

    A signal ends this process with status 128 + its number and one line from the first rank that
    has it. With ``announce``, SIGTERM and SIGHUP do not: they are kept in :attr:`postponed`, and
    rank 0 announces the first of them, whichever rank has it. A signal that the process was started
    to ignore stays ignored.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        *,
        advice: Callable[[], str],
        announce: Callable[[str], None] | None = None,
    ):
        """What ranks tell each other goes through ``store``.

        Args:
            store: shared by all ranks; this connection is used by no other thread.
            rank: this one.
            advice: what follows "SIGINT received on rank 0: exiting now; ".
            announce: is given "SIGTERM received on rank 1" on rank 0, in another thread.
        """
        self._store, self._rank = store, rank
        self._advice, self._announce = advice, announce
        self._announced = False
        self._ending = 0  # number of the signal
        self.postponed = 0
        """Number of the signal that waits for the end of the step; 0 for none."""

    def __enter__(self) -> "SignalWatch":
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        heeded = [number for number in WATCHED if signal.getsignal(number) != signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._on_signal) for number in heeded}
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._left.set()
        if not self._ending:  # otherwise a second signal would interrupt the end with a traceback
            for number, handler in self._previous.items():
                signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd)
        # Forked processes hold copies of the socket, so closing it would not end the thread.
        self._writer.shutdown(socket.SHUT_WR)
        self._thread.join()
        self._writer.close()
        self._reader.close()
        if self._ending:  # whatever became of the handler's SystemExit on its way
            raise SystemExit(128 + self._ending) from error

    def _postpones(self, number: int) -> bool:
        return self._announce is not None and number != signal.SIGINT

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._postpones(number):
            self.postponed = number
        elif not self._ending:
            self._ending = number
            raise SystemExit(128 + number)

    def _run(self) -> None:
        while True:
            listens = self._rank == 0 and self._announce is not None and not self._announced
            ready, _, _ = select([self._reader], [], [], LISTEN_SECONDS if listens else None)
            numbers = self._reader.recv(64) if ready else b""
            if ready and not numbers:
                return
            for number in sorted(set(numbers) & set(self._previous)):
                self._notice(number)
            if listens:
                self._listen()

    def _notice(self, number: int) -> None:
        if self._postpones(number):
            self.postponed = number
            self._first("postponed", number)
            return
        if self._first("heeded", number) == [number, self._rank]:
            name = signal.Signals(number).name
            sys.stderr.write(
                f"{name} received on rank {self._rank}: exiting now; {self._advice()}\n"
            )
            sys.stderr.flush()
        if not self._left.wait(UNWIND_SECONDS):
            sys.stdout.flush()
            os._exit(128 + number)

    def _first(self, kind: str, number: int) -> list[int]:
        """The first signal of this kind on any rank, and that rank; this one where there is none.

        A rank that has lost the store speaks for itself.
        """
        mine = [number, self._rank]
        try:
            return json.loads(self._store.compare_set(f"first {kind}", "", json.dumps(mine)))
        except dist.DistError:
            return mine

    def _listen(self) -> None:
        try:
            if not self._store.check(["first postponed"]):
                return
            number, rank = json.loads(self._store.get("first postponed"))
        except dist.DistError:  # its host is gone, which the next collective finds out as well
            return
        self._announced = True
        self._announce(f"{signal.Signals(number).name} received on rank {rank}")


class EarlyExit:
    """Looks at the clock and at postponed signals."""

    def __init__(self, loop: LoopConfig, signals: SignalWatch):
        self._loop, self._signals = loop, signals
        self._began = time.monotonic()

    def signal(self) -> str | None:
        """The signal that any rank has postponed, or None; collective over all ranks."""
        if not self._loop.exit_signal_handler:
            return None
        number = _most(self._signals.postponed)
        return signal.Signals(number).name if number else None

    def reason(self, iteration: int) -> str | None:
        """Why to end after ``iteration``, or None to go on; collective over all ranks."""
        if name := self.signal():
            return name
        limit, interval = self._loop.exit_duration_in_mins, self._loop.exit_interval
        minutes = (time.monotonic() - self._began) / 60
        if limit is not None and _most(minutes > limit):  # clocks differ
            return f"--exit-duration-in-mins {limit:g}"
        if interval is not None and iteration % interval == 0:
            return f"--exit-interval {interval}"
        return None


def _most(number: int) -> int:
    """The greatest ``number`` of all ranks; collective."""
    most = torch.tensor(int(number), device=device.current_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def watch_training(
    config: RunConfig, store: dist.Store, launch: Launch, report: Reporter, heartbeat: Heartbeat
) -> SignalWatch:
    """The watch over a training loop; with ``--exit-signal-handler`` signals wait for its step."""

    def announce(signaled: str) -> None:
        place, time_left = heartbeat.time_left()
        report.say(f"{signaled}: {what_follows(place, config.checkpoint.save, time_left)}")

    return SignalWatch(
        store,
        launch.rank,
        advice=report.summary.resume_advice,
        announce=announce if config.loop.exit_signal_handler else None,
    )


def what_follows(place: StepPosition, save: str | None, time_left: timedelta | None) -> str:
    """What a postponed signal leads to and when, for a run that is at ``place``.

    Args:
        place: where this rank is.
        save: the folder of checkpoints, if there is one.
        time_left: of the step, if it can be told.
    """
    if place.step == StepPosition().step:
        return "exiting before the first iteration"
    then = "then exiting"
    if not place.step.startswith("checkpoint"):
        then = f"then saving to {save} and exiting" if save else "then exiting without --save"
    left = f"; about {time_left} left in it" if time_left is not None else ""
    return f"finishing {place.step}, {then}{left}"
