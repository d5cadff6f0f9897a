"""Reads documents from JSON lines, plain-text files and folders of both, in a fixed order."""

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_JSON_LINES = (".jsonl", ".json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One document as it was read."""

    where: str
    """File, and line in a file of JSON lines: for messages."""
    texts: dict[str, str]
    """Its texts by JSON key; a plain-text file has "text" alone."""
    num_bytes: int
    """Bytes it takes in its file: for progress."""


def find_files(inputs: Sequence[str]) -> list[Path]:
    """The files that paths, globs and folders name, in their order; inside one, sorted by path.

    Folders are taken with all below them, without hidden files.

    Raises:
        FileNotFoundError: if one of ``inputs`` names nothing.
    """
    files = []
    for name in inputs:
        matches = [name] if Path(name).exists() else sorted(glob.glob(name, recursive=True))
        found = [file for match in matches for file in _files_at(Path(match))]
        if not found:
            raise FileNotFoundError(f"--input {name}: no such file, and no file matches it")
        files += found
    return files


def _files_at(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    visible = (
        file
        for file in path.rglob("*")
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    return sorted(file for file in visible if file.is_file())


def read_documents(files: Sequence[Path], keys: Sequence[str] = ("text",)) -> Iterator[Document]:
    """Every line of ``.jsonl`` and ``.json`` files, every other file as a whole.

    Text comes as it is, line endings and byte order marks included.

    Raises:
        ValueError: with file and line, for what is not UTF-8, not JSON, or lacks a key.
    """
    for file in files:
        if file.suffix in _JSON_LINES:
            yield from _json_lines(file, keys)
        elif tuple(keys) != ("text",):
            raise ValueError(f"{file} is plain text: --json-keys {' '.join(keys)} needs JSON lines")
        else:
            data = file.read_bytes()
            texts = {"text": _decode(data, str(file))}
            yield Document(where=str(file), texts=texts, num_bytes=len(data))


def _json_lines(file: Path, keys: Sequence[str]) -> Iterator[Document]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            where = f"{file}:{number}"
            try:
                fields = json.loads(_decode(line, where))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{where}: not a line of JSON ({error.msg} at column {error.colno}); "
                    "each line must be one object"
                ) from error
            texts = {key: _text(fields, key, where) for key in keys}
            yield Document(where=where, texts=texts, num_bytes=len(line))


def _text(fields: object, key: str, where: str) -> str:
    text = fields.get(key) if isinstance(fields, dict) else None
    if not isinstance(text, str):
        found = ", ".join(fields) if isinstance(fields, dict) else type(fields).__name__
        raise ValueError(f"{where}: no text under the key {key!r} of --json-keys; found: {found}")
    return text


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: not UTF-8 (byte 0x{data[error.start]:02x} at {error.start}); convert the "
            "file or leave it out"
        ) from error
