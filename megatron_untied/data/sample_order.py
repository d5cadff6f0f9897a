"""The order of samples. Epochs are shuffled independently, so a longer run extends a shorter one.

Megatron-core shuffles all epochs of a run together: its order, and the boundaries of samples,
depend on the number of epochs and so on the length of the run. Here both are functions of the seed
and the epoch. The first epoch equals that of a run of one epoch in megatron-core.

In each epoch the documents are shuffled, concatenated and cut again. Less than a sample remains at
its end and is dropped; each epoch drops other tokens. Where the sequence length changes within an
epoch (:func:`segments`), the samples before and after the change are shuffled apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_untied.checkpoint.run_config import Samples
from megatron_untied.config.data import DataConfig, Lengths, LengthWeights, check_split, parse_blend
from megatron_untied.config.run import Stage
from megatron_untied.data.chat_datasets import describe_chats
from megatron_untied.data.indexed_files import fingerprint_of, open_indexed_files


class SampleIndices(NamedTuple):
    """The index arrays of a GPTDataset in its order, all epochs one after the other."""

    document_index: np.ndarray
    """Documents in the order of concatenation, int32 [epochs * documents]."""
    sample_index: np.ndarray
    """Where samples begin, [rows, 2]: position in ``document_index``, tokens into that document.
    A sample ends where the next row begins, so a segment has one row more than samples."""
    shuffle_index: np.ndarray
    """Rows of ``sample_index`` in the order of training, [samples]."""


def samples_per_epoch(num_tokens: int, seq_length: int) -> int:
    """Samples of ``seq_length`` + 1 tokens, overlapping by one, in ``num_tokens``.

    The last token of a sample is a label alone; the next sample begins with it as input.
    """
    return (num_tokens - 1) // seq_length


@dataclass(frozen=True, slots=True)
class Segment:
    """Samples that follow each other in an epoch and are shuffled among themselves."""

    epoch: int
    first_token: int
    """Place of the first one in the epoch's documents, one after the other."""
    seq_length: int
    num_samples: int


def segments(
    tokens_of: Callable[[int], int], *, seq_length: int, num_samples: int, earlier: Lengths = ()
) -> list[Segment]:
    """The segments of a run: one per epoch, and another where the sequence length changes.

    The next length goes on at the token where the one before it ended. So no token is read twice
    in an epoch, and none is left out but the end of an epoch that is shorter than a sample.

    Args:
        tokens_of: epoch -> its tokens.
        seq_length: the last length, which takes its last epoch to the end.
        num_samples: least number of samples of all lengths.
        earlier: the lengths before it, with exact numbers of samples.

    Raises:
        ValueError: an epoch holds no sample.
    """
    found: list[Segment] = []
    epoch, token, epoch_tokens = 0, 0, tokens_of(0)
    last = max(1, num_samples - sum(count for _, count in earlier))
    for number, (length, left) in enumerate([*earlier, (seq_length, last)]):
        while left > 0:
            room = samples_per_epoch(epoch_tokens - token, length)
            taken = room if number == len(earlier) else min(room, left)
            if taken:
                found.append(Segment(epoch, token, length, taken))
            elif not token:
                raise ValueError(
                    f"epoch {epoch + 1} of the training documents has {epoch_tokens} tokens, one "
                    f"sample takes {length + 1}; give more documents, larger weights in "
                    "--long-document-weight, or a shorter sequence"
                )
            left -= taken
            token += taken * length
            if left > 0:
                epoch, token = epoch + 1, 0
                epoch_tokens = tokens_of(epoch)
    return found


