"""Builds the datasets of training, validation and test from packed documents or chats."""

import functools
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.utils import normalize
from megatron.core.tokenizers import MegatronTokenizerBase
from megatron.core.utils import log_single_rank
from torch.utils.data import Dataset
from typing_extensions import override

from megatron_untied.checkpoint.collective_errors import gather_objects, raise_on_all_ranks
from megatron_untied.config.data import (
    SPLIT_NAMES,
    Blend,
    DataConfig,
    Lengths,
    check_split,
    parse_blend,
)
from megatron_untied.data.chat_datasets import build_chat_datasets
from megatron_untied.data.index_cache import in_turns
from megatron_untied.data.indexed_files import (
    IndexedFiles,
    fingerprint_of,
    first_inside,
    open_indexed_files,
    require_token,
)
from megatron_untied.data.packed_documents import (
    BlendedDocuments,
    MockPackedDocuments,
    PackedDocuments,
    PackedDocumentsConfig,
)
from megatron_untied.data.provenance import check_provenance

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Datasets:
    """The three splits; None for a split of which no samples were requested."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    description: str | None = None
    """A line for the log, if there is something to say."""
    valid_by_length: Mapping[int, Dataset] = field(default_factory=dict)
    """Validation samples of each sequence length, for a run with several."""

    def at_length(self, seq_length: int) -> "Datasets":
        """The same, with the validation samples of ``seq_length`` where there are several."""
        if not self.valid_by_length:
            return self
        return replace(self, valid=self.valid_by_length[seq_length])


def build_datasets(
    data: DataConfig,
    tokenizer: MegatronTokenizerBase,
    *,
    seq_length: int,
    num_samples: tuple[int, int, int],
    seed: int,
    earlier: Lengths = (),
    valid_lengths: Mapping[int, int] | None = None,
) -> Datasets:
    """Training, validation and test samples: at least ``num_samples`` of each.

    Collective over all ranks: the first one on each node writes the sample indices that the others
    then read. Documents are shuffled by ``seed``, joined, cut into sequences of
    ``seq_length`` + 1 tokens overlapping by one, and the sequences shuffled; a split that is too
    short is read again in another order (:mod:`.sample_order`). A longer run begins
    with the samples of a shorter one. With
    ``sft`` the samples are of packed chats (:mod:`.chat_datasets`).

    Args:
        data: the files, and how samples are made of them.
        tokenizer: of the files.
        seq_length: tokens of a sample; of the last training samples with ``earlier``.
        num_samples: by split.
        seed: of the order of samples.
        earlier: lengths of the training samples before those of ``seq_length``, which begin where
            the tokens of these end.
        valid_lengths: number of validation samples by length, for a run with several.

    Raises:
        FileNotFoundError: if token files are missing.
        OSError: if indices cannot be written.
        ValueError: if files are damaged, do not fit the tokenizer or differ between nodes, or a
            split is too short. An error on one rank is raised on all.
    """
    if data.sft:
        datasets, description = build_chat_datasets(
            data, tokenizer, seq_length=seq_length, num_samples=num_samples, seed=seed
        )
        return Datasets(**dict(zip(SPLIT_NAMES, datasets, strict=True)), description=description)
    blend = parse_blend(data.data_path)
    files = raise_on_all_ranks(lambda: _open_files(blend.prefixes, data, tokenizer))
    fingerprints = tuple(fingerprint_of(pair.lengths) for pair in files)
    _require_same_documents(blend.prefixes, fingerprints)
    config_of = functools.partial(_packing, data, blend, tokenizer, seed, fingerprints)
    requests = [(config_of(seq_length), num_samples)]
    if valid_lengths:
        lengths = [seq_length, *(length for length, _ in earlier)]
        train = config_of(min(lengths), last_length=seq_length, longest=max(lengths))
        requests = [(train.with_earlier(earlier), (num_samples[0], 0, 0))]
        requests += [(config_of(length), (0, n, 0)) for length, n in valid_lengths.items()]
    dataset_class = MockPackedDocuments if data.mock_data else PackedDocuments
    builders = []
    for config, samples in requests:
        for index, count in enumerate(samples):
            if not count:  # megatron-core would not return from a split without documents
                config.split_matrix[index] = None
        for pair in files:  # on every rank alike: no collective needed
            _check_splits(pair, config, samples)
        builders.append(_Builder(dataset_class, samples, lambda: True, config))
    # Minutes of index building on the first rank of a node, a map of its files on all others.
    built = in_turns(lambda: [builder.build() for builder in builders])
    for datasets, (_, samples) in zip(built, requests, strict=True):
        for name, dataset, count in zip(SPLIT_NAMES, datasets, samples, strict=True):
            if dataset is not None and len(dataset) < count:
                raise ValueError(
                    f"--data-path without weights is read once: {len(dataset)} {name} samples, the "
                    f"run needs {count}; give weights to read it again, or shorten the run"
                )
    found = Datasets(**dict(zip(SPLIT_NAMES, built[0], strict=True)))
    if not valid_lengths:
        return found
    validation = (valid for _, valid, _ in built[1:])
    return replace(found, valid_by_length=dict(zip(valid_lengths, validation, strict=True)))


def _packing(
    data: DataConfig,
    blend: Blend,
    tokenizer: MegatronTokenizerBase,
    seed: int,
    fingerprints: tuple[str, ...],
    seq_length: int,
    **lengths: int,
) -> PackedDocumentsConfig:
    """How samples of ``seq_length`` are cut from the files; ``lengths`` are further fields."""
    source = {}
    if not data.mock_data:  # without a blend megatron-core builds mock data
        check_split(data.split)
        weights = blend.weights and list(blend.weights)
        source = {"blend": (list(blend.prefixes), weights), "split": data.split}
    config = PackedDocumentsConfig(
        random_seed=seed,
        sequence_length=seq_length,
        **source,
        **lengths,
        fingerprints=fingerprints,
        cache_folder=data.data_cache_path,
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        weights=data.long_document_weight,
        reset_position_ids=data.reset_position_ids,
        document_boundaries=data.document_boundaries,
        reset_attention_mask=False,
        eod_mask_loss=data.eod_mask_loss,
        create_attention_mask=False,
    )
    return config.with_earlier(()) if data.long_document_weight else config


class _Builder(BlendedMegatronDatasetBuilder):
    """Megatron-core's builder without its collectives: :func:`in_turns` orders the ranks.

    In the original the other ranks wait for rank 0 in a barrier even after it has failed, and then
    read files that exist only on a shared file system.
    """

    @override
    @staticmethod
    def build_generic_dataset(
        cls: Callable, is_built_on_rank: Callable, synchronize_ranks: bool, *args: Any
    ) -> Dataset:
        # By class: the builder names BlendedDataset itself, with no slot for another.
        return (BlendedDocuments if cls is BlendedDataset else cls)(*args)

    @override
    def _build_megatron_datasets_parallel(
        self, prefixes: list[str], split: list, sizes_per_dataset: list[list[int]]
    ) -> list[list[Dataset | None]]:
        # The files of a blend change to the next length after different numbers of samples.
        whole, splits_by_file = self.config, []
        by_file = [()] * len(prefixes)
        if whole.earlier:
            by_file = lengths_by_file(whole.blend[1], whole.earlier)
        for prefix, sizes, lengths in zip(prefixes, sizes_per_dataset, by_file, strict=True):
            self.config = whole.with_earlier(lengths) if whole.earlier else whole
            splits_by_file.append(self._build_megatron_dataset_splits(prefix, split, sizes, False))
        self.config = whole
        return [list(datasets) for datasets in zip(*splits_by_file, strict=True)]


def lengths_by_file(weights: Sequence[float], earlier: Lengths) -> list[Lengths]:
    """How many of the samples ``earlier`` of a blend come from each of its files, by length.

    Megatron-core takes each next sample from the file that is furthest behind its weight, so the
    beginning of a blend does not depend on its size.
    """
    size = sum(count for _, count in earlier)
    files, places = np.zeros(size, np.int16), np.zeros(size, np.int64)
    # Normalized twice, as the builder and then the blend do: the last digits decide draws.
    shares = normalize(normalize(list(weights)))
    helpers.build_blending_indices(files, places, shares, len(shares), size, False)
    parts = np.split(files, np.cumsum([count for _, count in earlier]))
    counts = [np.bincount(part, minlength=len(shares)).tolist() for part in parts[:-1]]
    return [
        [(length, of_length[file]) for (length, _), of_length in zip(earlier, counts, strict=True)]
        for file in range(len(shares))
    ]


def _open_files(
    prefixes: Sequence[str], data: DataConfig, tokenizer: MegatronTokenizerBase
) -> list[IndexedFiles]:
    """Open the token files, checked against the tokenizer and the flags."""
    opened = []
    for prefix in prefixes:
        files = open_indexed_files(prefix, vocab_size=tokenizer.vocab_size)
        opened.append(files)
        if data.eod_mask_loss:
            require_token(files, tokenizer.eod, "--eod-mask-loss")
        if data.document_boundaries == "eod":
            require_token(files, tokenizer.eod, "--document-boundaries eod")
        elif data.reset_position_ids:
            # Legal: the text itself may hold the token. A warning, for files without boundaries.
            place = first_inside(files, tokenizer.eod)
            if place is not None:
                log_single_rank(
                    logger,
                    logging.WARNING,
                    f"--data-path {prefix} has end-of-document tokens inside documents, the first "
                    f"at place {place} of the .bin: these end no document; give "
                    "--document-boundaries eod if they should",
                )
    check_provenance(opened, tokenizer)
    return opened


def _require_same_documents(prefixes: Sequence[str], fingerprints: Sequence[str]) -> None:
    """Check that all ranks have the same documents: nodes may have copies on their own disks.

    Collective over all ranks.
    """
    by_rank = gather_objects((socket.gethostname(), fingerprints))
    first_host, expected = by_rank[0]
    for rank, (host, found) in enumerate(by_rank):
        for prefix, first, other in zip(prefixes, expected, found, strict=True):
            if first != other:
                raise ValueError(
                    f"--data-path {prefix} holds other documents on rank {rank} ({host}) than "
                    f"on rank 0 ({first_host}); copy the same files to all nodes"
                )


def _check_splits(
    files: IndexedFiles, config: PackedDocumentsConfig, num_samples: tuple[int, int, int]
) -> None:
    """Check that every split with samples holds a sequence: less would repeat inside one sample."""
    num_documents = len(files.lengths)
    # split_matrix holds a range per split, (0.98, 1.0) for example, of the documents.
    for name, shares, samples in zip(SPLIT_NAMES, config.split_matrix, num_samples, strict=True):
        start, stop = (round(share * num_documents) for share in shares or (0, 0))
        num_tokens = int(files.lengths[start:stop].sum(dtype="int64"))
        if samples and num_tokens <= (length := config.longest or config.sequence_length):
            raise ValueError(
                f"--data-path {files.prefix}: --split {config.split} leaves {name} {stop - start} "
                f"of {num_documents} documents, {num_tokens} tokens; one sample takes "
                f"{length + 1}: give it a larger share, or ask for no samples of it"
            )
