"""Liveness of ranks: a heartbeat per step, and a diagnosis of which rank a collective waits for.

Each rank publishes its position in the store that all ranks share. When a collective hangs or
fails, the positions tell which ranks did not arrive, and in which layer and chunk they stopped.
"""

import contextlib
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch.distributed as dist

from megatron_untied.config.run import RunConfig
from megatron_untied.phases import Phase
from megatron_untied.platform import device
from megatron_untied.step_progress import StepPosition, StepProgress
from megatron_untied.training.initialize import Launch

MAX_LISTED_RANKS = 8

LONGEST_PAUSE_SECONDS = 10.0
"""Longest time between two beats of a heartbeat."""

STALL_WARNING_FRACTION = 0.9
"""Fraction of the collective timeout without progress after which a rank prints a warning. nccl
aborts the process when the whole timeout has passed, so it cannot be printed then."""

LOOK_FRACTION = 0.6
"""Fraction of that timeout after which a rank without progress notes which others are alive."""

STORE_SECONDS = 10.0
"""How long the store may take to answer for all ranks."""

GLOO_FAILURE_WORDS = ("gloo", "timed out", "timeout", "connection", "broken pipe")
"""gloo raises a plain RuntimeError; one of these words is in its message."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank publishes with each beat of its heartbeat."""

    position: StepPosition
    host: str
    number: int
    """Counts beats while the process lives; -1 for one that ends in a failed collective."""


@dataclass(slots=True)
class PeerProgress:
    """Positions of all ranks, exchanged through their store."""

    store: dist.Store
    rank: int
    world_size: int
    answers: bool = True
    """Whether the store has answered when it was last read."""
    _count: int = 0
    _collected: dict[int, Beat] = field(default_factory=dict)
    _looked_at: dict[int, int] = field(default_factory=dict)

    def publish(self, position: StepPosition, *, ends: bool = False) -> None:
        """Make ``position`` visible to the other ranks, with a sign of life; one store message.

        Args:
            position: of this rank.
            ends: this process ends, so that its silence from now on has a reason.
        """
        if self.world_size == 1:
            return
        self._count += 1
        beat = Beat(position, socket.gethostname(), -1 if ends else self._count)
        # If it is gone, the store's host has exited; the next collective reports that.
        with contextlib.suppress(dist.DistError):
            self.store.set(f"beat of {self.rank}", json.dumps(asdict(beat)))

    def look(self) -> None:
        """Note who is alive: a rank without a beat until :meth:`diagnose` is silent."""
        self._read()
        self._looked_at = {rank: beat.number for rank, beat in self._collected.items()}

    def diagnose(self, here: StepPosition) -> str:
        """One sentence: the ranks that are silent, behind this rank, or behind the others.

        Args:
            here: position of this rank, which may not be published yet.
        """
        self._read()
        report = f"reported by rank {self.rank} at {here}"
        if not self.answers:
            return (
                f"the store of all ranks does not answer {socket.gethostname()}: this node is cut "
                f"off, or the node of the store (MASTER_ADDR) is gone; {report}"
            )
        # This rank's position is newer than the one it has published.
        positions = {rank: beat.position for rank, beat in self._collected.items()}
        positions[self.rank] = here
        first = min(position.order for position in positions.values())
        behind = [rank for rank, position in positions.items() if position.order == first]
        missing = [rank for rank in range(self.world_size) if rank not in positions]
        if missing:
            report += f"; no report from {listed_ranks(missing)}"
        silent = [
            rank
            for rank, number in self._looked_at.items()
            if rank != self.rank and self._collected[rank].number == number >= 0
        ]
        if silent or self.rank not in behind:
            named = silent or behind
            ranks_at: dict[str, list[int]] = {}
            for rank in named:
                ranks_at.setdefault(str(positions[rank]), []).append(rank)
            last = "; ".join(f"{listed_ranks(r)} last at {at}" for at, r in ranks_at.items())
            hosts = ", ".join(dict.fromkeys(self._collected[rank].host for rank in named))
            what = "gave no sign of life" if silent else "did not arrive"
            return f"{listed_ranks(named)} {what}, {last}, on {hosts}; {report}"
        be = "is" if len(behind) == 1 else "are"
        if len(behind) < len(positions):
            ahead = max(positions, key=lambda rank: positions[rank].order)
            last = f"{listed_ranks([ahead])} last at {positions[ahead]}"
            return f"{listed_ranks(behind)} {be} behind; {report}; {last}"
        if len(positions) > 1:
            return f"{listed_ranks(behind)} {be} at the same point; {report}"
        return report

    def _read(self) -> None:
        """Collect the beats of all ranks.

        In a thread: calls to a host that is cut off return after many minutes, whatever the store's
        timeout is. An error leaves what was collected before.
        """
        found: dict[int, Beat] = {}

        def read() -> None:
            with contextlib.suppress(dist.DistError):
                for rank in range(self.world_size):
                    key = f"beat of {rank}"
                    # check() first: get() would block until the key exists.
                    if self.store.check([key]):
                        values = json.loads(self.store.get(key))
                        values["position"] = StepPosition(**values["position"])
                        found[rank] = Beat(**values)

        reader = threading.Thread(target=read, name="read beats", daemon=True)
        reader.start()
        reader.join(STORE_SECONDS)
        self.answers = not reader.is_alive()
        self._collected |= dict(found)


