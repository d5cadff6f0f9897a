"""Copies between device and host beside compute: two streams, and an event on every edge.

Three streams take part: compute, copy-out (device to host) and copy-in (host to device). Work in
one stream runs in the order it was queued; between two streams only an event orders anything. So
there are six kinds of edge, one for each ordered pair of streams:

============  ==============  ===============================================================
waits         for             because
============  ==============  ===============================================================
copy-out      compute         the tensor must be computed before it is copied
compute       copy-out        its memory may be overwritten or freed only once copied
copy-in       copy-out        the host must hold the data before it is fetched
copy-in       compute         the memory fetched into may still be read by earlier compute
compute       copy-in         fetched data may be used only once it is there
copy-out      copy-in         host memory may be overwritten only once its last fetch is done
============  ==============  ===============================================================

:class:`CopyEngine` queues the edges to compute with every copy, and :meth:`Copy.wait` queues those
from copies to compute. Which copies share host memory is up to the caller, who passes the earlier
one as ``after``. The engine is the same on every machine and only the streams differ, so tests
drive it with simulated streams that run copies in the worst order their edges allow.

:class:`Waits` counts the time for which compute waits at these edges.
"""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override


class Stream(Protocol):
    """A queue of work that runs in order: the part of ``torch.cuda.Stream`` used here."""

    def record_event(self) -> Any:
        """An event that happens when all work queued so far is done; None if it is."""

    def wait_event(self, event: Any) -> None:
        """Let work queued from now on start only after ``event``."""

    def synchronize(self) -> None:
        """Block the host until the queue is empty."""


class Streams(Protocol):
    """The three streams of a device."""

    compute: Stream
    copy_out: Stream
    copy_in: Stream

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        """Queue ``work`` on ``stream``."""

    def mark(self) -> Any:
        """A point in time: when the compute queued so far is done."""

    def seconds(self, begin: Any, end: Any) -> float | None:
        """From one mark to another; None if compute has not come to ``end`` yet."""


class CudaStreams(Streams):
    """Two copy streams beside the stream that torch currently computes on."""

    def __init__(self, device: torch.device):
        self._device = device
        self.copy_out = torch.cuda.Stream(device)
        self.copy_in = torch.cuda.Stream(device)

    @property
    def compute(self) -> torch.cuda.Stream:
        """The current stream; in backward autograd makes it the one that forward ran on."""
        return torch.cuda.current_stream(self._device)

    @override
    def launch(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        with torch.cuda.stream(stream):  # the copies that ``work`` makes are queued there
            work()

    @override
    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.compute)
        return event

    @override
    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        return begin.elapsed_time(end) / 1000 if end.query() else None


class CpuStream(torch.cpu.Stream):
    """A stream whose work is done as soon as it is queued, so there is nothing to wait for."""

    def synchronize(self) -> None:
        """Part of :class:`Stream` that torch leaves out."""


class CpuStreams(Streams):
    """A machine without a device: copies run at once, in program order."""

    def __init__(self):
        self.compute = self.copy_out = self.copy_in = CpuStream()

    @override
    def launch(self, stream: CpuStream, work: Callable[[], None]) -> None:
        work()

    @override
    def mark(self) -> float:
        return time.perf_counter()

    @override
    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class Wait(NamedTuple):
    """What compute waits for, and in which phase of a step."""

    source: Literal["host", "disk"]
    phase: str


