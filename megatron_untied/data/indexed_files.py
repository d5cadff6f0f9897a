"""Token files in Megatron's format, ``PREFIX.bin`` and ``PREFIX.idx``: what they hold, checked.

megatron-core maps both files and trusts them: a truncated one is found in the middle of training,
if ever. :func:`open_indexed_files` compares every size and bound that costs little to compare.
Layout of the .idx, little endian: magic, u64 version 1, u8 dtype, u64 sequences S, u64 bounds B,
int32 length[S], int64 pointer[S] (bytes into the .bin), int64 bound[B] (sequences up to a
document's end). Files written for text have one sequence in a document.
"""

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_TOKENS_CHECKED = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class IndexedFiles:
    """A pair of token files whose sizes agree; both arrays are maps of the files."""

    prefix: str
    lengths: np.ndarray
    """Tokens of each document, int32."""
    tokens: np.ndarray
    """All documents one after the other, in the dtype of the file."""

    def fingerprint(self) -> str:
        """Changes when documents do in number, order or length: what sample indices depend on."""
        return fingerprint_of(self.lengths)


def fingerprint_of(lengths: np.ndarray) -> str:
    """:meth:`IndexedFiles.fingerprint` of documents of ``lengths``, int32 [documents]."""
    return hashlib.blake2b(lengths, digest_size=16).hexdigest()


def open_indexed_files(prefix: str, *, vocab_size: int | None = None) -> IndexedFiles:
    """The files at ``prefix``; with ``vocab_size`` their first Mi tokens are checked against it.

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
    dtype, lengths = _read_index(f"{prefix}.idx")
    files = IndexedFiles(prefix, lengths, _map_tokens(f"{prefix}.bin", dtype, lengths))
    if vocab_size is not None:
        _check_vocabulary(files, vocab_size)
    return files


def _read_index(path: str) -> tuple[type[np.integer], np.ndarray]:
    size = os.path.getsize(path)
    header = Path(path).open("rb").read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise ValueError(f"{path} is {size} bytes, shorter than its header; preprocess again")
    magic, version, code, num_sequences, num_bounds = _HEADER.unpack(header)
    if magic != _MAGIC or version != 1 or code not in _DTYPES:
        raise ValueError(f"{path} is not a Megatron index of integer tokens; preprocess again")
    expected = _HEADER.size + 12 * num_sequences + 8 * num_bounds
    if size != expected:
        raise ValueError(
            f"{path} is {size} bytes; {num_sequences} documents need {expected}: it is "
            "incomplete or damaged, preprocess again"
        )
    if not num_sequences:
        raise ValueError(f"{path} holds no documents")
    index = np.memmap(path, mode="r")
    lengths = index[_HEADER.size :][: 4 * num_sequences].view("<i4")
    bounds = index[size - 8 * num_bounds :].view("<i8")
    if lengths.min() < 0 or not num_bounds or bounds[0] != 0 or bounds[-1] != num_sequences:
        raise ValueError(f"{path} has impossible document bounds: damaged, preprocess again")
    return _DTYPES[code], lengths


def _map_tokens(path: str, dtype: type[np.integer], lengths: np.ndarray) -> np.ndarray:
    size = os.path.getsize(path)
    num_tokens = int(lengths.sum(dtype=np.int64))
    expected = num_tokens * np.dtype(dtype).itemsize
    if size != expected:
        raise ValueError(
            f"{path} is {size} bytes; its .idx speaks of {num_tokens} tokens, {expected} bytes: "
            f"{'cut short' if size < expected else 'not the pair of this .idx'}, preprocess again"
        )
    if not num_tokens:
        raise ValueError(f"{path} holds no tokens")
    return np.memmap(path, dtype=dtype, mode="r")


def _check_vocabulary(files: IndexedFiles, vocab_size: int) -> None:
    first = files.tokens[:_TOKENS_CHECKED]
    low, high = int(first.min()), int(first.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"--data-path {files.prefix} holds token {low if low < 0 else high}, the tokenizer has "
            f"{vocab_size}: preprocess again with this tokenizer, or give the one it was made with"
        )