def listed_ranks(ranks: list[int]) -> str:
    """Such as "rank 3" or "ranks 0, 1"; at most ``MAX_LISTED_RANKS`` of them by number."""
    hidden = len(ranks) - MAX_LISTED_RANKS
    numbers = ", ".join(map(str, ranks[:MAX_LISTED_RANKS]))
    return f"rank{'s' * (len(ranks) > 1)} {numbers}" + (f" and {hidden} more" if hidden > 0 else "")


class Heartbeat:
    """A thread that reports progress while the context is entered; it never delays training.

    Rank 0 prints how far a long step is. Every rank publishes its position. If the body fails in a
    collective, leaving the context raises ``SystemExit`` with the ranks that did not arrive.
    """

    def __init__(
        self,
        progress: StepProgress,
        peers: PeerProgress,
        *,
        say: Callable[[str], None],
        every_seconds: float,
        timeout_seconds: float,
        moved: Callable[[], None] | None = None,
    ):
        """Prepare the thread.

        Args:
            progress: marks of the training thread.
            peers: through which positions are exchanged.
            say: prints a line on rank 0.
            every_seconds: time between two lines in a step; 0 prints none.
            timeout_seconds: timeout of a collective.
            moved: called in the thread at each beat before which this rank has got further.
        """
        self._progress, self._peers, self._say, self._on_move = progress, peers, say, moved
        self._every, self._timeout = every_seconds, timeout_seconds
        longest = LONGEST_PAUSE_SECONDS
        self._pause = min(longest, timeout_seconds / 10, every_seconds or longest)
        self._line_printed = self._moved = time.monotonic()
        self._seen: StepPosition | None = None
        self._has_looked = False
        self._device = device.current_device()  # the current device is per thread
        self._stop = threading.Event()
        # A daemon: a rank that ends in a failed collective must not wait for its next beat.
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and is_failed_collective(error):
            if not self._has_looked:
                self._peers.look()
            time.sleep(2 * self._pause)  # for beats of the ranks that live, with their positions
            diagnosis, reason = self._diagnosis(), str(error).strip().partition("\n")[0]
            self._stop.set()
            if self._peers.answers:  # else this would wait for it, in a lock of its connection
                self._thread.join(STORE_SECONDS)
                self._peers.publish(self._progress.last_completed(), ends=True)
            if self._peers.rank == 0:  # may host the store, which other ranks may still be reading
                time.sleep(2 * self._pause)
            raise SystemExit(f"error: {diagnosis} ({reason})") from error
        self._stop.set()
        self._thread.join()

    def time_left(self) -> tuple[StepPosition, timedelta | None]:
        """Position of this rank and the estimated time to the end of its step; for any thread."""
        device.use_in_this_thread(self._device)
        position = self._progress.last_completed()
        return position, time_left(position, time.monotonic() - self._progress.began)

    def _run(self) -> None:
        device.use_in_this_thread(self._device)
        self._beat(time.monotonic())  # at once: a rank that is lost soon is known with its node
        while not self._stop.wait(self._pause):
            self._beat(time.monotonic())

    def _beat(self, now: float) -> None:
        position, began = self._progress.last_completed(), self._progress.began
        self._peers.publish(position)
        # Nothing in the first interval of a step: short steps print no heartbeat at all.
        if self._every and now - max(self._line_printed, began) >= self._every:
            self._say(heartbeat_line(position, now - began))
            self._line_printed = now
        if position != self._seen:
            self._seen, self._moved, self._has_looked = position, now, False
            if self._on_move is not None:
                self._on_move()
        elif not self._has_looked and now - self._moved >= LOOK_FRACTION * self._timeout:
            self._has_looked = True
            self._peers.look()
        elif now - self._moved >= STALL_WARNING_FRACTION * self._timeout:
            self._moved = math.inf  # one warning per stall
            sys.stderr.write(f"warning: {self._diagnosis()}\n")

    def _diagnosis(self) -> str:
        return (
            f"{self._peers.diagnose(self._progress.last_completed())}. The timeout of a collective "
            f"is {timedelta(seconds=self._timeout)}; set --distributed-timeout-minutes to change it"
        )


