"""Writes token files in Megatron's format under names that say they are not complete."""

import os
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

_PARTIAL = ".partial"


class IndexedWriter:
    """``PREFIX.bin`` and ``PREFIX.idx`` through megatron-core's builder, published at the end.

    :meth:`finish` completes the files, :meth:`publish` gives them their names, :meth:`discard`
    removes what was not published. A run that is killed leaves only ``*.partial``.

    Raises:
        ValueError: from :meth:`finish`, if no document had a token.
    """

    def __init__(self, prefix: str, dtype: type[np.integer]):
        self.prefix = prefix
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

    def finish(self) -> None:
        """Complete both files on disk, still under their partial names."""
        if not self.num_documents:
            raise ValueError(f"nothing to write to {self.prefix}: no document has a token")
        self._builder.finalize(self._partial(".idx"))
        for ending in (".bin", ".idx"):
            with open(self._partial(ending), "rb") as file:
                os.fsync(file)

    def publish(self) -> None:
        """Rename both files; at no moment is there an .idx beside another run's .bin."""
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        for ending in (".bin", ".idx"):
            os.replace(self._partial(ending), self.prefix + ending)

    def discard(self) -> None:
        """Remove the partial files that are left."""
        self._builder.data_file.close()
        for ending in (".bin", ".idx"):
            Path(self._partial(ending)).unlink(missing_ok=True)

    def _partial(self, ending: str) -> str:
        return f"{self.prefix}{ending}{_PARTIAL}"
