"""What is in a pair of token files: the yardsticks for a loss measured on them."""

from dataclasses import dataclass

import numpy as np

from megatron_untied.data.indexed_files import IndexedFiles

_TOKENS_AT_A_TIME = 1 << 24
_PERCENTILES = (0, 10, 50, 90, 99, 100)


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetStatistics:
    """Counts of a tokenized dataset."""

    num_documents: int
    num_tokens: int
    num_distinct_tokens: int
    unigram_entropy: float
    """Nats a token: the loss of a model that knows how often each token occurs, and no more."""
    document_tokens: dict[int, int]
    """Percentile to tokens in a document: 50 is the median, 100 the longest."""


def dataset_statistics(files: IndexedFiles) -> DatasetStatistics:
    """Statistics of all documents, in one pass over the tokens."""
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
    """Entropy in nats of the distribution that ``counts`` [v] are in proportion to."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