class Waits:
    """Seconds for which compute waited for copies and disks.

    Compute is marked before and after each wait. On a GPU the marks are events in its stream, read
    when they are over: they synchronize nothing, and a wait that ends before compute comes to it
    counts as nothing. On a CPU a copy runs where it starts, and all of it counts.
    """

    MOST_PENDING = 4096

    def __init__(self, streams: Streams):
        self._streams = streams
        self.phase: Callable[[], str] = lambda: ""
        """The phase in which the training thread is."""
        self._pending: deque[tuple[Wait, Any, Any]] = deque()
        self._seconds: Counter[Wait] = Counter()

    @contextlib.contextmanager
    def counted(self, source: Literal["host", "disk"]) -> Iterator[None]:
        """Count the time that compute needs to get through the code inside."""
        wait, begin = Wait(source, self.phase()), self._streams.mark()
        yield
        self._pending.append((wait, begin, self._streams.mark()))
        if len(self._pending) == self.MOST_PENDING:  # also where nobody takes them
            self._add_up()

    def take(self) -> dict[Wait, float]:
        """Seconds since the last call, as far as compute has come."""
        self._add_up()
        taken, self._seconds = self._seconds, Counter()
        return dict(taken)

    def _add_up(self) -> None:
        while self._pending:
            wait, begin, end = self._pending[0]
            seconds = self._streams.seconds(begin, end)
            if seconds is None:
                return
            self._seconds[wait] += seconds
            self._pending.popleft()


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A copy in flight. Call :meth:`wait` before compute touches its device tensor."""

    engine: "CopyEngine"
    done: Any
    """The event that ends it."""

    def wait(self) -> None:
        """Let compute queued from now on start after this copy. The host does not block.

        After a copy to the host the device tensor may then be overwritten or dropped; after a
        copy to the device it may be used. Waiting again is harmless.
        """
        # A copy that is done by now holds nothing up; an event of CpuStream is None.
        if self.done is not None and not self.done.query():
            with self.engine.waits.counted("host"):
                self.engine.streams.compute.wait_event(self.done)
        self.engine.device_tensors.pop(self, None)

    def wait_on_host(self) -> None:
        """Block the calling thread, which may be any, until this copy is done."""
        if self.done is not None:  # an event of CpuStream: done when it was recorded
            self.done.synchronize()


class CopyEngine:
    """Queues copies on ``streams`` and references each device tensor until its copy is waited for.

    A reference rather than ``record_stream``: once compute waits for the copy, memory that the
    allocator hands out again is used by compute after it. ``record_stream`` would delay the reuse
    until the host happens to poll the event, which moves the memory peak from run to run.
    """

    def __init__(self, streams: Streams):
        self.streams, self.waits = streams, Waits(streams)
        self.device_tensors: dict[Copy, Tensor] = {}
        """Those of copies not yet waited for."""

    def copy_out(self, device_tensor: Tensor, host: Tensor, *, after: Copy | None) -> Copy:
        """Start device to host, behind all compute so far and the copy ``after``.

        Args:
            device_tensor: as computed by what is queued now; unchanged until waited for.
            host: same shape and dtype.
            after: the last copy that read ``host``.
        """
        return self._start(self.streams.copy_out, device_tensor, host, device_tensor, after)

    def copy_in(
        self,
        host: Tensor,
        device_tensor: Tensor,
        *,
        after: Copy | None,
        leaving: Copy | None = None,
    ) -> Copy:
        """Start host to device, behind all compute so far and the copies ``after`` and ``leaving``.

        Args:
            host: same shape and dtype as ``device_tensor``.
            device_tensor: not touched by compute queued from now on, until waited for.
            after: the last copy that wrote ``host``.
            leaving: the copy out of ``device_tensor``, if compute does not wait for it.
        """
        stream = self.streams.copy_in
        return self._start(stream, host, device_tensor, device_tensor, after, leaving)

    def wait_all(self) -> None:
        """Wait for every copy not yet waited for: the end of a step, or of a failed one."""
        for copy in list(self.device_tensors):
            copy.wait()

    def synchronize(self) -> None:
        """Block the host until no copy is running: before host memory is freed."""
        self.streams.copy_out.synchronize()
        self.streams.copy_in.synchronize()

    def _start(
        self,
        stream: Stream,
        source: Tensor,
        target: Tensor,
        device_tensor: Tensor,
        *after: Copy | None,
    ) -> Copy:
        # The edges to compute and to the other copy stream come first: the copy is behind both.
        stream.wait_event(self.streams.compute.record_event())
        for copy in filter(None, after):
            stream.wait_event(copy.done)
        is_own = stream is not self.streams.compute  # else compute waits here
        with contextlib.nullcontext() if is_own else self.waits.counted("host"):
            self.streams.launch(stream, partial(copy_by_pieces, source, target))
        copy = Copy(self, stream.record_event())
        self.device_tensors[copy] = device_tensor
        return copy


def copy_by_pieces(source: Tensor, target: Tensor) -> None:
    """Copy ``source`` into ``target`` without a temporary, one contiguous piece at a time."""
    assert (source.shape, source.dtype) == (target.shape, target.dtype), (
        f"cannot copy {source.dtype} {list(source.shape)} to {target.dtype} {list(target.shape)}"
    )
    with torch.no_grad():
        for source_piece, target_piece in contiguous_pieces(source, target):
            target_piece.copy_(source_piece, non_blocking=True)


def contiguous_pieces(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut two tensors of one shape along their first dimensions until both are contiguous.

    Between host and device torch copies contiguous memory directly and asynchronously; anything
    else goes through a pageable temporary on the host, and blocks.
    """
    if a.is_contiguous() and b.is_contiguous():
        yield a, b
        return
    assert a.dim() > 1, "the last dimension of both tensors must be contiguous"
    for a_part, b_part in zip(a, b, strict=True):
        yield from contiguous_pieces(a_part, b_part)
