"""The order of samples: each epoch is shuffled on its own, so a longer run continues a shorter.

megatron-core shuffles all epochs of a run as one. Its order, and where samples are cut, then change
with the number of epochs, and so with the length of the run. Here both are functions of the seed
and the epoch. The first epoch is the one that megatron-core makes of a single epoch.

In each epoch the documents are shuffled, joined and cut anew. Less than a sample is left over at
its end and dropped; another epoch drops other tokens.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.core.datasets import helpers

from megatron_untied.checkpoint.provenance import Samples
from megatron_untied.config.data import DataConfig
from megatron_untied.data.blend import check_split, parse_blend
from megatron_untied.data.indexed_files import open_indexed_files


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleIndices:
    """The arrays that a GPTDataset reads by, over all epochs one after the other."""

    document_index: np.ndarray
    """Documents in the order in which they are joined, int32."""
    sample_index: np.ndarray
    """Where samples begin, [rows, 2]: position in ``document_index``, tokens into that document.
    A sample ends where the next row begins; an epoch has a row more than samples."""
    shuffle_index: np.ndarray
    """Rows of ``sample_index``, in the order of training."""


def samples_per_epoch(num_tokens: int, seq_length: int) -> int:
    """Samples of ``seq_length`` tokens and a label more, overlapping by one, in ``num_tokens``."""
    return (num_tokens - 1) // seq_length


def sample_indices(
    documents: np.ndarray,
    lengths: np.ndarray,
    *,
    seq_length: int,
    num_samples: int | None,
    seed: int,
) -> SampleIndices:
    """Indices of as many epochs as hold ``num_samples``, or of one.

    Args:
        documents: those of this split, int32.
        lengths: tokens of every document of the files, int32.
        seq_length: tokens of a sample.
        num_samples: how many are needed at least; None is one epoch.
        seed: of the run.
    """
    num_tokens = int(lengths[documents].sum(dtype=np.int64))
    count = samples_per_epoch(num_tokens, seq_length)
    num_epochs = max(1, -(-(num_samples or 0) // count))
    # At once, and not epoch by epoch: nothing is there twice.
    document_index = np.empty((num_epochs, len(documents)), np.int32)
    sample_index = np.empty((num_epochs, count + 1, 2), _integers(document_index.size))
    shuffle_index = np.empty((num_epochs, count), _integers(num_epochs * (count + 1)))
    for epoch in range(num_epochs):
        generator = _generator(seed, epoch)
        document_index[epoch] = documents
        generator.shuffle(document_index[epoch])
        sample_index[epoch] = helpers.build_sample_idx(
            lengths, document_index[epoch], seq_length, 1, num_tokens
        )
        sample_index[epoch, :, 0] += epoch * len(documents)
        shuffle_index[epoch] = np.arange(count) + epoch * (count + 1)
        generator.shuffle(shuffle_index[epoch])
    return SampleIndices(
        document_index=document_index.reshape(-1),
        sample_index=sample_index.reshape(-1, 2),
        shuffle_index=shuffle_index.reshape(-1),
    )


def _generator(seed: int, epoch: int) -> np.random.RandomState:
    """Numbers that no release of numpy changes; the first epoch's are megatron-core's."""
    return np.random.RandomState([seed, epoch] if epoch else seed)


def _integers(count: int) -> type[np.integer]:
    """The smallest integers that number so many."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


def describe_samples(data: DataConfig, *, seq_length: int, seed: int) -> Samples:
    """The training samples of a run, to be compared with those of another.

    Token files are known by their documents, not by their paths, so they may be moved.

    Raises:
        FileNotFoundError: token files are missing.
        ValueError: they are damaged, or ``--data-path`` or ``--split`` cannot be.
    """
    order: dict[str, Any] = {"--seed": seed, "--seq-length": seq_length}
    if data.mock_data:
        order["--mock-data"] = True
    else:
        check_split(data.split)
        shares = [float(share) for share in data.split.split(",")]
        order["--data-path"] = _describe_files(data.data_path)
        order["--split"] = f"{shares[0] / sum(shares):.6g} of the documents"
    content = {
        "--tokenizer-type": data.tokenizer_type,
        "--reset-position-ids": data.reset_position_ids,
        "--document-boundaries": data.document_boundaries,
        "--eod-mask-loss": data.eod_mask_loss,
        "--dataloader-inter-document-masking": data.dataloader_inter_document_masking,
    }
    return Samples(order=order, content=content)


def _describe_files(data_path: tuple[str, ...]) -> str:
    blend = parse_blend(data_path)
    described = []
    for index, prefix in enumerate(blend.prefixes):
        files = open_indexed_files(prefix)
        share = blend.weights and f"{blend.weights[index] / sum(blend.weights):.6g} x "
        described.append(
            f"{share or ''}{len(files.lengths):,} documents, {len(files.tokens):,} tokens "
            f"[{files.fingerprint()[:8]}]"
        )
    return "; ".join(described)
