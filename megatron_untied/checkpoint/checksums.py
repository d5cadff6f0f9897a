"""Checksums of a checkpoint's files, which find bytes that have changed since they were written.

``checksums.txt`` has a line for each part of each file: crc32, offset, bytes and name. A part is a
tensor slice, as DCP reads it, or a whole small file, so loading verifies the bytes that it uses
without reading any of them twice. The last line is the crc32 of the lines above.

Python's ``zlib.crc32`` does 1.5 to 2.5 GB/s on one core, or about half a second for each GB that a
rank writes or reads; the interpreter's lock is released meanwhile.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megatron_untied.checkpoint.directory import damaged, require_content, write_durably

CHECKSUMS = "checksums.txt"
_HEADER = "# crc32 offset bytes file"


@dataclass(frozen=True, order=True, slots=True)
class Part:
    """A range of bytes of one file of a checkpoint."""

    file: str
    offset: int
    num_bytes: int


class ChecksumError(ValueError):
    """Bytes of a checkpoint differ from those that were saved."""


class ChecksummedFile:
    """A binary file, written in order, whose parts get checksums on the way."""

    def __init__(self, file: BinaryIO):
        self._file, self._start, self._crc = file, 0, 0
        self.failure: OSError | None = None
        """What :meth:`write` raised. torch.save would raise an error about positions instead."""
        self.parts: dict[Part, int] = {}
        """crc32 of each part that has ended."""

    def write(self, data: bytes | memoryview) -> int:
        """Write ``data``, which belongs to the current part."""
        self._crc = zlib.crc32(data, self._crc)
        try:
            return self._file.write(data)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        """Pass what is buffered on to the operating system."""
        self._file.flush()

    def end_part(self, name: str) -> Part:
        """The part of the file ``name`` that was written since the last call."""
        end = self._file.tell()
        part = Part(name, self._start, end - self._start)
        self.parts[part] = self._crc
        self._start, self._crc = end, 0
        return part


def whole_file(path: Path, data: bytes | None = None) -> dict[Part, int]:
    """The checksum of a small file as one part; ``data`` is its content, None reads it."""
    data = path.read_bytes() if data is None else data
    return {Part(path.name, 0, len(data)): zlib.crc32(data)}


def write_checksums(folder: Path, parts: Mapping[Part, int]) -> None:
    """Write the file of checksums, of ``parts`` and of the small files that are not among them.

    Called by one rank, after everything else is in ``folder``.

    Args:
        folder: of the checkpoint.
        parts: of all ranks.
    """
    files = {part.file for part in parts}
    every = dict(parts)
    for path in folder.iterdir():
        if path.name not in files:
            every |= whole_file(path)
    lines = [
        f"{crc:08x} {part.offset} {part.num_bytes} {part.file}"
        for part, crc in sorted(every.items())
    ]
    body = "".join(f"{line}\n" for line in [_HEADER, *lines]).encode()
    write_durably(folder / CHECKSUMS, body + _last_line(body))


def _last_line(body: bytes) -> bytes:
    return f"# {zlib.crc32(body):08x} of the lines above\n".encode()


@dataclass(frozen=True, slots=True)
class Checksums:
    """The checksums of one checkpoint."""

    folder: Path
    parts: Mapping[Part, int]

    @classmethod
    def read(cls, folder: Path) -> "Checksums | None":
        """Those in ``folder``; None in a checkpoint of a version that wrote none.

        Raises:
            ChecksumError: the file of checksums itself has changed.
        """
        path = folder / CHECKSUMS
        if not path.is_file():
            return None
        require_content(path)
        data = path.read_bytes()
        body = data[: -len(_last_line(b""))]
        if data != body + _last_line(body):
            raise ChecksumError(damaged(folder, f"{CHECKSUMS} has changed since it was saved"))
        parts = {}
        for line in body.decode().splitlines()[1:]:
            crc, offset, num_bytes, name = line.split(" ", 3)
            parts[Part(name, int(offset), int(num_bytes))] = int(crc, 16)
        return cls(folder, parts)

    def require_small_file(self, name: str) -> None:
        """Check a whole small file. One that is missing is left to whoever reads it.

        Raises:
            ChecksumError: it has changed since it was saved.
        """
        path = self.folder / name
        if not path.is_file():
            return
        require_content(path)
        data = path.read_bytes()
        self.require(Part(name, 0, len(data)), data)

    def require(self, part: Part, data: bytes) -> None:
        """Check the bytes of a part.

        Raises:
            ChecksumError: with the name of the file, both checksums and how to load regardless.
        """
        found, saved = zlib.crc32(data), self.parts.get(part)
        if found != saved:
            place = f"bytes {part.offset} to {part.offset + part.num_bytes}"
            how = f"no checksum is of {place}"  # of a file that is longer or shorter now
            if saved is not None:
                how = f"crc32 of {place} is {found:08x}, was {saved:08x}"
            raise ChecksumError(
                damaged(
                    self.folder,
                    f"{part.file} has changed since it was saved: {how}",
                    also=f"delete {CHECKSUMS} if the change was intended",
                )
            )
