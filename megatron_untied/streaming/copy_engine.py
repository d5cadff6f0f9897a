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

:class:`CopyEngine` queues the edges to compute with every copy and those from copies to compute in
:meth:`Copy.wait`; which copies share host memory its caller knows, and passes the one to come
after. The engine is the same on every machine, only the streams differ, so a test drives it with
simulated ones that run copies in the worst order their edges allow.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor


class Stream(Protocol):
    """A queue of work that runs in order: the part of ``torch.cuda.Stream`` used here."""

    def record_event(self) -> Any:
        """An event that happens when all that is queued so far is done."""

    def wait_event(self, event: Any) -> None:
        """Let what is queued from now on start only after ``event``."""

    def synchronize(self) -> None:
        """Block the host until the queue is empty."""


class Streams(Protocol):
    """The three streams of a device."""

    compute: Stream
    copy_out: Stream
    copy_in: Stream

    def launch(self, stream: Stream, work: Callable[[], None]) -> None:
        """Queue ``work`` on ``stream``."""


class CudaStreams:
    """Two copy streams beside whatever stream torch computes on when asked."""

    def __init__(self, device: torch.device):
        self._device = device
        self.copy_out = torch.cuda.Stream(device)
        self.copy_in = torch.cuda.Stream(device)

    @property
    def compute(self) -> torch.cuda.Stream:
        """The current stream; in backward autograd makes it the one that forward ran on."""
        return torch.cuda.current_stream(self._device)

    def launch(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        """Run ``work`` with ``stream`` current, so that its copies are queued there."""
        with torch.cuda.stream(stream):
            work()


class CpuStream:
    """A stream whose work is done as soon as it is queued."""

    def record_event(self) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class CpuStreams:
    """A machine without a device: copies run at once, in program order."""

    def __init__(self):
        self.compute = self.copy_out = self.copy_in = CpuStream()

    def launch(self, stream: CpuStream, work: Callable[[], None]) -> None:
        """Run ``work`` now."""
        work()


class Copy:
    """A copy under way. Whoever started it must :meth:`wait` before touching the device tensor."""

    def __init__(self, engine: "CopyEngine", done: Any):
        self._engine = engine
        self.done = done

    def wait(self) -> None:
        """Let compute queued from now on start after this copy. The host goes on at once.

        After a copy to the host the device tensor may then be overwritten or dropped; after a
        copy to the device it may be used. Waiting again is harmless.
        """
        self._engine.wait(self)


class CopyEngine:
    """Queues copies on ``streams`` and holds each device tensor until its copy was waited for.

    Held rather than ``record_stream``: once compute waits for the copy, memory that the allocator
    hands out again is used by compute after it. ``record_stream`` would delay the reuse until the
    host happens to ask, and with it move the peak.
    """

    def __init__(self, streams: Streams):
        self._streams = streams
        self._device_tensors: dict[Copy, Tensor] = {}

    @classmethod
    def for_device(cls, device: torch.device) -> "CopyEngine":
        """An engine for a CUDA device or the CPU."""
        return cls(CudaStreams(device) if device.type == "cuda" else CpuStreams())

    def copy_out(self, device_tensor: Tensor, host: Tensor, *, after: Copy | None) -> Copy:
        """Start device to host, behind all compute so far and the copy ``after``.

        Args:
            device_tensor: as computed by what is queued now; unchanged until waited for.
            host: same shape and dtype.
            after: the last copy that read ``host``.
        """
        work = partial(copy_by_pieces, device_tensor, host)
        return self._start(self._streams.copy_out, work, device_tensor, after)

    def copy_in(self, host: Tensor, device_tensor: Tensor, *, after: Copy | None) -> Copy:
        """Start host to device, behind all compute so far and the copy ``after``.

        Args:
            host: same shape and dtype as ``device_tensor``.
            device_tensor: not touched by compute queued from now on, until waited for.
            after: the last copy that wrote ``host``.
        """
        work = partial(copy_by_pieces, host, device_tensor)
        return self._start(self._streams.copy_in, work, device_tensor, after)

    def wait(self, copy: Copy) -> None:
        """Let compute go on only after ``copy``, and let go of its device tensor."""
        self._streams.compute.wait_event(copy.done)
        self._device_tensors.pop(copy, None)

    def wait_all(self) -> None:
        """Wait for every copy not yet waited for: the end of a step, or of a failed one."""
        for copy in list(self._device_tensors):
            self.wait(copy)

    def synchronize(self) -> None:
        """Block the host until no copy is running: before host memory is given back."""
        self._streams.copy_out.synchronize()
        self._streams.copy_in.synchronize()

    def _start(
        self, stream: Stream, work: Callable[[], None], device_tensor: Tensor, after: Copy | None
    ) -> Copy:
        stream.wait_event(self._streams.compute.record_event())
        if after is not None:
            stream.wait_event(after.done)
        self._streams.launch(stream, work)
        copy = Copy(self, stream.record_event())
        self._device_tensors[copy] = device_tensor
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
