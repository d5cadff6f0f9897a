"""Local disks for saved activations: the level below host memory.

A segment of host memory is written to a disk as it is and read back into another segment, both
whole pages: no staging copy is needed, and the memory in flight is the arena's own. Each rank has
one file per folder; a segment is striped over all of them in requests of ``STRIPE_BYTES``, many at
a time, from threads that hold no interpreter lock while they read or write.

The files have no names from the start (``O_TMPFILE``): the kernel frees them however the process
ends, so nothing is left over and no start has to tell the files of dead jobs from live ones.

A transfer that fails does not raise in its thread: the memory is filled with NaN, and the first
failure is kept (:meth:`ActivationDisk.require_no_failure`).
"""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import threading
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron_untied.config import MemoryConfig
from megatron_untied.platform.device import GIB

STRIPE_BYTES = 8 << 20
"""Of one request: long enough for full bandwidth, short enough to verify while it is in cache."""
THREADS_PER_FOLDER, MOST_THREADS = 8, 32
POISON = 0xFF
"""A byte of which NaN is made in every floating dtype."""


@dataclass(slots=True, eq=False)
class Extent:
    """Some bytes on the disk, whole pages, as one range over all files."""

    offset: int
    num_bytes: int
    checksums: dict[int, int] = field(default_factory=dict)
    """crc32 of what each request wrote, by its offset."""


Transfer = Sequence[Future]
"""Requests in flight between an extent and host memory; see :meth:`ActivationDisk.wait`."""


