"""Position within a training step: phase, layer, chunk of heads, and fraction of attention done.

At long sequences attention takes nearly all of the time, so progress is counted in attention. The
training thread records a mark when a phase begins or ends, when attention to a chunk of heads
begins, and when it is done. The tracer reads the phase of the host thread
(:attr:`StepProgress.current_phase`); the heartbeat thread reads the last mark that the device has
completed (:meth:`StepProgress.last_completed`). A mark is an event on the device's stream, so
nothing waits for it. On a CPU, a mark is complete at once.

While :attr:`StepProgress.profiling` is set, phases and chunks are also named ranges of PyTorch's
profiler.

One object serves one run. The loop creates it and passes it to the model. Its creator decides
whether marks record device events. Backward may run in a thread of autograd.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.profiler import record_function

from megatron_untied.phases import Phase

COST = {
    Phase.ATTENTION_FORWARD: 1.0,
    Phase.RECOMPUTE_ATTENTION: 1.0,
    Phase.ATTENTION_BACKWARD: 2.5,
}
"""Cost of attention in one layer, in forwards: backward has five matrix products, forward two."""

MAX_PENDING_MARKS = 4096
"""Completed marks are discarded each time this many are pending, even without a reader."""


@dataclass(frozen=True, slots=True)
class StepPosition:
    """Position of one rank. All ranks record the same marks, so their positions can be compared."""

    marks: int = 0
    """Marks since the start of the run."""
    kernel_calls: int = 0
    """Kernel calls in this chunk; all ranks of a ring make the same number."""
    step: str = "start"
    """Current step or activity, such as ``iteration 7``."""
    micro_batch: str = ""
    """Such as ``micro-batch 1 of 2``; empty where there is only one."""
    phase: str = Phase.SETUP
    layer: int | None = None
    """Counted from 0; None outside layers."""
    chunk: int | None = None
    """Counted from 0; None outside attention."""
    num_layers: int = 0
    num_chunks: int = 0
    units: float = 0.0
    """Attention done in this step, in forwards of one layer."""
    total_units: float = 0.0

    def __str__(self) -> str:
        """Text for a log line; layers and chunks are counted from 1."""
        return ", ".join(filter(None, (self.step, self.micro_batch, self.place)))

    @property
    def place(self) -> str:
        """Text: phase, layer and chunk, such as ``attention forward, layer 3 of 32``."""
        text = str(self.phase)
        if self.layer is not None:
            text += f", layer {self.layer + 1} of {self.num_layers}"
        if self.chunk is not None:
            text += f", chunk {self.chunk + 1} of {self.num_chunks}"
        return text

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: increases monotonically during a run, in the same way on all ranks.

        A ring waits between the kernel calls of one chunk, so calls break ties between marks.
        """
        return self.marks, self.kernel_calls

    @property
    def fraction(self) -> float:
        """Fraction of the step's attention that is done; 0 where the total is not known."""
        return self.units / self.total_units if self.total_units else 0.0


