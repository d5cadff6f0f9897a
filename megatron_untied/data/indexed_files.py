"""Reads and checks token files in Megatron's format, ``PREFIX.bin`` and ``PREFIX.idx``.

Megatron-core maps both files without checks: a truncated one shows in the middle of training, if
ever. :func:`open_indexed_files` checks every size and bound that is cheap to check;
:func:`dataset_statistics` counts tokens.

Layout of the .idx, little endian: magic, u64 version 1, u8 dtype, u64 sequences S, u64 bounds B,
int32 length[S], int64 pointer[S] (bytes into the .bin), int64 bound[B] (sequences up to a
document's end). Samples are made of whole documents in another order, so documents of several
sequences, such as sentences, are refused: their sequences would be scattered.
"""

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_untied.checkpoint.directory import require_content

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_TOKENS_CHECKED = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class IndexedFiles:
    """A pair of token files whose sizes agree; both arrays are maps of the files."""

    prefix: str
    lengths: np.ndarray
    """Tokens of each document, int32 [documents]."""
    tokens: np.ndarray
    """All documents one after the other, [tokens] in the dtype of the file."""


def fingerprint_of(lengths: np.ndarray) -> str:
    """A digest of the lengths of documents in order, int32 [documents].

    Sample indices depend on nothing else. Reading the tokens would take minutes on every rank.
    """
    return hashlib.blake2b(lengths, digest_size=16).hexdigest()


def open_indexed_files(prefix: str, *, vocab_size: int | None = None) -> IndexedFiles:
    """Open the files at ``prefix``; with ``vocab_size`` the first Mi tokens are checked against it.

    Raises:
        FileNotFoundError: if one of the two files is missing.
        ValueError: if they are damaged, disagree, or hold tokens outside the vocabulary.
    """
    for path in (f"{prefix}.bin", f"{prefix}.idx"):
        if not os.path.isfile(path):
            raise FileNotFoundError(
                f"--data-path {prefix}: there is no {path}; give the name of the .bin and .idx "
                "files without the ending, as tools/preprocess_data.py printed it"
            )
        require_content(Path(path))
    dtype, lengths = _read_index(f"{prefix}.idx")
    path = f"{prefix}.bin"
    size, num_tokens = os.path.getsize(path), int(lengths.sum(dtype=np.int64))
    expected = num_tokens * np.dtype(dtype).itemsize
    if size != expected:
        raise ValueError(
            f"{path} is {size} bytes; its .idx lists {num_tokens} tokens, {expected} bytes: "
            f"{'cut short' if size < expected else 'not the pair of this .idx'}, preprocess again"
        )
    if not num_tokens:
        raise ValueError(f"{path} holds no tokens")
    files = IndexedFiles(prefix, lengths, np.memmap(path, dtype=dtype, mode="r"))
    # A sample of the tokens: another tokenizer shows in the first Mi already, and all samples are
    # checked again when they are read.
    found = outside(files.tokens[:_TOKENS_CHECKED], vocab_size) if vocab_size is not None else ()
    if len(found):
        # In int64, 8 bytes per document: only for the message.
        ends = lengths.cumsum(dtype=np.int64)
        document = int(np.searchsorted(ends, found[0], side="right"))
        place = int(found[0] - (ends[document] - lengths[document]))
        token = int(files.tokens[found[0]])
        raise out_of_vocabulary(
            prefix, document=document, place=place, token=token, vocab_size=vocab_size
        )
    return files


def _read_index(path: str) -> tuple[type[np.integer], np.ndarray]:
    size = os.path.getsize(path)
    header = Path(path).open("rb").read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise ValueError(f"{path} is {size} bytes, shorter than its header; preprocess again")
    magic, version, code, num_sequences, num_bounds = _HEADER.unpack(header)
    if magic != _MAGIC or version != 1 or code not in _DTYPES:
        raise ValueError(f"{path} is not a Megatron index of integer tokens; preprocess again")
    # Per sequence a length (int32) and a pointer (int64), then the bounds (int64).
    expected = _HEADER.size + 12 * num_sequences + 8 * num_bounds
    if size != expected:
        raise ValueError(
            f"{path} is {size} bytes; {num_sequences} documents need {expected}: it is "
            "incomplete or damaged, preprocess again"
        )
    if not num_sequences:
        raise ValueError(f"{path} holds no documents")
    index = np.memmap(path, mode="r")
    # Views of the map.
    lengths = index[_HEADER.size :][: 4 * num_sequences].view("<i4")
    pointers = index[_HEADER.size + 4 * num_sequences :][: 8 * num_sequences].view("<i8")
    bounds = index[size - 8 * num_bounds :].view("<i8")
    if lengths.min() < 0 or not num_bounds or bounds[0] != 0 or bounds[-1] != num_sequences:
        raise ValueError(f"{path} has impossible document bounds: damaged, preprocess again")
    if num_bounds != num_sequences + 1:
        raise ValueError(
            f"{path} has {num_sequences} sequences in {num_bounds - 1} documents, and training "
            "would shuffle the sequences; preprocess again without splitting documents (into "
            "sentences)"
        )
    _require_consecutive(path, lengths, pointers, bounds[:-1], np.dtype(_DTYPES[code]).itemsize)
    return _DTYPES[code], lengths


