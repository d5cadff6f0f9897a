"""Samples of training, validation and test, cut from packed documents by megatron-core."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers import MegatronTokenizerBase
from torch import Tensor
from torch.utils.data import Dataset

from megatron_untied.data.blend import SPLIT_NAMES, Blend, check_split, parse_blend
from megatron_untied.data.config import DataConfig
from megatron_untied.data.epochs import sample_indices
from megatron_untied.data.indexed_files import IndexedFiles, open_indexed_files
from megatron_untied.data.provenance import check_provenance


@dataclass(frozen=True, kw_only=True, slots=True)
class Datasets:
    """The three splits; None where no samples were asked for."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


def build_datasets(
    data: DataConfig,
    tokenizer: MegatronTokenizerBase,
    *,
    seq_length: int,
    num_samples: tuple[int, int, int],
    seed: int,
) -> Datasets:
    """Training, validation and test samples: at least ``num_samples`` of each.

    Collective: all ranks must call it, the first one writes the sample indices that the others
    then read. Documents are shuffled by ``seed``, joined, cut into sequences of
    ``seq_length`` + 1 tokens overlapping by one, and the sequences shuffled; a split that is too
    short is read again in another order (:mod:`.epochs`). More samples begin with the same ones.

    Raises:
        FileNotFoundError: if token files are missing.
        ValueError: if they are damaged, do not fit the tokenizer, or a split is too short.
            Every rank raises, before any collective.
    """
    blend = parse_blend(data.data_path)
    files = [open_indexed_files(p, vocab_size=tokenizer.vocab_size) for p in blend.prefixes]
    check_provenance(files, tokenizer)
    config = _PackedDocumentsConfig(
        random_seed=seed,
        sequence_length=seq_length,
        **_source(data, blend),
        fingerprints=tuple(pair.fingerprint() for pair in files),
        path_to_cache=data.data_cache_path,
        tokenizer=tokenizer,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=data.eod_mask_loss,
        create_attention_mask=False,
    )
    for index, samples in enumerate(num_samples):
        if not samples:  # megatron-core never returns from building a split without documents
            config.split_matrix[index] = None
    for pair in files:
        _check_splits(pair, config, num_samples)
    dataset_class = _MockPackedDocuments if data.mock_data else PackedDocuments
    builder = BlendedMegatronDatasetBuilder(dataset_class, num_samples, lambda: True, config)
    datasets = builder.build()
    for name, dataset, samples in zip(SPLIT_NAMES, datasets, num_samples, strict=True):
        if dataset is not None and len(dataset) < samples:
            raise ValueError(
                f"--data-path without weights is read once: {len(dataset)} {name} samples, the "
                f"run needs {samples}; give weights to read it again, or shorten the run"
            )
    return Datasets(**dict(zip(SPLIT_NAMES, datasets, strict=True)))


def _source(data: DataConfig, blend: Blend) -> dict:
    """megatron-core's fields for the token files; none of them is its way to ask for mock data."""
    if data.mock_data:
        return {}
    check_split(data.split)
    return {
        "blend": (list(blend.prefixes), blend.weights and list(blend.weights)),
        "split": data.split,
    }


def _check_splits(
    files: IndexedFiles, config: GPTDatasetConfig, num_samples: tuple[int, int, int]
) -> None:
    """Raise unless every split with samples holds a sequence; less would repeat inside one."""
    num_documents = len(files.lengths)
    for name, shares, samples in zip(SPLIT_NAMES, config.split_matrix, num_samples, strict=True):
        start, stop = (round(share * num_documents) for share in shares or (0, 0))
        num_tokens = int(files.lengths[start:stop].sum(dtype="int64"))
        if samples and num_tokens <= config.sequence_length:
            raise ValueError(
                f"--data-path {files.prefix}: --split {config.split} leaves {name} {stop - start} "
                f"of {num_documents} documents, {num_tokens} tokens; one sample takes "
                f"{config.sequence_length + 1}: give it a larger share, or ask for no samples of it"
            )


@dataclass
class _PackedDocumentsConfig(GPTDatasetConfig):
    fingerprints: tuple[str, ...] = field(default=())
    """Of the token files: a key of cached indices, which must not outlive other files."""
    order: str = "epochs"
    """The way in which samples are shuffled, a key of cached indices too."""


class PackedDocuments(GPTDataset):
    """megatron-core's GPT samples with our fields, in our order (:mod:`.epochs`).

    The masks are made anew for every sample. GPTDataset's are cached with the first sample's
    padding in them, and its restart of positions costs one pass over the sequence a document.
    """

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*GPTDataset._key_config_attributes(), "fingerprints", "order"]

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``tokens``, ``labels``, ``positions`` int64 and ``loss_mask`` fp32, each [s]."""
        text, _ = self._query_document_sample_shuffle_indices(index)
        text = torch.from_numpy(text)  # [s + 1]
        tokens, labels = text[:-1], text[1:]
        ends = tokens == self.config.tokenizer.eod
        loss_mask = torch.ones(len(tokens))
        if self.config.eod_mask_loss:
            loss_mask[ends] = 0.0
        loss_mask[labels == self._pad_token_id] = 0.0
        positions = torch.arange(len(tokens))
        if self.config.reset_position_ids:
            positions -= _document_starts(ends)
        return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "positions": positions}

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """In place of megatron-core's: the first rank writes the files that the others map."""
        folder = self._index_folder()
        if folder is None:
            return self._indices()
        names = ("document_index", "sample_index", "shuffle_index")
        start = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"
        paths = [folder / f"{start}-{name}.npy" for name in names]
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        if is_first and not all(path.is_file() for path in paths):
            folder.mkdir(parents=True, exist_ok=True)
            for path, array in zip(paths, self._indices(), strict=True):
                partial = path.with_suffix(".partial")
                with partial.open("wb") as file:
                    np.save(file, array)
                partial.replace(path)
        return tuple(np.load(path, mmap_mode="r") for path in paths)

    def _indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        indices = sample_indices(
            self.indices,
            np.asarray(self.dataset.sequence_lengths),
            seq_length=self.config.sequence_length,
            num_samples=self.num_samples,
            seed=self.config.random_seed,
        )
        return indices.document_index, indices.sample_index, indices.shuffle_index

    def _index_folder(self) -> Path | None:
        """Where the indices are kept; None where they are made anew every time."""
        if self.config.path_to_cache:
            return Path(self.config.path_to_cache)
        if self.config.mock:
            return None
        return Path(self.dataset.path_prefix, "cache", f"{type(self).__name__}_indices")


class _MockPackedDocuments(PackedDocuments, MockGPTDataset):
    """Counting documents of up to 4096 tokens, the same on every machine."""


def _document_starts(ends: Tensor) -> Tensor:
    """Where the document of each token starts, given where documents end: [s] -> [s]."""
    starts = torch.zeros(len(ends), dtype=torch.int64)
    starts[1:] = torch.where(ends[:-1], torch.arange(1, len(ends)), 0)
    return starts.cummax(0).values