class StepProgress:
    """Records marks in the training thread; any thread may read them."""

    def __init__(self, record: Callable[[], Any | None] = lambda: None):
        """Start at the position ``start, setup``.

        Args:
            record: records a device event and returns it, or returns None if the work queued so
                far is already complete. The default records nothing.
        """
        self._record = record
        self._last = self._reached = StepPosition()
        self._pending: deque[tuple[Any, StepPosition]] = deque()  # recorded, not completed
        self.on_enter: Callable[[int], None] | None = None
        """Called in the training thread where a phase or chunk begins, with the number of the mark.
        That number is the same on all ranks. It may raise, which abandons the step there."""
        self._reading = threading.Lock()  # the heartbeat and signal threads both read
        self.began = time.monotonic()
        """Start of the step on the monotonic clock, in seconds."""
        self.profiling = False
        """Whether phases and chunks are ranges of PyTorch's profiler; an unused range costs 10 us.
        """

    @property
    def marks(self) -> int:
        """Number of the training thread's last mark; for any thread."""
        return self._last.marks

    @property
    def current_phase(self) -> str:
        """Phase of the training thread, which may be ahead of the device."""
        return self._last.phase

    def begin(self, step: str, total_units: float = 0.0, phase: Phase = Phase.DATA) -> None:
        """Begin a step, or another long activity such as loading a checkpoint.

        Args:
            step: name in log lines, such as ``iteration 7``.
            total_units: work in it, in the units of :meth:`advance`; 0 if unknown.
            phase: its first phase.
        """
        self.began = time.monotonic()
        marks = self._last.marks + 1
        self._mark(StepPosition(marks=marks, step=step, phase=phase, total_units=total_units))

    @contextlib.contextmanager
    def phase(
        self,
        phase: Phase,
        *,
        micro_batch: str | None = None,
        layer: int | None = None,
        num_layers: int = 0,
    ) -> Iterator[None]:
        """Enter ``phase``; on exit, return to the phase that was current before.

        Args:
            phase: the phase of the enclosed code.
            micro_batch: such as ``micro-batch 1 of 2``; None inherits it from the outer phase.
            layer: counted from 0; None outside layers.
            num_layers: layers of the model.
        """
        outer = self._last
        self._mark_next(
            phase=phase,
            micro_batch=outer.micro_batch if micro_batch is None else micro_batch,
            layer=layer,
            chunk=None,
            num_layers=num_layers,
        )
        if self.on_enter is not None:
            self.on_enter(self._last.marks)
        with self._range():
            yield  # no try: after an error the position stays here, which is what to report
        self._mark(
            replace(outer, marks=self._last.marks + 1, kernel_calls=0, units=self._last.units)
        )

    def kernel_call_completed(self) -> None:
        """Record one of the several kernel calls of a chunk between which a ring exchanges."""
        self._mark(replace(self._last, kernel_calls=self._last.kernel_calls + 1))

    def advance(self, units: float) -> None:
        """Add ``units`` of work other than attention, such as bytes read from a checkpoint."""
        self._mark(replace(self._last, units=self._last.units + units))

    def for_layer(self, layer: int, num_layers: int, num_chunks: int) -> "LayerProgress":
        """The object through which the attention of ``layer`` (counted from 0) reports."""
        return LayerProgress(self, layer, num_layers, num_chunks)

    def last_completed(self) -> StepPosition:
        """Position of the last mark that the device has completed; callable from any thread."""
        with self._reading:
            while self._pending and self._pending[0][0].query():
                self._reached = self._pending.popleft()[1]
            return self._reached

    def _range(self) -> contextlib.AbstractContextManager[object]:
        return record_function(self._last.place) if self.profiling else contextlib.nullcontext()

    def _mark_next(self, **changes: Any) -> None:
        self._mark(replace(self._last, marks=self._last.marks + 1, kernel_calls=0, **changes))

    def _mark(self, position: StepPosition) -> None:
        self._last, event = position, self._record()
        if event is None:
            self._reached = position
        else:
            # Appending to a deque is atomic, so the training thread takes no lock here.
            self._pending.append((event, position))
            if len(self._pending) % MAX_PENDING_MARKS == 0:
                self.last_completed()


@dataclass(frozen=True, slots=True)
class LayerProgress:
    """Progress of the attention of one layer, recorded in the step's marks."""

    step: StepProgress
    layer: int
    num_layers: int
    num_chunks: int

    def phase(self, phase: Phase) -> contextlib.AbstractContextManager[None]:
        """As :meth:`StepProgress.phase`, for this layer."""
        return self.step.phase(phase, layer=self.layer, num_layers=self.num_layers)

    @contextlib.contextmanager
    def chunk(self, index: int) -> Iterator[None]:
        """Attend to chunk ``index`` inside: it has been exchanged, its outputs will be after it."""
        self.step._mark_next(
            layer=self.layer, chunk=index, num_layers=self.num_layers, num_chunks=self.num_chunks
        )
        if self.step.on_enter is not None:
            self.step.on_enter(self.step.marks)
        with self.step._range():
            yield
        last = self.step._last
        # Attention called on its own, outside a step, has no phase and therefore no cost.
        self.step._mark_next(units=last.units + COST.get(last.phase, 0.0) / self.num_chunks)
