"""Samples of token files: megatron-core's GPTDataset with our fields and order of samples.

A sample is ``seq_length`` + 1 tokens of concatenated documents: the first and the last document may
be cut. :mod:`.sample_order` defines the order.
"""

import copy
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import Split
from torch import Tensor
from typing_extensions import override

from megatron_untied.config.data import DocumentBoundaries, Lengths, LengthWeights
from megatron_untied.config.problems import first_few
from megatron_untied.data.index_cache import Arrays, cached_arrays
from megatron_untied.data.indexed_files import out_of_vocabulary, outside
from megatron_untied.data.sample_order import sample_indices


@dataclass
class PackedDocumentsConfig(GPTDatasetConfig):
    """Megatron-core's configuration with further fields.

    ``path_to_cache`` stays None: there megatron-core would write on rank 0 only.
    """

    fingerprints: tuple[str, ...] = field(default=())
    """Digests of the token files: part of the key of cached indices, which must not be used for
    other files."""
    order: str = "epochs"
    """How samples are chosen and shuffled; also part of the key of cached indices."""
    earlier: Lengths = ()
    """Lengths and numbers of the training samples before those of ``last_length``."""
    last_length: int | None = None
    """Of the last samples, where there are earlier ones. ``sequence_length`` is then the shortest:
    megatron-core pads samples below it."""
    longest: int | None = None
    """The longest of all, likewise."""
    weights: LengthWeights = ()
    """How often training documents are read in an epoch, by length."""
    document_boundaries: DocumentBoundaries = "idx"
    """Where positions restart, with ``reset_position_ids``."""
    vocab_size: int = 0
    """The tokenizer's; every token must be below it."""
    cache_folder: str | None = None
    """Folder of cached indices; None is one beside the token files."""

    def with_earlier(self, earlier: Lengths) -> "PackedDocumentsConfig":
        """A copy for a file with its own numbers of samples; the splits are not parsed again."""
        copied = copy.copy(self)
        copied.earlier = earlier
        copied.order = f"epochs of {[*earlier, copied.last_length]}, weights {self.weights}"
        return copied


class PackedDocuments(GPTDataset):
    """Samples of one pair of token files.

    Masks and positions are computed for each sample. GPTDataset caches its masks with the first
    sample's padding in them, and its restart of positions costs a pass over the sequence for each
    document.
    """

    @override
    @staticmethod
    def _key_config_attributes() -> list[str]:
        # The hash of these is the name of the cached indices: with the same name, other files or
        # another order would be read as if they were this run's.
        return [*GPTDataset._key_config_attributes(), "fingerprints", "order"]

    # GPTDataset takes it from sample_index, which here has a row more for each epoch.
    def __len__(self) -> int:
        return len(self.shuffle_index)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``tokens``, ``labels``, ``positions`` int64 and ``loss_mask`` fp32, each [s].

        Raises:
            ValueError: if a token is not in the vocabulary, with file, document and place.
        """
        ids, documents = self._query_document_sample_shuffle_indices(index)  # [s + 1], [documents]
        offset = self.sample_index[self.shuffle_index[index], 1]  # into the first document
        # Where each document ends in the sample: [documents].
        ends = self.dataset.sequence_lengths[documents].cumsum(dtype=np.int64) - offset
        self._check_vocabulary(ids, documents, offset, ends)
        text = torch.from_numpy(ids)  # int64, a copy of the map: 40 MiB at 5M tokens
        tokens, labels = text[:-1], text[1:]  # [s + 1] -> [s] twice, views of one buffer
        loss_mask = torch.ones(len(tokens))
        if self.config.eod_mask_loss:
            loss_mask[tokens == self.config.tokenizer.eod] = 0.0
        positions = torch.arange(len(tokens))
        if self.config.reset_position_ids:
            # Subtract from each position the one where its document starts.
            starts = torch.zeros(len(tokens) + 1, dtype=torch.int64)  # [s + 1]
            if self.config.document_boundaries == "eod":
                firsts = (tokens == self.config.tokenizer.eod).nonzero()[:, 0] + 1
            else:  # one more than s: the last document may begin with the last label
                firsts = torch.from_numpy(ends[:-1])
            starts[firsts] = firsts  # [0, 0, 2, 0, 0, 5, ...], whose running maximum is the answer
            positions -= starts[:-1].cummax(0).values
        return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "positions": positions}

    def describe_sample(self, index: int) -> str:
        """Sample ``index`` with its documents and their file, for messages."""
        row = self.shuffle_index[index]
        first, last = self.sample_index[row : row + 2, 0]
        documents = map(str, self.document_index[first : last + 1].tolist())
        of_file = f" of {self.dataset_path}" if self.dataset_path else ""
        return f"sample {index} (documents {first_few(documents, 6)}{of_file})"

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

    @override
    def _build_document_sample_shuffle_indices(self) -> Arrays:
        # In megatron-core rank 0 writes what all others map: that needs a shared file system.
        folder = self.config.cache_folder
        if folder is None and not self.config.mock:
            folder = Path(self.dataset.path_prefix, "cache", f"{type(self).__name__}_indices")
        return cached_arrays(
            folder and Path(folder),
            f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}",
            ("document_index", "sample_index", "shuffle_index"),
            lambda: sample_indices(
                self.indices,
                np.asarray(self.dataset.sequence_lengths),
                seq_length=self.config.last_length or self.config.sequence_length,
                num_samples=self.num_samples,
                seed=self.config.random_seed,
                earlier=self.config.earlier,
                weights=self.config.weights if self.index_split is Split.train else (),
            ),
        )


class MockPackedDocuments(PackedDocuments, MockGPTDataset):
    """Counting documents of up to 4096 tokens, the same on every machine."""


class BlendedDocuments(BlendedDataset):
    """Megatron-core's mixture of datasets, with its indices in the same cache."""

    @override
    def _build_indices(self) -> Arrays:
        folder = self.config.cache_folder
        return cached_arrays(
            folder and Path(folder),
            f"{self.unique_description_hash}-{type(self).__name__}-{self.split.name}",
            ("dataset_index", "dataset_sample_index"),
            super()._build_indices,
        )

    def describe_sample(self, index: int) -> str:
        """Sample ``index`` of the mixture with what it is in its own dataset, for messages."""
        own = self.datasets[self.dataset_index[index]]
        return f"sample {index}: {own.describe_sample(int(self.dataset_sample_index[index]))}"
