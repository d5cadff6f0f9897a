"""Where a training step is: its phase, layer and chunk of heads, and how much attention is done.

At long sequences attention takes nearly all of the time, so progress is counted in attention. The
training thread leaves marks: when a phase begins or ends, and when a chunk of heads begins and when
it has been attended to. The tracer reads the phase of the host (:attr:`StepProgress.current`), the
heartbeat's thread the last mark that the device has come to (:meth:`StepProgress.reached`). A mark
is an event on the device's stream, so nothing waits for it; on a CPU, where work is done when its
call returns, it is reached at once.

One object serves one run. It is made by the loop and passed to the model, and its owner decides
whether marks cost an event; backward may run in autograd's own thread.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_untied.phases import Phase

COST = {
    Phase.ATTENTION_FORWARD: 1.0,
    Phase.RECOMPUTE_ATTENTION: 1.0,
    Phase.ATTENTION_BACKWARD: 2.5,
}
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
    phase: str = Phase.SETUP
    layer: int | None = None
    """Counted from 0, and so is ``chunk``; None outside layers, ``chunk`` outside attention."""
    chunk: int | None = None
    num_layers: int = 0
    num_chunks: int = 0
    units: float = 0.0
    """Attention done in this step, in forwards of one layer."""
    total_units: float = 0.0

    def __str__(self) -> str:
        """In words, layers and chunks counted from 1."""
        place = ", ".join(filter(None, (self.step, self.micro_batch, self.phase)))
        if self.layer is not None:
            place += f", layer {self.layer + 1} of {self.num_layers}"
        if self.chunk is not None:
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

    def __init__(self, record: Callable[[], Any | None] = lambda: None):
        """``record`` gives an event that the device will come to; None has happened already.

        With the default no event is recorded, for a model whose progress on the device is not read.
        """
        self._record = record
        self._last = self._reached = Place()
        self._ahead: deque[tuple[Any, Place]] = deque()
        self._reading = threading.Lock()
        self.began = time.monotonic()
        """When the step did, on the monotonic clock."""

    @property
    def current(self) -> str:
        """The phase of the training thread, which the device may not have come to."""
        return self._last.phase

    def begin(self, step: str, total_units: float = 0.0, phase: Phase = Phase.DATA) -> None:
        """A step, or something else that takes its time, begins with ``phase``."""
        self.began = time.monotonic()
        marks = self._last.marks + 1
        self._mark(Place(marks=marks, step=step, phase=phase, total_units=total_units))

    @contextlib.contextmanager
    def phase(
        self,
        phase: Phase,
        *,
        micro_batch: str | None = None,
        layer: int | None = None,
        num_layers: int = 0,
    ) -> Iterator[None]:
        """The step is in ``phase`` inside, and afterwards in the phase that it was in before.

        After an error it stays where it was: that is the place to report.

        Args:
            phase: what the code inside does.
            micro_batch: which of several, in words; None is that of the phase outside.
            layer: counted from 0; None outside layers.
            num_layers: of the model.
        """
        outer = self._last
        self._go_on(
            phase=phase,
            micro_batch=outer.micro_batch if micro_batch is None else micro_batch,
            layer=layer,
            chunk=None,
            num_layers=num_layers,
        )
        yield
        self._mark(replace(outer, marks=self._last.marks + 1, calls=0, units=self._last.units))

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

    def _go_on(self, **changes: Any) -> None:
        self._mark(replace(self._last, marks=self._last.marks + 1, calls=0, **changes))

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

    def phase(self, phase: Phase) -> contextlib.AbstractContextManager[None]:
        """The layer is in ``phase`` inside; see :meth:`StepProgress.phase`."""
        return self.step.phase(phase, layer=self.layer, num_layers=self.num_layers)

    def chunk(self, index: int) -> None:
        """Chunk ``index`` is there and attention to it begins, in the phase that is stated."""
        self.step._go_on(
            layer=self.layer, chunk=index, num_layers=self.num_layers, num_chunks=self.num_chunks
        )

    def attended(self) -> None:
        """Attention to the chunk is done; its results are not home yet."""
        last = self.step._last
        # Attention that is called by itself, outside a step, is in no phase and counts for none.
        self.step._go_on(units=last.units + COST.get(last.phase, 0.0) / self.num_chunks)
