"""Streams of a device that does not exist, for finding missing edges between copies and compute.

``SimulatedStreams`` queues everything, compute included, and runs it in an order that the test
chooses among those the edges allow. ``LateStreams`` is for real code: compute runs at once, a copy
only when compute waits for it, so data used or overwritten too soon is wrong data.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

NAMES = ("compute", "copy_out", "copy_in")
EDGES = tuple(itertools.permutations(NAMES, 2))  # (who waits, for whom)


@dataclass(eq=False)
class Event:
    origin: "SimulatedStream"
    is_done: bool = False

    def synchronize(self) -> None:
        run_until(self)

    def query(self) -> bool:
        return self.is_done


@dataclass(eq=False)
class SimulatedStream:
    name: str
    dropped: tuple[str, str] | None
    queue: deque = field(default_factory=deque)  # (event to wait for or None, work)

    def record_event(self) -> Event:
        event = Event(self)
        self.queue.append((None, lambda: setattr(event, "is_done", True)))
        return event

    def wait_event(self, event: Event) -> None:
        if (self.name, event.origin.name) != self.dropped:
            self.queue.append((event, lambda: None))

    def synchronize(self) -> None:
        while self.queue:
            self.run_next()

    def is_ready(self) -> bool:
        return bool(self.queue) and (self.queue[0][0] is None or self.queue[0][0].is_done)

    def run_next(self) -> None:
        """Run the head of the queue, and first, on other streams, only what it waits for."""
        awaited, work = self.queue[0]
        if awaited is not None:
            run_until(awaited)
        self.queue.popleft()
        work()


def run_until(event: Event) -> None:
    while not event.is_done:
        event.origin.run_next()


class SimulatedStreams:
    """Nothing runs before :meth:`drain`; ``dropped`` is a kind of edge that is left out."""

    def __init__(self, dropped: tuple[str, str] | None = None):
        self.compute, self.copy_out, self.copy_in = (SimulatedStream(n, dropped) for n in NAMES)

    def launch(self, stream: SimulatedStream, work: Callable[[], None]) -> None:
        stream.queue.append((None, work))

    def mark(self) -> Event:
        return self.compute.record_event()

    def seconds(self, begin: Event, end: Event) -> float | None:
        """Their order takes no time; only whether compute came there is known."""
        return 0.0 if end.is_done else None

    def drain(self, choose: Callable[[list[SimulatedStream]], SimulatedStream]) -> None:
        """Run all, each time the head of a stream that ``choose`` picks among the ready ones."""
        streams = self.compute, self.copy_out, self.copy_in
        while ready := [stream for stream in streams if stream.is_ready()]:
            choose(ready).run_next()
        assert not any(stream.queue for stream in streams), "the edges form a cycle"


def in_random_order(seed: int) -> Callable[[list[SimulatedStream]], SimulatedStream]:
    return random.Random(seed).choice


def by_priority(names: tuple[str, ...]) -> Callable[[list[SimulatedStream]], SimulatedStream]:
    """The first stream runs as far as it can, then the second, and so on."""
    return lambda ready: min(ready, key=lambda stream: names.index(stream.name))


ORDERS = [by_priority(names) for names in itertools.permutations(NAMES)]


class ImmediateStream:
    """Compute that has run by the time it is queued: ordinary code on CPU tensors."""

    name = "compute"

    def record_event(self) -> Event:
        return Event(self, is_done=True)

    def wait_event(self, event: Event) -> None:
        run_until(event)


class LateStreams:
    """Compute at once, copies as late as their edges allow."""

    def __init__(self):
        self.compute = ImmediateStream()
        self.copy_out = SimulatedStream("copy_out", dropped=None)
        self.copy_in = SimulatedStream("copy_in", dropped=None)
        self.clock = 0.0
        """Seconds: each copy takes one."""

    def launch(self, stream: SimulatedStream, work: Callable[[], None]) -> None:
        def copy() -> None:
            work()
            self.clock += 1

        stream.queue.append((None, copy))

    def mark(self) -> float:
        return self.clock

    def seconds(self, begin: float, end: float) -> float:
        return end - begin
