"""How far a step is, counted in attention: at length it takes nearly all of the time.

The training thread leaves marks: what it does next, and for every layer when a chunk of heads
begins and when it has been attended to. Other threads ask :meth:`StepProgress.reached` for the
last mark that the device has come to. A mark is an event on the device's stream, so nothing waits
for it; on a CPU, where work is done when its call returns, it is reached at once.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_untied.platform import device

COST = {"forward": 1.0, "recompute": 1.0, "backward": 2.5}
"""Attention of one layer, in forwards: five matrix products instead of two."""

MARKS_KEPT = 4096
"""Where nobody asks which marks were reached, they are cleared away at every so many."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is. All ranks make the same marks, so places compare: smaller is earlier."""

    marks: int = 0
    """Since the start of the run."""
    calls: int = 0
    """Of the kernel, in this chunk: ranks of one ring make the same."""
    step: str = "start"
    """What the run is at, such as ``iteration 7``."""
    micro_batch: str = ""
    """Which of several, in words."""
    doing: str = "starting"
    layer: int | None = None
    """Counted from 0, and so is ``chunk``; None where it is not in a layer's attention."""
    chunk: int | None = None
    num_layers: int = 0
    num_chunks: int = 0
    units: float = 0.0
    """Attention done in this step, in forwards of one layer."""
    total_units: float = 0.0

    def __str__(self) -> str:
        """In words, layers and chunks counted from 1."""
        place = ", ".join(filter(None, (self.step, self.micro_batch, self.doing)))
        if self.layer is not None:
            place += f", layer {self.layer + 1} of {self.num_layers}"
            place += f", chunk {self.chunk + 1} of {self.num_chunks}"
        return place

    @property
    def order(self) -> tuple[int, int]:
        """Grows on the way through a run, alike on all ranks."""
        return self.marks, self.calls

    @property
    def fraction(self) -> float:
        """Of the step's attention."""
        return self.units / self.total_units if self.total_units else 0.0


class StepProgress:
    """Marks of the training thread, read by any thread."""

    def __init__(self, record: Callable[[], Any | None] = device.record_event):
        """``record`` gives an event that the device will come to; None has happened already."""
        self._record = record
        self._last = self._reached = Place()
        self._ahead: deque[tuple[Any, Place]] = deque()
        self._reading = threading.Lock()
        self._pass = "forward"
        self.began = time.monotonic()
        """When the step did, on the monotonic clock."""

    def begin(self, step: str, total_units: float = 0.0, doing: str = "reading") -> None:
        """A step, or something else that takes its time, begins with ``doing``."""
        self.began, self._pass = time.monotonic(), doing
        marks = self._last.marks + 1
        self._mark(Place(marks=marks, step=step, doing=doing, total_units=total_units))

    def enter(self, doing: str, micro_batch: str = "") -> None:
        """The step goes on with ``doing``; ``forward`` and ``backward`` are passes over layers."""
        self._pass, last = doing, self._last
        where = {"micro_batch": micro_batch, "doing": doing, "layer": None, "chunk": None}
        self._mark(replace(last, marks=last.marks + 1, calls=0, **where))

    def called(self) -> None:
        """One of several kernel calls between which ranks wait for each other is done."""
        self._mark(replace(self._last, calls=self._last.calls + 1))

    def advance(self, units: float) -> None:
        """So much of what :meth:`begin` announced is done; for what is not attention."""
        self._mark(replace(self._last, units=self._last.units + units))

    def of_layer(self, layer: int, num_layers: int, num_chunks: int) -> "LayerProgress":
        """What the attention of ``layer`` (counted from 0) reports to."""
        return LayerProgress(self, layer, num_layers, num_chunks)

    def reached(self) -> Place:
        """The last mark that the device has come to."""
        with self._reading:
            while self._ahead and self._ahead[0][0].query():
                self._reached = self._ahead.popleft()[1]
            return self._reached

    def _mark(self, place: Place) -> None:
        self._last, event = place, self._record()
        if event is None:
            self._reached = place
        else:
            self._ahead.append((event, place))
            if len(self._ahead) % MARKS_KEPT == 0:
                self.reached()


@dataclass(frozen=True, slots=True)
class LayerProgress:
    """The same for the attention of one layer."""

    step: StepProgress
    layer: int
    num_layers: int
    num_chunks: int

    def chunk(self, direction: Literal["forward", "backward"], index: int) -> None:
        """Chunk ``index`` is there and attention to it begins."""
        last = self.step._last
        # A forward in the backward pass is one that the layer did not keep.
        again = direction == "forward" and self.step._pass == "backward"
        self.step._mark(
            replace(
                last,
                marks=last.marks + 1,
                calls=0,
                doing="recompute" if again else direction,
                layer=self.layer,
                chunk=index,
                num_layers=self.num_layers,
                num_chunks=self.num_chunks,
            )
        )

    def attended(self) -> None:
        """Attention to the chunk is done; its results are not home yet."""
        last = self.step._last
        units = last.units + COST[last.doing] / self.num_chunks
        self.step._mark(replace(last, marks=last.marks + 1, calls=0, units=units))
