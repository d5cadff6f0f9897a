"""Configuration of the tokenizer and the dataset; fields are named as Megatron's flags.

:func:`parse_blend` and :func:`check_split` read the two that have a grammar of their own.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

TokenizerType = Literal["SentencePieceTokenizer", "HuggingFaceTokenizer", "NullTokenizer"]
TOKENIZER_TYPES: tuple[str, ...] = get_args(TokenizerType)

DocumentBoundaries = Literal["idx", "eod"]
DOCUMENT_BOUNDARIES: tuple[str, ...] = get_args(DocumentBoundaries)

LossOn = Literal["completion", "prompt", "all"]
LongSamples = Literal["error", "drop", "truncate"]
LossWeighting = Literal["token", "sample"]

SPLIT_NAMES = ("train", "valid", "test")

Lengths = Sequence[tuple[int, int]]
"""Sequence lengths, each with a number of samples, in the order of training."""
LengthWeights = tuple[tuple[int, float], ...]
"""Lengths of documents in tokens, rising, each with the weight of documents from there on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The tokenizer, the token files, and how samples are built from them."""

    tokenizer_type: TokenizerType
    tokenizer_model: str | None = None
    """SentencePiece: the .model file. Hugging Face: a local folder."""
    vocab_size: int | None = None
    """Required number of tokens of the tokenizer; None accepts any. NullTokenizer needs it and adds
    one token, the end of document."""
    data_path: tuple[str, ...] = ()
    """One prefix, several prefixes, or weight prefix weight prefix ...: :func:`parse_blend`."""
    split: str = "969,30,1"
    """Proportions of documents for training, validation and test, in file order."""
    data_cache_path: str | None = None
    """Folder for sample indices, local to each node or shared; None is PREFIX/cache."""
    mock_data: bool = False
    """Train on a fixed synthetic dataset instead of ``data_path``."""
    num_workers: int = 2
    """Data workers per rank; 0 reads in the training process. Each worker holds two micro-batches
    in shared memory, 28 bytes per token."""
    reset_position_ids: bool = False
    """Restart positions at 0 at every document."""
    document_boundaries: DocumentBoundaries = "idx"
    """Documents of the .idx file, or those between end-of-document tokens."""
    long_document_weight: LengthWeights = ()
    """How often training documents of these lengths are read in an epoch; others once."""
    eod_mask_loss: bool = False
    """No loss where the input is the end-of-document token, as it predicts nothing."""
    dataloader_inter_document_masking: bool = False
    """Restrict attention to tokens of the same document."""
    sft: bool = False
    """``data_path`` names files of chats: tokenized by the chat template and packed, with positions
    and attention of their own."""
    loss_on: LossOn = "completion"
    """The tokens of a chat that are trained on; completions are the turns of the assistant."""
    long_samples: LongSamples = "error"
    """What happens to chats of more than ``seq_length`` + 1 tokens."""
    loss_weighting: LossWeighting = "token"
    """Whether trained tokens or chats have equal weights."""

    def __post_init__(self) -> None:
        # Here and not in validate.py: other tools build a DataConfig without a whole run.
        if self.sft:
            self._check_sft()
        if self.mock_data == bool(self.data_path):
            raise ValueError(
                "give either --data-path or --mock-data, "
                + ("not both" if self.mock_data else "neither was given")
            )
        if self.num_workers < 0:
            raise ValueError(f"--num-workers {self.num_workers} is negative; use 0 for no workers")

    def _check_sft(self) -> None:
        if self.mock_data:
            raise ValueError("--sft reads chats from --data-path; leave out --mock-data")
        if not self.data_path:
            raise ValueError("--sft needs --data-path, which names files of chats; give it")
        if self.tokenizer_type != "HuggingFaceTokenizer":
            raise ValueError(
                f"--sft needs a chat template, which a {self.tokenizer_type} does not have; give "
                "--tokenizer-type HuggingFaceTokenizer"
            )
        if self.long_document_weight:
            raise ValueError("--long-document-weight has no effect with --sft; leave it out")
        if self.eod_mask_loss or self.document_boundaries != "idx":
            flag = "--eod-mask-loss" if self.eod_mask_loss else "--document-boundaries eod"
            raise ValueError(f"{flag} has no effect with --sft, where chats are documents")
        if parse_blend(self.data_path).weights:
            raise ValueError("--sft reads every file once per epoch; give --data-path no weights")


@dataclass(frozen=True, kw_only=True, slots=True)
class Blend:
    """Token files, and the proportions in which several are mixed."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    """Shares of the samples; None reads each file once, mixed in proportion to its length."""


def parse_blend(data_path: tuple[str, ...]) -> Blend:
    """The blend that ``PREFIX [PREFIX ...]`` or ``WEIGHT PREFIX [WEIGHT PREFIX ...]`` names.

    Raises:
        ValueError: where weights and prefixes do not alternate, or a weight is not positive.
    """
    numbers = []
    for word in data_path:
        try:
            numbers.append(float(word))
        except ValueError:
            numbers.append(None)  # a prefix; one that is a number has to be written as ./8
    if all(number is None for number in numbers):
        return Blend(prefixes=data_path, weights=None)
    for position, (word, number) in enumerate(zip(data_path, numbers, strict=True)):
        if position % 2 == 0 and not (number and 0 < number < math.inf):  # refuses nan too
            raise ValueError(
                f"--data-path: {word!r} stands where a weight is expected and is not a positive "
                "number; write --data-path 0.7 PREFIX 0.3 PREFIX, or prefixes alone"
            )
        if position % 2 == 1 and number is not None:
            raise ValueError(f"--data-path: {word!r} stands where a prefix is expected")
    if len(data_path) % 2:
        raise ValueError(f"--data-path: no prefix follows the last weight, {data_path[-1]}")
    prefixes = data_path[1::2]
    # A single file is the whole blend, whatever its weight.
    return Blend(prefixes=prefixes, weights=tuple(numbers[::2]) if len(prefixes) > 1 else None)


def check_split(split: str) -> None:
    """Check that megatron-core can parse ``split``: it ignores the parts that it cannot.

    Raises:
        ValueError: if it is not one to three plain numbers of which one is positive.
    """
    shares = split.split(",")
    plain = all(re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*", share) for share in shares)
    if not plain or len(shares) > len(SPLIT_NAMES) or not any(map(float, shares)):
        raise ValueError(
            f"--split {split!r} is not up to three shares (training, validation, test); "
            "write for example --split 98,2,0"
        )
