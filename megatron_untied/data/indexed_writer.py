"""Writes token files in Megatron's format, and the state from which an interrupted run resumes.

:class:`IndexedWriter` writes under partial names and renames the files when they are complete.
:func:`save_finished_part` stores what an interrupted run has tokenized, :func:`load_finished_part`
continues from it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_untied.checkpoint.directory import read_object
from megatron_untied.checkpoint.run_config import from_json, is_a
from megatron_untied.data.documents import Place, records_digest
from megatron_untied.data.provenance import ENDING, Provenance
from megatron_untied.data.records import num_bytes_of

_PARTIAL = ".partial"


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Counts of what a writer has written."""

    num_documents: int
    num_empty: int
    num_tokens: int


class IndexedWriter:
    """Writes ``PREFIX.bin`` and ``PREFIX.idx`` with megatron-core's builder.

    With ``provenance`` also ``PREFIX.provenance.json``, which records how they were made.

    :meth:`finish` completes the files, :meth:`publish` renames them to their names, :meth:`discard`
    removes unpublished files. A killed run leaves only ``*.partial``.

    Raises:
        ValueError: from :meth:`finish`, if no document had a token.
    """

    def __init__(self, prefix: str, dtype: type[np.integer], provenance: Provenance | None = None):
        self.prefix = prefix
        self._provenance = provenance
        self._endings = (".bin", *((ENDING,) if provenance else ()), ".idx")
        self.num_documents = self.num_empty = self.num_tokens = 0
        self._builder = IndexedDatasetBuilder(self._partial(".bin"), dtype=dtype)

    def add(self, ids: np.ndarray) -> None:
        """Append a document, int [tokens]; one without tokens is only counted."""
        if not len(ids):
            self.num_empty += 1
            return
        self._builder.add_document(ids, [len(ids)])
        self.num_documents += 1
        self.num_tokens += len(ids)

    def add_files(self, prefix: str) -> None:
        """Append all documents of token files of the same dtype."""
        # Copies the .bin in blocks; the index of all documents is held in memory until the end.
        self._builder.add_index(prefix)
        lengths = np.array(self._builder.sequence_lengths, dtype=np.int32)
        self.num_documents, self.num_tokens = len(lengths), int(lengths.sum(dtype=np.int64))

    @property
    def counts(self) -> Counts:
        """Counts so far, for :meth:`roll_back`."""
        return Counts(
            num_documents=self.num_documents,
            num_empty=self.num_empty,
            num_tokens=self.num_tokens,
        )

    def roll_back(self, counts: Counts) -> None:
        """Remove what was added after ``counts``, even a document that was added in part."""
        del self._builder.sequence_lengths[counts.num_documents :]
        del self._builder.document_indices[counts.num_documents + 1 :]
        num_bytes = counts.num_tokens * np.dtype(self._builder.dtype).itemsize
        if self._builder.data_file.closed:  # finish() closes it
            os.truncate(self._partial(".bin"), num_bytes)
        else:
            self._builder.data_file.truncate(num_bytes)
        self.num_documents, self.num_empty = counts.num_documents, counts.num_empty
        self.num_tokens = counts.num_tokens

    def finish(self) -> None:
        """Complete the files on disk, still under their partial names."""
        if not self.num_documents:
            raise ValueError(f"nothing to write to {self.prefix}: no document has a token")
        self._builder.finalize(self._partial(".idx"))
        if self._provenance:
            lengths = np.array(self._builder.sequence_lengths, dtype=np.int32)
            self._provenance.write(self._partial(ENDING), lengths, self.num_empty)
        # Before publish() renames them: a name must not reach the disk before its content.
        for ending in self._endings:
            with open(self._partial(ending), "rb") as file:
                os.fsync(file)

    def publish(self, prefix: str | None = None) -> None:
        """Rename the files to ``prefix``, by default the writer's own."""
        prefix = prefix or self.prefix
        # The old .idx goes first and the new one comes last: at no moment is there an .idx beside
        # the .bin or provenance of another run.
        for ending in (".idx", ENDING):
            Path(prefix + ending).unlink(missing_ok=True)
        for ending in self._endings:
            os.replace(self._partial(ending), prefix + ending)

    def discard(self) -> None:
        """Remove the partial files."""
        self._builder.data_file.close()
        for ending in self._endings:
            Path(self._partial(ending)).unlink(missing_ok=True)

    def _partial(self, ending: str) -> str:
        return f"{self.prefix}{ending}{_PARTIAL}"