class StripedFiles:
    """One unnamed file in each of some folders, addressed as one range of bytes.

    Raises:
        OSError: with the folder and the flag, if a file cannot be made there.
    """

    def __init__(self, folders: Sequence[str]):
        self.folders, self._files = folders, []
        self.num_bytes = 0
        """Reserved on the file systems so far."""
        self.buffered: list[str] = []
        """Folders whose file system refuses ``O_DIRECT``: their data passes the page cache."""
        self.unreserved: list[str] = []
        """Folders whose file system cannot reserve space: they may be full at any write."""
        for folder in folders:
            with named(folder, "cannot take files"):
                self._files.append(tempfile.TemporaryFile(dir=folder, buffering=0))
            descriptor = self._files[-1].fileno()
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            try:
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            except OSError:  # reported, see describe(): all else is the same
                self.buffered.append(folder)

    def reserve(self, num_bytes: int) -> None:
        """Reserve space for the first ``num_bytes`` of the range on the file systems."""
        if num_bytes <= self.num_bytes:
            return
        stripes = -(-num_bytes // STRIPE_BYTES)
        in_each = -(-stripes // len(self._files)) * STRIPE_BYTES
        if len(self._files) == 1:
            in_each = num_bytes
        for folder, file in zip(self.folders, self._files, strict=True):
            free = os.statvfs(folder)
            words = (
                f"has no room for {in_each / GIB:.2f} GiB of this rank's saved activations "
                f"({free.f_bavail * free.f_frsize / GIB:.2f} GiB are free); give a smaller "
                "--activation-disk-gib, or a larger disk"
            )
            with named(folder, words):
                if folder not in self.unreserved and not _fallocate(file.fileno(), in_each):
                    self.unreserved.append(folder)
        self.num_bytes = num_bytes

    def requests(self, extent: Extent) -> Iterator[tuple[int, slice]]:
        """Offset in the range and place in the extent of each request, none across a stripe."""
        at, end = extent.offset, extent.offset + extent.num_bytes
        while at < end:
            stop = min(end, at - at % STRIPE_BYTES + STRIPE_BYTES)
            yield at, slice(at - extent.offset, stop - extent.offset)
            at = stop

    def transfer(self, offset: int, memory: memoryview, *, write: bool) -> None:
        """Write or read ``memory``, which lies within one stripe."""
        stripe, within = divmod(offset, STRIPE_BYTES)
        row, column = divmod(stripe, len(self._files))
        descriptor, at = self._files[column].fileno(), row * STRIPE_BYTES + within
        call, verb = (os.pwritev, "write") if write else (os.preadv, "read")
        done = 0
        with named(self.folders[column], f"failed to {verb} saved activations"):
            while done < len(memory):
                count = call(descriptor, [memory[done:]], at + done)
                if count == 0:
                    raise OSError(f"the file ends after {done} of {len(memory)} bytes")
                done += count

    def describe(self) -> str:
        """Folders, bytes reserved, and what their file systems lack."""
        words = f"{self.num_bytes / GIB:.2f} GiB per rank in {', '.join(self.folders)}"
        if self.unreserved:
            names = ", ".join(self.unreserved)
            words += f"; {names} cannot reserve space: if it is full, the run ends at that write"
        if self.buffered:
            words += f"; no O_DIRECT in {', '.join(self.buffered)}: data passes the page cache"
        return words

    def folder_of(self, offset: int) -> str:
        """Where the byte at ``offset`` is."""
        return self.folders[offset // STRIPE_BYTES % len(self.folders)]


class ActivationDisk:
    """Space for saved activations on the disks of one rank.

    Args:
        folders: one per disk; files are made at the first use, or by :meth:`open`. None counts
            bytes and moves none, for plans and traces.
        capacity_bytes: the most that is taken; None is no limit.
        checksums: whether what is read is compared with the crc32 of what was written.
        threads: runs the requests.
    """

    def __init__(
        self,
        folders: Sequence[str] | None,
        *,
        capacity_bytes: int | None = None,
        checksums: bool = True,
        threads: Executor | None = None,
    ):
        self._folders, self._capacity, self._checksums = folders, capacity_bytes, checksums
        self._threads, self._files = threads, None
        self._released: dict[int, deque[Extent]] = defaultdict(deque)  # by bytes
        self.reserved_bytes = 0
        """The most that slots have taken at a time, with what they released and others may take."""
        self.written_bytes = self.read_bytes = 0
        """Since the start."""
        self.postpones_failures = False
        """Whether a failure is raised by :meth:`require_no_failure` alone, not by the first wait:
        for a caller that lets all ranks fail alike, before the weights are updated."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called at the first failure, in any thread."""
        self._failure: OSError | None = None
        self._lock = threading.Lock()

    @classmethod
    def of(cls, memory: MemoryConfig, *, counts_only: bool = False) -> "ActivationDisk | None":
        """The disks that the flags name; None without ``--activation-disk``."""
        if not memory.activation_disk:
            return None
        gib = memory.activation_disk_gib
        assert gib != "auto", "the planner chooses it before there are disks"
        return cls(
            None if counts_only else memory.activation_disk,
            capacity_bytes=None if gib is None else int(gib * GIB),
            checksums=memory.activation_disk_checksums,
        )

    def open(self, num_bytes: int = 0) -> StripedFiles:
        """Make the files, if there are none yet, with space for ``num_bytes``.

        Raises:
            OSError: one line with the folder and the remedy.
        """
        if self._files is None:
            self._files = StripedFiles(self._folders)
            if self._threads is None:
                number = min(MOST_THREADS, THREADS_PER_FOLDER * len(self._folders))
                self._threads = ThreadPoolExecutor(number, "activation-disk")
        if self._capacity is not None:
            num_bytes = min(num_bytes, self._capacity)
        self._files.reserve(num_bytes)
        return self._files

    def describe(self) -> str:
        """One line for the log."""
        return f"saved activations on disk: {self.open().describe()}"

    def reserve(self, num_bytes: int) -> Extent | None:
        """Space for a segment of whole pages; None if less is left."""
        released = self._released[num_bytes]
        if released:
            extent = released.popleft()
            extent.checksums.clear()
            return extent
        end = self.reserved_bytes + num_bytes
        if self._capacity is not None and end > self._capacity:
            return None
        extent = Extent(self.reserved_bytes, num_bytes)
        self.reserved_bytes = end
        if self._folders is not None:
            files = self._files or self.open()
            with self._kept():
                files.reserve(end)
        return extent

    def release(self, extent: Extent) -> None:
        """Let another segment take the space; no transfer of it may be in flight."""
        self._released[extent.num_bytes].append(extent)

    def trim(self) -> None:
        """Forget the sizes of what was released, if nothing is in use: other sizes come next."""
        released = sum(size * len(extents) for size, extents in self._released.items())
        if released == self.reserved_bytes:
            self._released.clear()
            self.reserved_bytes = 0

    def write(self, extent: Extent, memory: Tensor, after: Iterable[Callable]) -> Transfer:
        """Start to write ``memory`` (uint8) to ``extent``.

        Args:
            extent: of as many bytes.
            memory: unchanged until the transfer is waited for.
            after: called first, in the thread of a request: they return when ``memory`` is there.
        """
        self.written_bytes += extent.num_bytes
        return self._start(self._write, extent, memory, after)

    def read(self, extent: Extent, memory: Tensor, after: Iterable[Callable]) -> Transfer:
        """Start to read ``extent`` into ``memory``, as :meth:`write`; compared with the checksums.

        ``after``: they return when nothing uses ``memory`` any more.
        """
        self.read_bytes += extent.num_bytes
        return self._start(self._read, extent, memory, after)

    def wait(self, transfer: Transfer, *, raises: bool = True) -> None:
        """Block the calling thread until all requests of ``transfer`` are done.

        Raises:
            OSError: as :meth:`require_no_failure`, if ``raises`` and failures are not postponed.
        """
        for request in transfer:
            request.result()
        if raises and not self.postpones_failures:
            self.require_no_failure()

    def require_no_failure(self) -> None:
        """Raise the first failure so far, on this rank.

        Raises:
            OSError: one line with the folder and what failed.
        """
        if self._failure is not None:
            raise self._failure

    def _start(
        self, request: Callable, extent: Extent, memory: Tensor, after: Iterable[Callable]
    ) -> Transfer:
        if self._folders is None:
            return ()
        flat, ready = memoryview(memory.numpy()), tuple(after)
        return [
            self._threads.submit(request, extent, offset, flat[place], ready)
            for offset, place in self._files.requests(extent)
        ]

    def _write(self, extent: Extent, offset: int, memory: memoryview, after: Sequence) -> None:
        for wait in after:
            wait()
        if self._failure is None:
            with self._kept():
                if self._checksums:
                    extent.checksums[offset] = zlib.crc32(memory)
                self._files.transfer(offset, memory, write=True)

    def _read(self, extent: Extent, offset: int, memory: memoryview, after: Sequence) -> None:
        for wait in after:
            wait()
        with self._kept():
            self.require_no_failure()
            self._files.transfer(offset, memory, write=False)
            # Without a checksum nothing was written: memory that is not to be trusted either.
            if self._checksums and zlib.crc32(memory) != extent.checksums.get(offset):
                raise OSError(
                    f"--activation-disk {self._files.folder_of(offset)}: saved activations that "
                    "were read are not those that were written (crc32 differs); the disk or the "
                    "memory of this node is faulty"
                )
            return
        torch.frombuffer(memory, dtype=torch.uint8).fill_(POISON)

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep the first failure of the disk; leave the block at it."""
        try:
            yield
        except OSError as error:
            with self._lock:
                is_first, self._failure = self._failure is None, self._failure or error
            if is_first:
                self.on_failure()


def _fallocate(descriptor: int, num_bytes: int) -> bool:
    """Reserve space for a file; False if its file system cannot."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        # Where a file system has no such call, glibc writes single bytes, which O_DIRECT refuses.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    return True


@contextlib.contextmanager
def named(folder: str, what: str) -> Iterator[None]:
    """Errors with the flag, its folder, and what was the matter."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise type(error)(f"--activation-disk {folder} {what}: {reason}") from error


def free_bytes(folders: Sequence[str]) -> int:
    """That this machine has for all ``folders`` in equal parts; 0 if one is not there."""
    paths = [Path(folder) for folder in folders]
    if not all(path.is_dir() for path in paths):
        return 0
    systems = [path.stat().st_dev for path in paths]
    free = (
        shutil.disk_usage(path).free // systems.count(system)
        for path, system in zip(paths, systems, strict=True)
    )
    return min(free) * len(folders)


def require_folders(folders: Sequence[str]) -> None:
    """Check the folders of ``--activation-disk`` on this machine.

    Raises:
        ValueError: one that does not exist, or that cannot be written to.
    """
    for folder in folders:
        if not Path(folder).is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            found = "cannot be written to" if Path(folder).is_dir() else "is not a folder"
            raise ValueError(
                f"--activation-disk {folder} {found} on this node; make it, or give one on a "
                "local disk"
            )
