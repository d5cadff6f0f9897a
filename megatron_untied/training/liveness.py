"""Where every rank is, told to the others: who is it that they wait for?"""

import json
import math
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

SHOWN = 8


@dataclass(slots=True)
class Whereabouts:
    """The place of every rank, in the store that they share."""

    store: dist.Store
    rank: int
    world_size: int
    _told: StepPosition | None = None
    _heard: dict[int, StepPosition] = field(default_factory=dict)

    def tell(self, place: StepPosition) -> None:
        """Let the others know; costs one message to the store, and none if nothing is new."""
        if place == self._told or self.world_size == 1:
            return
        try:
            self.store.set(f"place of {self.rank}", json.dumps(asdict(place)))
        except dist.DistError:  # its host is gone, which the next collective finds out as well
            return
        self._told = place

    def ask(self) -> dict[int, StepPosition]:
        """Every rank's last place; a rank that has told none is left out.

        Once the store is gone it is what was heard before.
        """
        keys = {rank: f"place of {rank}" for rank in range(self.world_size)}
        try:
            there = {rank: key for rank, key in keys.items() if self.store.check([key])}
            for rank, key in there.items():
                self._heard[rank] = StepPosition(**json.loads(self.store.get(key)))
        except dist.DistError:
            pass
        return self._heard

    def explain(self, here: StepPosition) -> str:
        """Which ranks have not come as far as this one, or as far as the others."""
        places = self.ask() | {self.rank: here}
        first = min(place.order for place in places.values())
        late = [rank for rank, place in places.items() if place.order == first]
        unheard = [rank for rank in range(self.world_size) if rank not in places]
        me = f"rank {self.rank}, which tells this, is at {here}"
        if unheard:
            me += f"; nothing is known of {listed_ranks(unheard)}"
        if self.rank not in late:
            return f"{listed_ranks(late)} did not arrive, {_last(late, places)}; {me}"
        if len(late) < len(places):
            ahead = max(places, key=lambda rank: places[rank].order)
            return f"{listed_ranks(late)} came late; {me}; {_last([ahead], places)}"
        if len(places) > 1:
            me = f"{listed_ranks(late)} came equally far; {me}"
        return me


def _last(ranks: list[int], places: dict[int, StepPosition]) -> str:
    """Where some ranks were when they last told, each place once."""
    at: dict[str, list[int]] = {}
    for rank in ranks:
        at.setdefault(str(places[rank]), []).append(rank)
    return "; ".join(f"{listed_ranks(its)} last at {place}" for place, its in at.items())


def listed_ranks(ranks: list[int]) -> str:
    """In words; the first few of many."""
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:SHOWN]))}{more}"


LONGEST_PAUSE_SECONDS = 10.0
STALLED = 0.9
"""Of the timeout without progress a rank speaks up: nccl ends the process when it is over."""

GLOO_SAYS = ("gloo", "timed out", "timeout", "connection", "broken pipe")


class Heartbeat:
    """Beats while it is entered. It reads what training has marked, and makes it wait for nothing.

    Rank 0 says how far a step is, every rank tells the others where it is. Where a collective
    fails for another rank's sake, leaving it raises ``SystemExit`` with the ranks that are missing.
    """

    def __init__(
        self,
        progress: StepProgress,
        whereabouts: Whereabouts,
        *,
        say: Callable[[str], None],
        every_seconds: float,
        timeout_seconds: float,
    ):
        """``say`` prints a line on rank 0; ``every_seconds`` 0 never calls it."""
        self._progress, self._whereabouts, self._say = progress, whereabouts, say
        self._every, self._timeout = every_seconds, timeout_seconds
        most = LONGEST_PAUSE_SECONDS
        self._pause = min(most, timeout_seconds / 10, every_seconds or most)
        self._said = self._moved = time.monotonic()
        self._seen: StepPosition | None = None
        self._device = device.current_device()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and is_failed_collective(error):
            time.sleep(2 * self._pause)  # until the others have told where they are
            explanation, reason = self._explanation(), str(error).strip().partition("\n")[0]
            if self._whereabouts.rank == 0:  # the others may be asking a store that it is host of
                time.sleep(2 * self._pause)
            raise SystemExit(f"error: {explanation} ({reason})") from error
        self._stop.set()
        self._thread.join()

    def time_left(self) -> tuple[StepPosition, timedelta | None]:
        """Where this rank is, and what its step still takes; for any thread."""
        device.use_in_this_thread(self._device)
        place = self._progress.last_completed()
        return place, time_left(place, time.monotonic() - self._progress.began)

    def _run(self) -> None:
        device.use_in_this_thread(self._device)
        while not self._stop.wait(self._pause):
            self._beat(time.monotonic())

    def _beat(self, now: float) -> None:
        place, began = self._progress.last_completed(), self._progress.began
        self._whereabouts.tell(place)
        if self._every and now - max(self._said, began) >= self._every:
            self._say(heartbeat_line(place, now - began))
            self._said = now
        if place != self._seen:
            self._seen, self._moved = place, now
        elif now - self._moved >= STALLED * self._timeout:
            self._moved = math.inf  # it is said once
            sys.stderr.write(f"warning: {self._explanation()}\n")

    def _explanation(self) -> str:
        return (
            f"{self._whereabouts.explain(self._progress.last_completed())}. A collective may take "
            f"{timedelta(seconds=self._timeout)}; --distributed-timeout-minutes changes that"
        )


def heartbeat_of_setup(
    phase: Phase, config: RunConfig, launch: Launch, store: dist.Store
) -> Heartbeat:
    """A heartbeat for what takes long before the first step, such as building datasets."""
    progress = StepProgress()
    progress.begin("start", phase=phase)

    def say(line: str) -> None:
        if launch.rank == 0:
            sys.stdout.write(f" {line}\n")
            sys.stdout.flush()

    return Heartbeat(
        progress,
        # Steps count their marks anew.
        Whereabouts(dist.PrefixStore(phase, store.clone()), launch.rank, launch.world_size),
        say=say,
        every_seconds=config.logging.heartbeat_seconds,
        timeout_seconds=config.distributed.timeout_minutes * 60,
    )


def heartbeat_line(place: StepPosition, elapsed: float) -> str:
    """How far a step is; what is left of its attention is taken to go on at the same pace."""
    passed, left = timedelta(seconds=round(elapsed)), time_left(place, elapsed)
    eta = "unknown" if left is None else left
    return f"heartbeat: {place} | {place.fraction:.1%} | elapsed: {passed} | ETA: {eta} |"


def time_left(place: StepPosition, elapsed: float) -> timedelta | None:
    """What is left of a step after ``elapsed`` seconds; None while no attention is done."""
    if not 0 < place.fraction <= 1:
        return None
    return timedelta(seconds=round(elapsed / place.fraction * (1 - place.fraction)))


def is_failed_collective(error: BaseException) -> bool:
    """Whether a rank was left alone by others; gloo has no exception of its own."""
    said = str(error).lower()
    from_gloo = type(error) is RuntimeError and any(words in said for words in GLOO_SAYS)
    return from_gloo or isinstance(error, dist.DistError)