INCOMPLETE = ".incomplete"


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedPart:
    """The state of an interrupted run, stored beside the token files of its finished part."""

    made_by: dict[str, Any]
    """The provenance, without the tokenizer's path, which may change."""
    last: Place
    """The last document that was written or left out."""
    num_empty: dict[str, int]
    """Documents without tokens by JSON key; a key without any token yet has no token files."""
    files_before: list[list]
    """Path and bytes of the input files before that of ``last``."""
    digest: str
    """Digest of the records of that file up to ``last``."""


def state_path(output_prefix: str) -> Path:
    """The file of the state; its existence means that the part is complete."""
    return Path(f"{output_prefix}{INCOMPLETE}.json")


def save_finished_part(
    output_prefix: str,
    writers: Mapping[str, IndexedWriter],
    files: Sequence[Path],
    last: Place,
    provenance: Provenance,
) -> None:
    """Publish the files of ``writers``, by JSON key, and the state; replaces an earlier part."""
    made_by, files_before = _origin(provenance, files[: last.file_index])
    part = FinishedPart(
        made_by=made_by,
        last=last,
        num_empty={key: writer.num_empty for key, writer in writers.items()},
        files_before=files_before,
        digest=records_digest(files[last.file_index], list(writers), last.number),
    )
    filled = [writer for writer in writers.values() if writer.num_documents]
    for writer in filled:
        writer.finish()
    # The state goes first and comes last: a crash in between leaves no part that looks complete.
    remove_finished_part(output_prefix, writers)
    for writer in filled:
        writer.publish(writer.prefix + INCOMPLETE)
    partial = state_path(output_prefix).with_suffix(".partial")
    partial.write_text(json.dumps(asdict(part), indent=1) + "\n")
    partial.replace(state_path(output_prefix))


def load_finished_part(
    output_prefix: str,
    writers: Mapping[str, IndexedWriter],
    files: Sequence[Path],
    provenance: Provenance,
) -> Place:
    """Copy the tokens of the part to ``writers``; returns the place of its last document.

    Raises:
        ValueError: there is no part, or its flags or its input up to that place have changed.
    """
    path = state_path(output_prefix)
    if not path.is_file():
        raise ValueError(f"--resume: there is no {path}; leave the flag out to start over")
    remedy = f"; give the same, or leave --resume out to start over ({path})"
    part = _read_finished_part(path)
    index = part.last.file_index
    made_by, files_before = _origin(provenance, files[:index])
    if part.made_by != made_by or list(part.num_empty) != list(writers):
        raise ValueError(f"--resume: tokenizer, its flags or --json-keys differ{remedy}")
    same_files = files_before == part.files_before and index < len(files)
    if not same_files or str(files[index]) != part.last.file:
        raise ValueError(f"--resume: files of --input before {part.last} differ{remedy}")
    # Last: it reads the file up to that place. Of the files before it sizes have to do.
    if records_digest(files[index], list(writers), part.last.number) != part.digest:
        raise ValueError(f"--resume: {part.last.file} changed before {part.last}{remedy}")
    for key, writer in writers.items():
        writer.num_empty = part.num_empty[key]
        if Path(f"{writer.prefix}{INCOMPLETE}.idx").is_file():
            writer.add_files(writer.prefix + INCOMPLETE)
    return part.last


def _read_finished_part(path: Path) -> FinishedPart:
    fields = read_object(path, "leave --resume out to start over")
    try:
        last = from_json(Place, fields.get("last"), path)
        part = from_json(FinishedPart, fields | {"last": last}, path)
        is_valid = last.file_index >= 0 and all(is_a(x, int) for x in part.num_empty.values())
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ValueError(f"--resume: {path} is damaged; leave the flag out to start over")
    return part


def remove_finished_part(output_prefix: str, writers: Mapping[str, IndexedWriter]) -> None:
    """Remove the state, then the token files of the part."""
    state_path(output_prefix).unlink(missing_ok=True)
    for writer in writers.values():
        for ending in (".idx", ".bin", ENDING):
            Path(writer.prefix + INCOMPLETE + ending).unlink(missing_ok=True)


def _origin(
    provenance: Provenance, files_before: Sequence[Path]
) -> tuple[dict[str, Any], list[list]]:
    """``FinishedPart.made_by`` and ``FinishedPart.files_before``."""
    made_by = asdict(provenance)
    del made_by["tokenizer_model"]  # its files may move between the runs; the hash stays
    return made_by, [[str(file), num_bytes_of(file)] for file in files_before]
