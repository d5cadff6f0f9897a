"""Writes token files in Megatron's format under names that say they are not complete."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_untied.data.documents import Place, records_digest
from megatron_untied.data.provenance import ENDING, Provenance

_PARTIAL = ".partial"


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """How far a writer is."""

    num_documents: int
    num_empty: int
    num_tokens: int


class IndexedWriter:
    """``PREFIX.bin`` and ``PREFIX.idx`` through megatron-core's builder, published at the end.

    With ``provenance``, ``PREFIX.provenance.json`` beside them tells what made them.

    :meth:`finish` completes the files, :meth:`publish` gives them their names, :meth:`discard`
    removes what was not published. A run that is killed leaves only ``*.partial``.

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
        """Append a document [tokens]; one without tokens is counted and left out."""
        if not len(ids):
            self.num_empty += 1
            return
        self._builder.add_document(ids, [len(ids)])
        self.num_documents += 1
        self.num_tokens += len(ids)

    def add_files(self, prefix: str) -> None:
        """Append all documents of token files of the same dtype."""
        self._builder.add_index(prefix)
        lengths = self._lengths()
        self.num_documents, self.num_tokens = len(lengths), int(lengths.sum(dtype=np.int64))

    @property
    def counts(self) -> Counts:
        """What was added so far."""
        return Counts(
            num_documents=self.num_documents,
            num_empty=self.num_empty,
            num_tokens=self.num_tokens,
        )

    def roll_back(self, counts: Counts) -> None:
        """Forget what was added since, in whole or in part: for a run that was interrupted."""
        del self._builder.sequence_lengths[counts.num_documents :]
        del self._builder.document_indices[counts.num_documents + 1 :]
        num_bytes = counts.num_tokens * np.dtype(self._builder.dtype).itemsize
        if self._builder.data_file.closed:  # by finish
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
            self._provenance.write(self._partial(ENDING), self._lengths(), self.num_empty)
        for ending in self._endings:
            with open(self._partial(ending), "rb") as file:
                os.fsync(file)

    def publish(self, prefix: str | None = None) -> None:
        """Rename the files, to ``prefix`` if given, the .idx last.

        At no moment is there an .idx beside another run's .bin or provenance.
        """
        prefix = prefix or self.prefix
        for ending in (".idx", ENDING):
            Path(prefix + ending).unlink(missing_ok=True)
        for ending in self._endings:
            os.replace(self._partial(ending), prefix + ending)

    def discard(self) -> None:
        """Remove the partial files that are left."""
        self._builder.data_file.close()
        for ending in self._endings:
            Path(self._partial(ending)).unlink(missing_ok=True)

    def _lengths(self) -> np.ndarray:
        return np.array(self._builder.sequence_lengths, dtype=np.int32)

    def _partial(self, ending: str) -> str:
        return f"{self.prefix}{ending}{_PARTIAL}"


INCOMPLETE = ".incomplete"


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedPart:
    """State of the run, without its tokens."""

    made_by: dict[str, Any]
    """The provenance, without the tokenizer's path."""
    last: Place
    """The last document that was written or left out."""
    num_empty: dict[str, int]
    """By JSON key, as the token files are; of a key that has no token yet there are none."""
    files_before: list[list]
    """Path and bytes of the files that come before that of ``last``."""
    digest: str
    """Of the records of that file up to ``last``."""


def state_path(output_prefix: str) -> Path:
    """Where the state is stored; that there is one means that the part is complete."""
    return Path(f"{output_prefix}{INCOMPLETE}.json")


def save_finished_part(
    output_prefix: str,
    writers: Mapping[str, IndexedWriter],
    files: Sequence[Path],
    last: Place,
    provenance: Provenance,
) -> None:
    """Publish what ``writers`` by JSON key hold, and the state, in place of an earlier part."""
    part = FinishedPart(
        made_by=_settings(provenance),
        last=last,
        num_empty={key: writer.num_empty for key, writer in writers.items()},
        files_before=_sizes(files[: last.file_index]),
        digest=records_digest(files[last.file_index], list(writers), last.number),
    )
    filled = [writer for writer in writers.values() if writer.num_documents]
    for writer in filled:
        writer.finish()
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
    """Put the tokens of the part into ``writers`` and return the place after which to go on.

    Raises:
        ValueError: there is no part, or flags or input up to that place are not those it had.
    """
    path = state_path(output_prefix)
    if not path.is_file():
        raise ValueError(f"--resume: there is no {path}; leave the flag out to begin anew")
    fields = json.loads(path.read_text())
    part = FinishedPart(**{**fields, "last": Place(**fields["last"])})
    remedy = f"; give the same, or leave --resume out to begin anew ({path})"
    if part.made_by != _settings(provenance) or list(part.num_empty) != list(writers):
        raise ValueError(f"--resume: tokenizer, its flags or --json-keys are others{remedy}")
    index = part.last.file_index
    same_files = _sizes(files[:index]) == part.files_before and index < len(files)
    if not same_files or str(files[index]) != part.last.file:
        raise ValueError(f"--resume: files of --input before {part.last} are others{remedy}")
    if records_digest(files[index], list(writers), part.last.number) != part.digest:
        raise ValueError(f"--resume: {part.last.file} changed before {part.last}{remedy}")
    for key, writer in writers.items():
        writer.num_empty = part.num_empty[key]
        if Path(f"{writer.prefix}{INCOMPLETE}.idx").is_file():
            writer.add_files(writer.prefix + INCOMPLETE)
    return part.last


def remove_finished_part(output_prefix: str, writers: Mapping[str, IndexedWriter]) -> None:
    """Remove the state, then the token files; after a run that wrote all, they are superseded."""
    state_path(output_prefix).unlink(missing_ok=True)
    for writer in writers.values():
        for ending in (".idx", ".bin", ENDING):
            Path(writer.prefix + INCOMPLETE + ending).unlink(missing_ok=True)


def _settings(provenance: Provenance) -> dict[str, Any]:
    return {k: v for k, v in asdict(provenance).items() if k != "tokenizer_model"}


def _sizes(files: Sequence[Path]) -> list[list]:
    return [[str(file), file.stat().st_size] for file in files]
