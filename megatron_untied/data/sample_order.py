"""The order of samples. Epochs are shuffled independently, so a longer run extends a shorter one.

Megatron-core shuffles all epochs of a run together: its order, and the boundaries of samples,
depend on the number of epochs and so on the length of the run. Here both are functions of the seed
and the epoch. The first epoch equals that of a run of one epoch in megatron-core.

In each epoch the documents are shuffled, concatenated and cut again. Less than a sample remains at
its end and is dropped; each epoch drops other tokens.
"""

from typing import Any, NamedTuple

import numpy as np
from megatron.core.datasets import helpers

from megatron_untied.checkpoint.run_config import Samples
from megatron_untied.config.data import DataConfig, check_split, parse_blend
from megatron_untied.data.chat_datasets import describe_chats
from megatron_untied.data.indexed_files import fingerprint_of, open_indexed_files


class SampleIndices(NamedTuple):
    """The index arrays of a GPTDataset in its order, all epochs one after the other."""

    document_index: np.ndarray
    """Documents in the order of concatenation, int32 [epochs * documents]."""
    sample_index: np.ndarray
    """Where samples begin, [rows, 2]: position in ``document_index``, tokens into that document.
    A sample ends where the next row begins, so an epoch has one row more than samples."""
    shuffle_index: np.ndarray
    """Rows of ``sample_index`` in the order of training, [samples]."""


def samples_per_epoch(num_tokens: int, seq_length: int) -> int:
    """Samples of ``seq_length`` + 1 tokens, overlapping by one, in ``num_tokens``.

    The last token of a sample is a label alone; the next sample begins with it as input.
    """
    return (num_tokens - 1) // seq_length


def sample_indices(
    documents: np.ndarray,
    lengths: np.ndarray,
    *,
    seq_length: int,
    num_samples: int | None,
    seed: int,
) -> SampleIndices:
    """Indices of as many epochs as ``num_samples`` need, at least one.

    Args:
        documents: documents of this split, int32 [documents].
        lengths: tokens of every document of the files, int32 [all documents].
        seq_length: tokens of a sample.
        num_samples: least number of samples; None is one epoch.
        seed: the run's seed.
    """
    num_tokens = int(lengths[documents].sum(dtype=np.int64))
    count = samples_per_epoch(num_tokens, seq_length)
    num_epochs = max(1, -(-(num_samples or 0) // count))
    # Allocated for all epochs at once: concatenating them would need the memory twice.
    document_index = np.empty((num_epochs, len(documents)), np.int32)
    sample_index = np.empty((num_epochs, count + 1, 2), _integers(document_index.size))
    shuffle_index = np.empty((num_epochs, count), _integers(num_epochs * (count + 1)))
    for epoch in range(num_epochs):
        # RandomState: its numbers do not change with releases of numpy, and a bare seed gives the
        # first epoch megatron-core's numbers.
        generator = np.random.RandomState([seed, epoch] if epoch else seed)
        document_index[epoch] = documents
        generator.shuffle(document_index[epoch])
        # Megatron-core's C++ helper: a loop over every document and sample of the epoch.
        sample_index[epoch] = helpers.build_sample_idx(
            lengths, document_index[epoch], seq_length, 1, num_tokens
        )
        # Positions count from the first epoch; each epoch has one row more than samples.
        sample_index[epoch, :, 0] += epoch * len(documents)
        shuffle_index[epoch] = np.arange(count) + epoch * (count + 1)
        generator.shuffle(shuffle_index[epoch])
    return SampleIndices(
        document_index=document_index.reshape(-1),
        sample_index=sample_index.reshape(-1, 2),
        shuffle_index=shuffle_index.reshape(-1),
    )


def _integers(count: int) -> type[np.integer]:
    """The smaller of int32 and int64 that can count to ``count``."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


def describe_samples(data: DataConfig, *, seq_length: int, seed: int) -> Samples:
    """Describe the training samples of a run, for comparison with another run.

    Token files are identified by their documents, not by their paths, so they may be moved.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: they are damaged, or ``--data-path`` or ``--split`` is invalid.
    """
    order: dict[str, Any] = {"--seed": seed, "--seq-length": seq_length}
    if data.mock_data:
        order["--mock-data"] = True
    else:
        check_split(data.split)
        shares = [float(share) for share in data.split.split(",")]
        # Only the training share: another validation share does not move training samples.
        order["--split"] = f"{shares[0] / sum(shares):.6g} of the documents"
        order |= describe_chats(data) if data.sft else _describe_token_files(data)
    content = {
        "--tokenizer-type": data.tokenizer_type,
        "--reset-position-ids": data.reset_position_ids,
        "--document-boundaries": data.document_boundaries,
        "--eod-mask-loss": data.eod_mask_loss,
        "--dataloader-inter-document-masking": data.dataloader_inter_document_masking,
    }
    if data.sft:
        content["--loss-weighting"] = data.loss_weighting
    return Samples(order=order, content=content)


def _describe_token_files(data: DataConfig) -> dict[str, Any]:
    blend, described = parse_blend(data.data_path), []
    for index, prefix in enumerate(blend.prefixes):
        files = open_indexed_files(prefix)
        # Normalized: weights of 7 and 3 mix as 0.7 and 0.3 do.
        share = blend.weights and f"{blend.weights[index] / sum(blend.weights):.6g} x "
        described.append(
            f"{share or ''}{len(files.lengths):,} documents, {len(files.tokens):,} tokens "
            f"[{fingerprint_of(files.lengths)[:8]}]"
        )
    return {"--data-path": "; ".join(described)}
