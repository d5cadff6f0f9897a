"""megatron-core's GPT samples with our fields, in our order (:mod:`.sample_order`).

A sample is ``seq_length`` + 1 tokens of documents joined one after the other: the first and the
last document may be cut.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from torch import Tensor

from megatron_untied.config.data import DocumentBoundaries
from megatron_untied.data.index_cache import Arrays, cached_arrays
from megatron_untied.data.indexed_files import out_of_vocabulary, outside
from megatron_untied.data.sample_order import sample_indices


@dataclass
class PackedDocumentsConfig(GPTDatasetConfig):
    """megatron-core's configuration and what it has no field for.

    ``path_to_cache`` stays None: megatron-core would let rank 0 alone write there.
    """

    fingerprints: tuple[str, ...] = field(default=())
    """Of the token files: a key of cached indices, which must not outlive other files."""
    order: str = "epochs"
    """The way in which samples are shuffled, a key of cached indices too."""
    document_boundaries: DocumentBoundaries = "idx"
    """Where positions start again, with ``reset_position_ids``."""
    vocab_size: int = 0
    """Of the tokenizer: tokens are below it."""
    cache_folder: str | None = None
    """Where indices are kept; None is beside the token files."""


class PackedDocuments(GPTDataset):
    """Samples of one pair of token files.

    The masks are made anew for every sample. GPTDataset's are cached with the first sample's
    padding in them, and its restart of positions costs one pass over the sequence a document.
    """

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*GPTDataset._key_config_attributes(), "fingerprints", "order"]

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``tokens``, ``labels``, ``positions`` int64 and ``loss_mask`` fp32, each [s].

        Raises:
            ValueError: if a token is not in the vocabulary, with file, document and place.
        """
        ids, documents = self._query_document_sample_shuffle_indices(index)  # [s + 1], [documents]
        offset = self.sample_index[self.shuffle_index[index], 1]  # of the sample in its first one
        ends = self.dataset.sequence_lengths[documents].cumsum(dtype=np.int64) - offset
        self._check_vocabulary(ids, documents, offset, ends)
        text = torch.from_numpy(ids)
        tokens, labels = text[:-1], text[1:]
        loss_mask = torch.ones(len(tokens))
        if self.config.eod_mask_loss:
            loss_mask[tokens == self.config.tokenizer.eod] = 0.0
        positions = torch.arange(len(tokens))
        if self.config.reset_position_ids:
            positions -= self._document_starts(tokens, ends)
        return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "positions": positions}

    def _document_starts(self, tokens: Tensor, ends: np.ndarray) -> Tensor:
        """Where in the sample the document of each token starts: [s] -> [s]."""
        starts = torch.zeros(len(tokens) + 1, dtype=torch.int64)
        if self.config.document_boundaries == "eod":
            firsts = (tokens == self.config.tokenizer.eod).nonzero()[:, 0] + 1
        else:  # the last document may begin with the label that is no token of this sample
            firsts = torch.from_numpy(ends[:-1])
        starts[firsts] = firsts
        return starts[:-1].cummax(0).values

    def _check_vocabulary(
        self, ids: np.ndarray, documents: np.ndarray, offset: int, ends: np.ndarray
    ) -> None:
        found = outside(ids, self.config.vocab_size)
        if len(found):
            place = int(found[0])
            nth = int(np.searchsorted(ends, place, side="right"))
            raise out_of_vocabulary(
                self.dataset_path,
                document=int(documents[nth]),
                place=place + int(offset) if nth == 0 else place - int(ends[nth - 1]),
                token=int(ids[place]),
                vocab_size=self.config.vocab_size,
            )

    def _build_document_sample_shuffle_indices(self) -> Arrays:
        """In place of megatron-core's, which let rank 0 alone write what all others map."""
        folder = self.config.cache_folder
        if folder is None and not self.config.mock:
            folder = Path(self.dataset.path_prefix, "cache", f"{type(self).__name__}_indices")
        return cached_arrays(
            folder and Path(folder),
            f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}",
            ("document_index", "sample_index", "shuffle_index"),
            self._indices,
        )

    def _indices(self) -> Arrays:
        indices = sample_indices(
            self.indices,
            np.asarray(self.dataset.sequence_lengths),
            seq_length=self.config.sequence_length,
            num_samples=self.num_samples,
            seed=self.config.random_seed,
        )
        return indices.document_index, indices.sample_index, indices.shuffle_index


class MockPackedDocuments(PackedDocuments, MockGPTDataset):
    """Counting documents of up to 4096 tokens, the same on every machine."""


class BlendedDocuments(BlendedDataset):
    """megatron-core's mixture of datasets; its indices are cached as theirs are."""

    def _build_indices(self) -> Arrays:
        folder = self.config.cache_folder
        return cached_arrays(
            folder and Path(folder),
            f"{self.unique_description_hash}-{type(self).__name__}-{self.split.name}",
            ("dataset_index", "dataset_sample_index"),
            super()._build_indices,
        )
