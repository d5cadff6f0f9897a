"""Splits files into records: lines of JSON, rows of Parquet, or a plain-text file as a whole.

Files are read as streams, also compressed ones: memory holds one record, or a row group of Parquet.
A folder stands for the texts in it, joined to one record (:func:`joined_files`).
"""

import gzip
import importlib
import io
import json
import os
import re
import subprocess
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from typing_extensions import override

from megatron_untied.checkpoint.directory import require_content
from megatron_untied.config.problems import in_one_line

JSON_LINES = (".jsonl", ".json", ".ndjson")
_PARQUET = ".parquet"
_COMPRESSED = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
_PACKAGES = {".zst": "zstandard", _PARQUET: "pyarrow.parquet"}
_UNREAD = {".bz2": b"BZh", ".xz": b"\xfd7zXZ\x00", ".zip": b"PK\x03\x04"}
_MAGIC = {
    magic: ending for ending, magic in (*_COMPRESSED.items(), *_UNREAD.items(), (_PARQUET, b"PAR1"))
}
_ROWS_AT_A_TIME = 256
_COMPRESSED_BYTES_AT_A_TIME = 1 << 14
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LOST_REST = "the data is damaged or cut short ({}); the rest of the file is lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One record in the bytes of its file."""

    number: int
    """Line or row, from 1; 0 is a whole file."""
    content: bytes | dict[str, bytes | None]
    """A line or file, or the columns of a row by name."""
    num_bytes: int
    """Bytes of the file, before decompression, read since the previous record."""
    problem: str | None = None
    """Reason for missing content; the rest of the file may be lost."""


def is_plain_text(file: Path) -> bool:
    """Whether the whole file is one document, by its name without the ending of a compression."""
    inner = file.with_suffix("") if _suffix(file) in _COMPRESSED else file
    return _suffix(inner) not in (*JSON_LINES, _PARQUET)


def check_readable(file: Path, keys: Sequence[str]) -> None:
    """Check what would otherwise fail after hours of work.

    Raises:
        OSError: the file cannot be opened, or is a link to one that is not there.
        ImportError: it needs a package that is not installed.
        ValueError: its format has no ``keys``, or it is a Git LFS pointer.
    """
    if file.is_dir():
        if tuple(keys) != ("text",):
            raise ValueError(f"--join-folders: {file} is text, and --json-keys needs JSON lines")
        if not files_in_folder(file):
            raise ValueError(f"--join-folders: {file} has no files; leave it out")
        return
    require_content(file)
    if _suffix(file) in _PACKAGES:
        _package(file)
    if is_plain_text(file) and tuple(keys) != ("text",):
        raise ValueError(f"{file} is plain text: --json-keys {' '.join(keys)} needs JSON lines")
    if _suffix(file) == _PARQUET:
        _check_columns(file, keys)


def read_records(file: Path, keys: Sequence[str]) -> Iterator[Record]:
    """The records of one file in order, blank lines left out."""
    if file.is_dir():
        yield Record(number=0, content=joined_files(file), num_bytes=num_bytes_of(file))
        return
    if _suffix(file) == _PARQUET:
        yield from _rows(file, keys)
        return
    size, plain_text = file.stat().st_size, is_plain_text(file)
    with file.open("rb") as raw:
        stream, damage = raw, ()
        if _suffix(file) == ".gz":
            stream, damage = gzip.GzipFile(fileobj=raw), (gzip.BadGzipFile, zlib.error, EOFError)
        elif _suffix(file) == ".zst":
            zstandard = _package(file)
            stream = io.BufferedReader(_ZstdStream(raw, zstandard.ZstdDecompressor()))
            damage = (zstandard.ZstdError, EOFError)
        number = position = 0
        try:
            # Decompressed bytes, and still there for what reads the stream next.
            problem = _problem_of_format(stream.peek(io.DEFAULT_BUFFER_SIZE), plain_text)
            if problem:
                yield Record(number=0, content=b"", num_bytes=size, problem=problem)
            elif plain_text:
                yield Record(number=0, content=stream.read(), num_bytes=size)
            else:
                for number, line in enumerate(stream, start=1):
                    if not line.isspace():
                        # Of the compressed file: it advances by the buffer, not by the line.
                        last, position = position, raw.tell()
                        yield Record(number=number, content=line, num_bytes=position - last)
        except damage as error:
            # A compressed stream cannot be entered again behind the damage.
            yield Record(
                number=number + 1,
                content=b"",
                num_bytes=size - position,
                problem=_LOST_REST.format(error),
            )