def sample_indices(
    documents: np.ndarray,
    lengths: np.ndarray,
    *,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    earlier: Lengths = (),
    weights: LengthWeights = (),
) -> SampleIndices:
    """Indices of as many epochs as ``num_samples`` need, at least one.

    Args:
        documents: documents of this split, int32 [documents].
        lengths: tokens of every document of the files, int32 [all documents].
        seq_length: tokens of a sample, of the last ones with ``earlier``.
        num_samples: least number of samples; None is one epoch.
        seed: the run's seed.
        earlier: other lengths of the samples before, with their numbers.
        weights: how often documents of some lengths are read in an epoch.

    Raises:
        ValueError: an epoch holds no sample.
    """

    def documents_of(epoch: int) -> np.ndarray:
        if not weights:
            return documents
        return repeated(documents, lengths[documents], weights, seed=seed, epoch=epoch)

    found = segments(
        lambda epoch: int(lengths[documents_of(epoch)].sum(dtype=np.int64)),
        seq_length=seq_length,
        num_samples=num_samples or 0,
        earlier=earlier,
    )
    epochs = [len(documents_of(epoch)) for epoch in range(found[-1].epoch + 1)]
    num_samples = sum(segment.num_samples for segment in found)
    # Allocated for all epochs at once: concatenating them would need the memory twice.
    document_index = np.empty(sum(epochs), np.int32)
    sample_index = np.empty((num_samples + len(found), 2), _integers(document_index.size))
    shuffle_index = np.empty(num_samples, _integers(len(sample_index)))
    first_document = row = place = 0
    for epoch, count in enumerate(epochs):
        # RandomState: its numbers do not change with releases of numpy, and a bare seed gives the
        # first epoch megatron-core's numbers.
        generator = np.random.RandomState([seed, epoch] if epoch else seed)
        shuffled = document_index[first_document : first_document + count]
        shuffled[:] = documents_of(epoch)
        generator.shuffle(shuffled)
        ends = lengths[shuffled].cumsum(dtype=np.int64)
        for segment in (each for each in found if each.epoch == epoch):
            n = segment.num_samples
            tokens = segment.first_token + np.arange(n + 1, dtype=np.int64) * segment.seq_length
            nth = np.searchsorted(ends, tokens, side="right")  # the document that holds the token
            rows = sample_index[row : row + n + 1]  # one row more than samples: the last one's end
            rows[:, 0] = first_document + nth
            rows[:, 1] = tokens - ends[nth] + lengths[shuffled[nth]]
            shuffle_index[place : place + n] = row + np.arange(n)
            generator.shuffle(shuffle_index[place : place + n])
            row, place = row + n + 1, place + n
        first_document += count
    return SampleIndices(document_index, sample_index, shuffle_index)


def repeated(
    documents: np.ndarray, lengths: np.ndarray, weights: LengthWeights, *, seed: int, epoch: int
) -> np.ndarray:
    """``documents`` [documents], each as often as its weight says in ``epoch``, in their order.

    A document of weight 2.5 is read twice in half of the epochs and three times in the others; one
    of weight 0.25 in every fourth epoch. Which ones they are is drawn once, by ``seed``.
    """
    limits, values = np.array(weights).T
    # The weight of the greatest limit that is not above the length; documents below all have 1.
    weight = np.concatenate([[1.0], values])[np.searchsorted(limits, lengths, side="right")]
    # A stream of its own: the shuffles of the epochs keep their numbers.
    offset = np.random.RandomState([seed, 0, len(documents)]).random_sample(len(documents))
    before, after = (np.floor(n * weight + offset) for n in (epoch, epoch + 1))
    return np.repeat(documents, (after - before).astype(np.int64))


def _integers(count: int) -> type[np.integer]:
    """The smaller of int32 and int64 that can count to ``count``."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


def describe_samples(
    data: DataConfig, *, seq_length: int, seed: int, stages: Sequence[Stage] = ()
) -> Samples:
    """Describe the training samples of a run, for comparison with another run.

    Token files are identified by their documents, not by their paths, so they may be moved. With
    ``stages`` the length is theirs.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: they are damaged, or ``--data-path`` or ``--split`` is invalid.
    """
    order: dict[str, Any] = {"--seed": seed, "--seq-length": seq_length}
    if stages:  # samples of a stage begin where those before it end, so numbers of samples count
        order["--seq-length"] = "; ".join(
            f"{each.batch.global_batch_size} x {each.batch.seq_length} tokens per iteration after "
            f"iteration {each.first_iteration}"
            for each in stages
        )
    if data.long_document_weight:
        pairs = (f"{length}:{weight:g}" for length, weight in data.long_document_weight)
        order["--long-document-weight"] = ",".join(pairs)
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
