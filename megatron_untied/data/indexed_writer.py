"""Writes token files in Megatron's format under names that say they are not complete."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

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