def heartbeat_of_setup(
    phase: Phase,
    config: RunConfig,
    launch: Launch,
    store: dist.Store,
    progress: StepProgress | None = None,
) -> Heartbeat:
    """A heartbeat for a long activity outside of steps, such as building datasets.

    ``progress`` of the activity, if it reports any.
    """
    progress = progress or StepProgress()
    progress.begin("start", phase=phase)

    def say(line: str) -> None:  # the console of the run does not exist yet
        if launch.rank == 0:
            sys.stdout.write(f" {line}\n")
            sys.stdout.flush()

    return Heartbeat(
        progress,
        # Keys of its own: marks of the steps start again at 0 and would be behind these.
        PeerProgress(dist.PrefixStore(phase, store.clone()), launch.rank, launch.world_size),
        say=say,
        every_seconds=config.logging.heartbeat_seconds,
        timeout_seconds=config.distributed.timeout_minutes * 60,
    )


def open_rank_monitor() -> Callable[[], None]:
    """Connect to the rank monitor of NVIDIA's resiliency extension; returns what reports to it.

    The monitor ends a rank whose heartbeats stay away for longer than ft_launcher was told.

    Raises:
        ValueError: this process was not started by ft_launcher.
    """
    from nvidia_resiliency_ext import fault_tolerance  # optional package

    client = fault_tolerance.RankMonitorClient()
    try:
        client.init_workload_monitoring()
    except fault_tolerance.RankMonitorClientError as error:
        raise ValueError(
            f"--enable-ft-package: no rank monitor answers ({error}); start the run with "
            "ft_launcher of nvidia-resiliency-ext, or leave out the flag"
        ) from error
    return client.send_heartbeat


def heartbeat_line(position: StepPosition, elapsed: float) -> str:
    """The line for a step that has taken ``elapsed`` seconds so far."""
    passed, left = timedelta(seconds=round(elapsed)), time_left(position, elapsed)
    eta = "unknown" if left is None else left
    return f"heartbeat: {position} | {position.fraction:.1%} | elapsed: {passed} | ETA: {eta} |"


def time_left(position: StepPosition, elapsed: float) -> timedelta | None:
    """Estimated time to the end of a step after ``elapsed`` seconds, at a constant pace.

    None before any attention is done.
    """
    if not 0 < position.fraction <= 1:
        return None
    return timedelta(seconds=round(elapsed / position.fraction * (1 - position.fraction)))


def is_failed_collective(error: BaseException) -> bool:
    """Whether ``error`` is a collective that failed because of another rank."""
    if isinstance(error, dist.DistError):
        return True
    # The exact type: torch.OutOfMemoryError is a RuntimeError too, and is this rank's own fault.
    message = str(error).lower()
    return type(error) is RuntimeError and any(word in message for word in GLOO_FAILURE_WORDS)