def files_in_folder(folder: Path) -> list[Path]:
    """The regular files of a folder by path: those that git tracks, if it is a repository.

    Otherwise all but hidden ones. Links are left out: what they name may be in the folder too.

    Raises:
        ValueError: git is not installed, or refuses the repository.
    """
    if (folder / ".git").exists():
        command = ["git", "-C", str(folder), "ls-files", "-z"]
        try:
            listed = subprocess.run(command, capture_output=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
            raise ValueError(f"--join-folders: git cannot list {folder}: {said}") from error
        found = (folder / os.fsdecode(name) for name in listed.split(b"\0") if name)
    else:
        found = (
            file
            for file in folder.rglob("*")
            if not any(part.startswith(".") for part in file.relative_to(folder).parts)
        )
    return sorted(file for file in found if file.is_file() and not file.is_symlink())


def joined_files(folder: Path) -> bytes:
    """The texts of a folder's files, each behind a line with its path in the folder.

    A file that is no UTF-8 text, or has a zero byte, is left out.
    """
    parts = []
    for file in files_in_folder(folder):
        content = file.read_bytes()
        if not is_text(content):
            continue
        ending = b"" if content.endswith(b"\n") else b"\n"
        path = os.fsencode(file.relative_to(folder).as_posix())
        parts += [b"=== ", path, b" ===\n", content, ending]
    return b"".join(parts)


def is_text(content: bytes) -> bool:
    """Whether ``content`` is UTF-8 without zero bytes."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def num_bytes_of(path: Path) -> int:
    """Bytes of a file as it is, compressed or not, or of all files of a folder."""
    if path.is_dir():
        return sum(file.stat().st_size for file in files_in_folder(path))
    return path.stat().st_size


def _suffix(file: Path) -> str:
    return file.suffix.lower()


def _package(file: Path) -> ModuleType:
    name = _PACKAGES[_suffix(file)]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(
            f"{file}: {_suffix(file)} files need the package {package}; pip install {package}"
        ) from error


class _ZstdStream(io.RawIOBase):
    """The content of all frames; zstandard's own reader accepts a truncated file as complete."""

    def __init__(self, raw: BinaryIO, decompressor):
        self._raw, self._decompressor = raw, decompressor
        self._frame, self._compressed, self._content = decompressor.decompressobj(), b"", b""
        # Whether the frame has bytes but no end yet; a file of several frames may end after any.
        self._inside_frame = False

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: memoryview) -> int:
        # Raises EOFError, as gzip does, if the file ends inside a frame.
        while not self._content:
            self._compressed = self._compressed or self._raw.read(_COMPRESSED_BYTES_AT_A_TIME)
            if not self._compressed:
                if self._inside_frame:
                    raise EOFError("the file ends inside a zstd frame")
                return 0
            self._content = self._frame.decompress(self._compressed)
            self._compressed, self._inside_frame = self._frame.unused_data, not self._frame.eof
            if self._frame.eof:
                self._frame = self._decompressor.decompressobj()
        part, self._content = self._content[: len(buffer)], self._content[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def _problem_of_format(head: bytes, plain_text: bool) -> str | None:
    """What is wrong if the first bytes are those of a format that the name does not promise."""
    for magic, ending in _MAGIC.items():
        if head.startswith(magic):
            remedy = "" if ending in _UNREAD else "rename it to end so, or "
            return f"the content is that of a {ending} file: {remedy}decompress it"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "the text is UTF-16: convert it with iconv -f UTF-16 -t UTF-8"
    head = head.removeprefix(BYTE_ORDER_MARK)
    if plain_text:
        if re.match(rb'\s*\{[^\n]*"text"\s*:\s*"', head):
            return (
                f"the content is lines of JSON: rename it to end in {JSON_LINES[0]}, or all of it "
                "would be one document"
            )
        return None
    # One JSON array cannot be streamed. A complete array on the first line, followed by other
    # lines, is only a bad line.
    if not head.lstrip().startswith(b"["):
        return None
    line, end_of_line, rest = head.lstrip().partition(b"\n")
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        rest = b""  # an array over several lines
    if end_of_line and rest.strip():
        return None
    return (
        "the file is one JSON array where lines of JSON are expected; "
        "write one object per line, for example with jq -c '.[]'"
    )


def _check_columns(file: Path, keys: Sequence[str]) -> None:
    import pyarrow  # optional, as zstandard: only for files that need it

    try:
        schema = _package(file).read_schema(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file} cannot be read as Parquet: {in_one_line(error)}") from error
    for key in keys:
        if key not in schema.names:
            raise ValueError(
                f"{file} has no column {key!r} of --json-keys; found: {', '.join(schema.names)}"
            )
        kind = schema.field(key).type
        value = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (pyarrow.types.is_string(value) or pyarrow.types.is_large_string(value)):
            raise ValueError(f"{file}: column {key!r} of --json-keys holds {kind}, not strings")


def _rows(file: Path, keys: Sequence[str]) -> Iterator[Record]:
    import pyarrow

    size, read, number = file.stat().st_size, 0, 0
    with _package(file).ParquetFile(file) as source:
        try:
            for batch in source.iter_batches(batch_size=_ROWS_AT_A_TIME, columns=list(keys)):
                batch.validate(full=True)  # else offsets beyond a buffer are followed
                # Bytes, so that text which is not UTF-8 is met row by row, as in lines of JSON.
                columns = [
                    batch.column(key).cast(pyarrow.large_string()).cast(pyarrow.large_binary())
                    for key in keys
                ]
                for values in zip(*columns, strict=True):
                    number += 1
                    # An estimate for progress: rows take different numbers of bytes.
                    last, read = read, size * number // source.metadata.num_rows
                    content = {key: value.as_py() for key, value in zip(keys, values, strict=True)}
                    yield Record(number=number, content=content, num_bytes=read - last)
        except (pyarrow.ArrowException, OSError) as error:
            reason = _LOST_REST.format(in_one_line(error))
            yield Record(number=number + 1, content=b"", num_bytes=size - read, problem=reason)
