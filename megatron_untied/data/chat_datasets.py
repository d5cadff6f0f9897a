"""Datasets for ``--sft``: chats as tokens, packed into samples in which they do not see each other.

Preparing tokenizes all chats and packs those of each split. Both results are cached as arrays
(:mod:`.index_cache`), which all ranks then map.
"""

import hashlib
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.tokenizers import MegatronTokenizerBase
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from megatron_untied.checkpoint.collective_errors import same_on_all_ranks
from megatron_untied.config.data import SPLIT_NAMES, DataConfig, check_split
from megatron_untied.config.problems import first_few
from megatron_untied.data.chat_packing import WINDOW, PackedSamples, pack
from megatron_untied.data.chat_tokens import ChatEncoder, encoder_hash
from megatron_untied.data.chats import chat_files, digest_of, read_chats
from megatron_untied.data.index_cache import Arrays, cached_arrays, in_turns
from megatron_untied.data.tokenize_documents import encode_in_order
from megatron_untied.data.tokenizers import build_tokenizer

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 60.0
PADDING_DOCUMENT = 1024
"""Tokens of a document of padding: longer ones would cost attention work, shorter ones memory for
their boundaries."""
_FORMAT = 1
"""Part of the keys of cached arrays; raise it when the same chats give other arrays."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedChats:
    """All chats of ``--data-path`` as tokens, one after the other."""

    tokens: np.ndarray
    """int32 [all tokens]."""
    trained: np.ndarray
    """Whether a token is trained on: bool [all tokens]."""
    ends: np.ndarray
    """Where each chat ends: int64 [chats]."""

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each chat: int64 [chats]."""
        return np.diff(self.ends, prepend=0)

    def chat(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """``tokens`` and ``trained`` of one chat."""
        part = slice(self.ends[index - 1] if index else 0, self.ends[index])
        return self.tokens[part], self.trained[part]

    def num_trained(self, most: int) -> np.ndarray:
        """Tokens with a loss among the first ``most`` of each chat: int64 [chats].

        The first token of a chat has none, as nothing predicts it.
        """
        counts = np.concatenate([[0], np.cumsum(self.trained, dtype=np.int64)])
        starts = self.ends - self.lengths
        stops = starts + np.minimum(self.lengths, most)
        return counts[stops] - counts[np.minimum(starts + 1, stops)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Which chats are used under ``--long-samples``, and how many are not."""

    usable: np.ndarray
    """bool [chats]."""
    num_long: int
    """Chats of more than ``seq_length`` + 1 tokens, dropped or truncated."""
    num_untrained: int
    """Other chats without any trained token; they are left out."""


class PackedChats(Dataset):
    """Samples of one split."""

    def __init__(
        self,
        chats: TokenizedChats,
        packed: PackedSamples,
        config: DataConfig,
        *,
        seq_length: int,
        padding: int,
    ):
        """``padding`` is the token after the last chat of a sample."""
        self._chats, self._packed, self._config = chats, packed, config
        self._seq_length, self._padding = seq_length, padding

    def __len__(self) -> int:
        return len(self._packed.ends)

    @property
    def attention_work(self) -> np.ndarray:
        """Of each sample, in pairs of tokens: int64 [samples]."""
        return self._packed.work

    @property
    def num_tokens(self) -> np.ndarray:
        """Tokens of each sample that are not padding: int64 [samples]."""
        packed = self._packed
        lengths = np.minimum(self._chats.lengths - 1, self._seq_length)[packed.members]
        return np.add.reduceat(lengths, np.concatenate([[0], packed.ends[:-1]]))

    @property
    def num_chats(self) -> int:
        """Chats of all samples, counted again in each epoch."""
        return len(self._packed.members)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``tokens``, ``labels``, ``positions`` int64 and ``loss_mask`` fp32, each [s].

        ``loss_mask`` has the weights of trained tokens: 1, or 1 / their number in the chat.
        """
        s, ends = self._seq_length, self._packed.ends
        tokens = torch.full((s,), self._padding)
        labels, loss_mask = tokens.clone(), torch.zeros(s)
        positions = torch.arange(s)
        at = 0
        for chat in self._packed.members[ends[index - 1] if index else 0 : ends[index]]:
            # Copied, as maps cannot be written to, which torch warns of.
            ids, trained = (torch.tensor(x[: s + 1]) for x in self._chats.chat(chat))
            part = slice(at, at + len(ids) - 1)
            # The last token is a label alone, as at the end of a sample of documents.
            tokens[part], labels[part] = ids[:-1], ids[1:]
            weights = trained[1:].float()
            if self._config.loss_weighting == "sample":
                weights /= weights.sum()
            loss_mask[part] = weights
            positions[part] -= at
            at = part.stop
        positions[at:] = torch.arange(s - at) % PADDING_DOCUMENT
        return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "positions": positions}

    def describe_sample(self, index: int) -> str:
        """Sample ``index`` with its chats, counted from 1 in ``--data-path``, for messages."""
        ends = self._packed.ends
        chats = self._packed.members[ends[index - 1] if index else 0 : ends[index]] + 1
        return f"sample {index} (chats {first_few(map(str, chats.tolist()), 6)})"


def build_chat_datasets(
    data: DataConfig,
    tokenizer: MegatronTokenizerBase,
    *,
    seq_length: int,
    num_samples: tuple[int, int, int],
    seed: int,
) -> tuple[list[PackedChats | None], str]:
    """The three splits, None where no samples are requested, and a line that describes them.

    Collective over all ranks, as :func:`megatron_untied.data.datasets.build_datasets`.

    Raises:
        FileNotFoundError: files are missing.
        OSError: the arrays cannot be cached.
        ValueError: a chat is malformed, or longer than a sample under ``--long-samples error``;
            nothing is left to train on; nodes have other files. On all ranks.
    """
    check_split(data.split)
    same_on_all_ranks(
        lambda: digest_of(chat_files(data.data_path)),
        f"the content of --data-path {' '.join(data.data_path)}",
    )

    def build() -> tuple[list[PackedChats | None], str]:
        chats = tokenize_chats(data, tokenizer)
        selection = select(chats, data, seq_length=seq_length)
        datasets = [
            None
            if not samples
            else PackedChats(
                chats,
                _packed(chats, chosen, data, seq_length, samples, seed),
                data,
                seq_length=seq_length,
                padding=tokenizer.eod,
            )
            for samples, chosen in zip(
                num_samples, _splits(selection, data, num_samples), strict=True
            )
        ]
        return datasets, describe(chats, selection, datasets, data, seq_length=seq_length)

    return in_turns(build)


def tokenize_chats(data: DataConfig, tokenizer: MegatronTokenizerBase) -> TokenizedChats:
    """All chats of ``--data-path``, from the cache or tokenized in ``num_workers`` processes.

    Raises:
        FileNotFoundError, OSError: as :func:`build_chat_datasets`.
        ValueError: a chat is malformed, with its file and line; or there are none.
    """
    files = chat_files(data.data_path)

    def make() -> Arrays:
        encode = ChatEncoder(tokenizer, loss_on=data.loss_on)
        tokens, trained, said = [], [], time.monotonic()
        for chat in encode_in_order(read_chats(files), encode, num_workers=data.num_workers):
            if chat.problem:
                raise ValueError(f"{chat.place}: {chat.problem}")
            if time.monotonic() - said >= _SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                logger.warning(
                    "tokenizing chats: %s done, at %s (file %d of %d)",
                    *(f"{len(tokens) + 1:,}", chat.place, chat.place.file_index + 1, len(files)),
                )
            tokens.append(chat.ids["tokens"])
            trained.append(chat.ids["trained"])
        if not tokens:
            raise ValueError(f"--data-path {' '.join(data.data_path)} holds no chats")
        ends = np.cumsum(list(map(len, tokens)), dtype=np.int64)
        return np.concatenate(tokens), np.concatenate(trained), ends

    key = _key(digest_of(files), encoder_hash(tokenizer), data.loss_on)
    arrays = cached_arrays(_cache_folder(data), f"{key}-chats", ("tokens", "trained", "ends"), make)
    return TokenizedChats(**dict(zip(("tokens", "trained", "ends"), arrays, strict=True)))


def select(chats: TokenizedChats, data: DataConfig, *, seq_length: int) -> Selection:
    """Apply ``--long-samples``, and leave out chats without trained tokens.

    Raises:
        ValueError: a chat is too long and that is an error, or no chat is left.
    """
    is_long = chats.lengths > seq_length + 1
    num_long, longest = int(is_long.sum()), int(chats.lengths.max())
    where = f"--data-path {' '.join(data.data_path)}"
    if num_long and data.long_samples == "error":
        raise ValueError(
            f"{where}: {num_long:,} of {len(chats):,} chats are longer than --seq-length "
            f"{seq_length} (the longest takes {longest - 1:,}, the first is number "
            f"{int(is_long.argmax()) + 1}); give a longer one, or --long-samples drop or truncate"
        )
    kept = ~is_long if data.long_samples == "drop" else np.ones_like(is_long)
    if not kept.any():
        raise ValueError(
            f"{where}: all {len(chats):,} chats are longer than --seq-length {seq_length} and "
            f"dropped; the longest takes {longest - 1:,}"
        )
    usable = kept & (chats.num_trained(seq_length + 1) > 0)
    if not usable.any():
        raise ValueError(
            f"{where}: no trained tokens in {int(kept.sum()):,} chats under --loss-on "
            f"{data.loss_on}: with completion, a chat needs a turn of the assistant"
        )
    return Selection(usable=usable, num_long=num_long, num_untrained=int(kept.sum() - usable.sum()))


def describe(
    chats: TokenizedChats,
    selection: Selection,
    datasets: list[PackedChats | None],
    data: DataConfig,
    *,
    seq_length: int,
) -> str:
    """One line: what was read, what is left out, and how the training samples are packed."""
    what = {"drop": "dropped", "truncate": "truncated"}.get(data.long_samples, "")
    tokens = np.minimum(chats.lengths, seq_length + 1)[selection.usable] - 1
    trained = chats.num_trained(seq_length + 1)[selection.usable]
    line = (
        f"sft: {len(chats):,} chats | {selection.num_long:,} longer than {seq_length} tokens"
        f"{what and ' ' + what} | {selection.num_untrained:,} without trained tokens left out | "
        f"{tokens.sum():,} tokens, {trained.sum() / tokens.sum():.1%} trained"
    )
    if datasets[0] is None:
        return line
    training = datasets[0]
    padding = 1 - training.num_tokens.sum() / (len(training) * seq_length)
    work = training.attention_work / training.attention_work.mean()
    return (
        f"{line} | {training.num_chats:,} chats in {len(training):,} training samples, "
        f"{padding:.1%} padding, attention work {work.min():.2f} to {work.max():.2f} of the mean"
    )


def describe_chats(data: DataConfig) -> dict[str, object]:
    """What the order of training samples depends on beside ``--seed`` and ``--seq-length``.

    Raises:
        FileNotFoundError, ValueError: files are missing or not of chats.
    """
    tokenizer = build_tokenizer(
        data.tokenizer_type, model=data.tokenizer_model, parse_special_tokens=True, quiet=True
    )
    # Lengths decide what is packed together, and tokenizer and template decide lengths.
    return {
        "--data-path": f"chats [{digest_of(chat_files(data.data_path))[:8]}]",
        "--tokenizer-model": f"tokenizer and chat template [{encoder_hash(tokenizer)[:8]}]",
        "--long-samples": data.long_samples,
        "--loss-on": data.loss_on,
    }


def _splits(
    selection: Selection, data: DataConfig, num_samples: tuple[int, int, int]
) -> list[np.ndarray]:
    """Indices of usable chats of each split: --split cuts all chats in the order of the files."""
    count, chosen = len(selection.usable), []
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(data.split))
    for name, shares, samples in zip(SPLIT_NAMES, matrix, num_samples, strict=True):
        start, stop = (round(share * count) for share in shares or (0, 0))
        chosen.append(start + np.flatnonzero(selection.usable[start:stop]))
        if samples and not len(chosen[-1]):
            raise ValueError(
                f"--split {data.split} leaves {name} {stop - start} of {count} chats, none of "
                "them usable; give it a larger share, or ask for no samples of it"
            )
    return chosen


def _packed(
    chats: TokenizedChats,
    chosen: np.ndarray,
    data: DataConfig,
    seq_length: int,
    num_samples: int,
    seed: int,
) -> PackedSamples:
    lengths = np.minimum(chats.lengths - 1, seq_length)[chosen]

    def make() -> Arrays:
        packed = pack(lengths, seq_length=seq_length, num_samples=num_samples, seed=seed)
        return packed._replace(members=chosen[packed.members])

    key = _key(
        hashlib.blake2b(np.concatenate([chosen, lengths]).tobytes()).hexdigest(),
        *(seq_length, num_samples, seed, WINDOW),
    )
    arrays = cached_arrays(_cache_folder(data), f"{key}-samples", PackedSamples._fields, make)
    return PackedSamples(*arrays)


def _cache_folder(data: DataConfig) -> Path:
    # Beside a folder, not in it: it would be searched for data.
    first = Path(data.data_path[0])
    return Path(data.data_cache_path or first.with_name(f"{first.name}.cache"))


def _key(*parts: object) -> str:
    content = json.dumps([_FORMAT, *parts])
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