def _require_consecutive(
    path: str, lengths: np.ndarray, pointers: np.ndarray, bounds: np.ndarray, width: int
) -> None:
    """Check that documents follow each other: megatron-core reads them where the pointers say."""
    end = 0
    for first in range(0, len(lengths), _TOKENS_CHECKED):  # in blocks: 16 bytes per document
        block = slice(first, first + _TOKENS_CHECKED)
        ends = end + lengths[block].cumsum(dtype=np.int64) * width
        starts = np.concatenate([[end], ends[:-1]])
        numbers = np.arange(first, first + len(ends))
        wrong = np.flatnonzero((pointers[block] != starts) | (bounds[block] != numbers))
        if len(wrong):
            raise ValueError(
                f"{path} places document {first + int(wrong[0])} elsewhere than behind the one "
                "before it: damaged, preprocess again"
            )
        end = int(ends[-1])


def require_token(files: IndexedFiles, token: int, flag: str) -> None:
    """Check that ``token``, without which ``flag`` has no effect, occurs in the files.

    Raises:
        ValueError: with ``flag`` and the remedy.
    """
    # Stops at the first one, which is near the beginning if each document ends with the token.
    for start in range(0, len(files.tokens), _TOKENS_CHECKED):
        if (files.tokens[start : start + _TOKENS_CHECKED] == token).any():
            return
    raise ValueError(
        f"{flag} goes by the end-of-document token {token} of the tokenizer, and --data-path "
        f"{files.prefix} holds none: preprocess again with --append-eod and this tokenizer, or "
        f"leave {flag} out"
    )


def first_inside(files: IndexedFiles, token: int) -> int | None:
    """Position of the first ``token`` inside a document, among the first Mi tokens; or None."""
    found = np.flatnonzero(files.tokens[:_TOKENS_CHECKED] == token)
    last_places = files.lengths[:_TOKENS_CHECKED].cumsum(dtype=np.int64) - 1
    inside = np.setdiff1d(found, last_places, assume_unique=True)
    return int(inside[0]) if len(inside) else None


def out_of_vocabulary(
    prefix: str, *, document: int, place: int, token: int, vocab_size: int
) -> ValueError:
    """The error for a token of ``prefix`` outside the tokenizer's vocabulary, with its place."""
    return ValueError(
        f"--data-path {prefix} holds token {token}, the tokenizer has {vocab_size}: preprocess "
        f"again with this tokenizer, or give the one it was made with. It is token {place} of "
        f"document {document} of {prefix}.bin, both counted from 0"
    )


def outside(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Positions, int64, of the ``tokens`` that are not in the vocabulary."""
    # As unsigned numbers negative ones are the largest: one pass, in every sample, finds both.
    unsigned = tokens.view(tokens.dtype.str.replace("i", "u"))
    if int(unsigned.max(initial=0)) < vocab_size:
        return np.empty(0, np.int64)
    return np.flatnonzero(unsigned >= vocab_size)


_TOKENS_AT_A_TIME = 1 << 24
_PERCENTILES = (0, 10, 50, 90, 99, 100)


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetStatistics:
    """Counts of a tokenized dataset."""

    num_documents: int
    num_tokens: int
    num_distinct_tokens: int
    unigram_entropy: float
    """Nats per token: the loss of a model that predicts the frequencies of tokens alone."""
    document_tokens: dict[int, int]
    """Percentile -> tokens of a document: 50 is the median, 100 the longest."""


def dataset_statistics(files: IndexedFiles) -> DatasetStatistics:
    """Statistics of all documents, in one pass over the tokens."""
    # In blocks: bincount converts its input to int64, 8 bytes per token.
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(files.tokens), _TOKENS_AT_A_TIME):
        part = np.bincount(files.tokens[start : start + _TOKENS_AT_A_TIME])
        size = max(len(counts), len(part))
        counts = np.pad(counts, (0, size - len(counts))) + np.pad(part, (0, size - len(part)))
    lengths = np.percentile(files.lengths, _PERCENTILES, method="nearest")
    return DatasetStatistics(
        num_documents=len(files.lengths),
        num_tokens=len(files.tokens),
        num_distinct_tokens=int(np.count_nonzero(counts)),
        unigram_entropy=entropy(counts),
        document_tokens=dict(zip(_PERCENTILES, map(int, lengths), strict=True)),
    )


def entropy(counts: np.ndarray) -> float:
    """Entropy in nats of the distribution proportional to ``counts`` [v]."""
    # Tokens that never occur contribute 0, where numpy would make 0 * log 0 a NaN.
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
