"""Reads documents from JSON lines, Parquet and text files, in a fixed order.

:func:`read_documents` turns records into texts; one that cannot be decoded becomes a document
with a problem. :class:`BadLines` applies ``--on-bad-line`` to those, and counts them.
"""

import argparse
import glob
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from megatron_untied.config.problems import in_one_line
from megatron_untied.data.records import (
    BYTE_ORDER_MARK,
    Record,
    check_readable,
    num_bytes_of,
    read_records,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The place of a document in the input."""

    file_index: int
    """Index among all input files."""
    file: str
    number: int
    """Line or row, from 1; 0 is a whole file."""

    def __str__(self) -> str:
        return f"{self.file}:{self.number}" if self.number else self.file


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One document, or the reason why it cannot be used."""

    place: Place
    texts: dict[str, str]
    """Texts by JSON key; a plain-text file has the key "text". Empty if there is a problem."""
    num_bytes: int
    """Bytes of the file that it covers, for progress."""
    problem: str | None = None
    """The reason why it has no text."""
    replaced: str | None = None
    """A description of the first invalid text, all of which was replaced by U+FFFD."""


def find_files(
    inputs: Sequence[str], *, flag: str = "--input", join_folders: bool = False
) -> list[Path]:
    """The files of paths, globs and folders, in their order; within each sorted by path.

    Folders are searched recursively; hidden files and folders are skipped. With
    ``join_folders`` they are kept as they are: each is one document. ``flag`` is the
    name of ``inputs`` in messages.

    Raises:
        FileNotFoundError: if one of ``inputs`` names nothing.
        ValueError: if there are token files among them, such as those of an earlier run, or a file
            is named twice.
    """
    files: dict[Path, Path] = {}
    parents: set[Path] = set()  # of all files so far
    for name in inputs:
        matches = [name] if Path(name).exists() else sorted(glob.glob(name, recursive=True))
        # A pattern that ends in ** matches folders and the files in them.
        found = dict.fromkeys(
            file
            for match in map(Path, matches)
            for file in ([match] if join_folders and match.is_dir() else _files_at(match))
        )
        if not found:
            raise FileNotFoundError(f"{flag} {name}: no such file, and no file matches it")
        for file in found:
            if file.suffix == ".idx" and file.with_suffix(".bin").is_file():
                raise ValueError(
                    f"{flag} {name} holds token files ({file}), which are no text; keep what is "
                    "tokenized and --output-prefix in different folders, or give a pattern such as "
                    f"{file.parent}/*.jsonl"
                )
            resolved = file.resolve()
            if resolved in parents or any(parent in files for parent in resolved.parents):
                raise ValueError(
                    f"{flag} names {file} and also what holds it or is in it: with --join-folders "
                    "a folder is one document; name one of them"
                )
            parents.update(resolved.parents)
            first = files.setdefault(resolved, file)
            if first is not file:
                also = "" if first == file else f", also as {first}"
                raise ValueError(
                    f"{flag} names {file} twice{also}, and its documents would count double; name "
                    "it once"
                )
    return list(files.values())


def _files_at(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    visible = (
        file
        for file in path.rglob("*")
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    # A link without its target is kept, so that reading names it.
    return sorted(file for file in visible if file.is_file() or not file.exists())


def read_documents(
    files: Sequence[Path],
    keys: Sequence[str] = ("text",),
    *,
    replace: bool = False,
    after: Place | None = None,
) -> Iterator[Document]:
    """Every record of ``.jsonl``, ``.json`` and ``.parquet`` files, every other file as a whole.

    Files that end in ``.gz`` or ``.zst`` are decompressed. Text is not changed, line endings and
    byte order marks included, except for a mark at the beginning of a line of JSON. A document that
    cannot be read has a ``problem``. With ``replace``, lone surrogates and bytes that are not UTF-8
    become U+FFFD. Documents up to and including the one at ``after`` are skipped.

    Raises:
        ValueError, OSError, ImportError: when called, if a file cannot be read at all.
    """
    # Not in the generator: the first error should come before hours of work, not in the middle.
    for file in files:
        check_readable(file, keys)
    return _documents(files, keys, replace, after or Place(file_index=0, file="", number=-1))


def _documents(
    files: Sequence[Path], keys: Sequence[str], replace: bool, after: Place
) -> Iterator[Document]:
    skipped_bytes = 0  # counted with the next document, so that progress reaches the end
    for index, file in enumerate(files):
        if index < after.file_index:
            skipped_bytes += num_bytes_of(file)
            continue
        for record in read_records(file, keys):
            if index == after.file_index and record.number <= after.number:
                skipped_bytes += record.num_bytes
                continue
            place = Place(file_index=index, file=str(file), number=record.number)
            num_bytes, skipped_bytes = skipped_bytes + record.num_bytes, 0
            try:
                texts, replaced = _texts(record, keys, replace)
            except ValueError as error:
                yield Document(place=place, texts={}, num_bytes=num_bytes, problem=str(error))
            else:
                yield Document(place=place, texts=texts, num_bytes=num_bytes, replaced=replaced)


def records_digest(file: Path, keys: Sequence[str], last: int) -> str:
    """A digest of the records up to number ``last``."""
    digest = hashlib.blake2b(digest_size=16)
    for record in read_records(file, keys):
        if record.number > last:
            break
        digest.update(repr((record.number, record.content)).encode())
    return digest.hexdigest()


def _texts(record: Record, keys: Sequence[str], replace: bool) -> tuple[dict[str, str], str | None]:
    """The texts of a record by key, and a description of what was replaced in them."""
    if record.problem:
        raise ValueError(record.problem)
    try:
        return _decoded(record, keys, errors="strict"), None
    except UnicodeError as error:
        invalid = error.object[error.start]
        if isinstance(error, UnicodeDecodeError):
            problem = f"not UTF-8 (byte 0x{invalid:02x} at {error.start})"
        else:
            problem = (
                f"U+{ord(invalid):04X} at character {error.start} is half of a pair (a lone "
                "surrogate)"
            )
        if not replace:
            raise ValueError(problem) from error
        # A second pass, for invalid texts only: the strict one tells what was replaced.
        return _decoded(record, keys, errors="replace"), problem


def _decoded(record: Record, keys: Sequence[str], *, errors: str) -> dict[str, str]:
    content = record.content
    if isinstance(content, bytes) and record.number == 0:
        content = {"text": content}
    elif isinstance(content, bytes):
        line = content.removeprefix(BYTE_ORDER_MARK).decode("utf-8", errors)
        reason = None
        try:
            content = json.loads(line)
        except json.JSONDecodeError as error:
            reason = f"{error.msg} at column {error.colno}"
        except (ValueError, RecursionError) as error:  # a number of thousands of digits; nesting
            reason = str(error)
        if reason is not None:  # outside the handlers: a chained traceback would hold the line
            raise ValueError(f"not a line of JSON ({reason}); each line must be one object")
    texts = {}
    for key in keys:
        value = content.get(key) if isinstance(content, dict) else None
        text = value.decode("utf-8", errors) if isinstance(value, bytes) else value
        if not isinstance(text, str):
            problem = f"no text under the key {key!r} of --json-keys"
            if not isinstance(content, dict):
                raise ValueError(f"{problem}; found: {type(content).__name__}")
            if key not in content:
                found = in_one_line(", ".join(content)) or "no key at all"
                raise ValueError(f"{problem}; found: {found}")
            kind = "null" if content[key] is None else f"a {type(content[key]).__name__}"
            raise ValueError(f"{problem}: its value is {kind}")
        if errors == "strict":
            text.encode("utf-8")  # fails for lone surrogates, which JSON allows and UTF-8 does not
        else:
            # Lone surrogates survive this encoding, and its decoding replaces them.
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", errors)
        texts[key] = text
    return texts


POLICIES = ("error", "skip", "replace")
_LINES_KEPT = 20


class CheckedDocument(Protocol):
    """What :class:`BadLines` reads of a document, before or after it was encoded."""

    place: Place
    problem: str | None
    replaced: str | None


class BadLines:
    """Applies ``--on-bad-line`` to each document, and counts the bad ones with their places.

    All places go to the file ``report``, which is created with the first one; memory holds only the
    first few. A resumed run appends to the file.
    """

    def __init__(self, policy: str, report: Path | None = None, *, resume: bool = False):
        self.replace = policy == "replace"
        self.num_skipped = self.num_replaced = 0
        self._policy = policy
        self._report, self._mode = report, "a" if resume else "w"
        self._file: TextIO | None = None
        self._first: list[str] = []

    @staticmethod
    def add_flag(parser: argparse.ArgumentParser) -> None:
        """Add ``--on-bad-line``."""
        parser.add_argument(
            "--on-bad-line",
            choices=POLICIES,
            default="error",
            help="a document that cannot be read or encoded ends the run (error), is left out "
            "(skip), or has invalid text replaced by U+FFFD (replace; left out if that does not "
            "suffice). Counts and line numbers are printed at the end",
        )

    def accepts(self, document: CheckedDocument) -> bool:
        """Whether the document can be used; bad ones are counted.

        Raises:
            ValueError: it cannot, and the policy is "error".
        """
        if not (document.problem or document.replaced):
            return True
        if document.problem:
            if self._policy == "error":
                raise ValueError(
                    f"{document.place}: {document.problem}. --on-bad-line skip leaves such "
                    "documents out, replace puts U+FFFD in place of invalid text"
                )
            self.num_skipped += 1
            line = f"{document.place}: left out: {document.problem}"
        else:
            self.num_replaced += 1
            line = f"{document.place}: replaced by U+FFFD: {document.replaced}"
        if len(self._first) < _LINES_KEPT:
            self._first.append(line)
        if self._report:
            # Opened with the first bad line: a run without any leaves no empty file.
            self._file = self._file or self._report.open(self._mode, encoding="utf-8")
            self._file.write(line + "\n")
        return not document.problem

    def summary(self) -> Iterator[str]:
        """Lines for the end of a run; empty without bad documents."""
        if self._file:
            self._file.close()
        num_bad = self.num_skipped + self.num_replaced
        if num_bad:
            places = f"; all places are in {self._report}" if self._report else ""
            yield f"bad lines: {self.num_skipped:,} left out, {self.num_replaced:,} mended{places}"
            yield from (f"  {line}" for line in self._first)
            if num_bad > len(self._first):
                yield f"  and {num_bad - len(self._first):,} more"
