"""Which keys a query sees, as cumulative lengths: no s x s mask exists."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Run:
    """Segments that lie side by side, none of them empty: cumulative lengths from their first row.

    Counted in rows of the call's q and k.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @property
    def query_rows(self) -> slice:
        """Its rows of q."""
        return slice(self.queries[0], self.queries[-1])

    @property
    def key_rows(self) -> slice:
        """Its rows of k."""
        return slice(self.keys[0], self.keys[-1])

    @property
    def num_segments(self) -> int:
        """Segments that it joins."""
        return len(self.queries) - 1

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Queries and keys of the longest segment of each."""
        return _longest(self.queries), _longest(self.keys)

    def cumulative(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cumulative lengths of its queries and keys, int32 [segments + 1] from 0 on ``device``.

        The same tensors each time: a copy to the device costs more than a small call.
        """
        if device not in self._tensors:
            self._tensors[device] = tuple(
                torch.tensor(bounds, dtype=torch.int32, device=device) - bounds[0]
                for bounds in (self.queries, self.keys)
            )
        return self._tensors[device]

    @cached_property
    def _tensors(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The documents of one sample along the queries and along the keys of a call.

    Queries of a segment see keys of the same segment only. Either side of one may be empty: where
    q and k are different blocks of the sequence, most documents are on one side alone.
    """

    queries: tuple[int, ...]
    """Cumulative lengths along q, from 0 to s_q: one more than there are segments."""
    keys: tuple[int, ...]
    """The same along k, from 0 to s_k."""

    def __post_init__(self) -> None:
        assert len(self.queries) == len(self.keys), (len(self.queries), len(self.keys))
        for bounds in (self.queries, self.keys):
            assert bounds[0] == 0, bounds[0]
            assert all(np.diff(bounds) >= 0), "cumulative lengths do not fall"

    @classmethod
    def of(cls, bounds: Sequence[int]) -> "Segments":
        """Self-attention of one sequence: the same documents on both sides."""
        return cls(queries=tuple(bounds), keys=tuple(bounds))

    def blocks(self, queries: tuple[range, ...], keys: tuple[range, ...]) -> "Segments":
        """The same documents seen from some runs of rows of q and some of k, one after the other.

        The same value each time: every layer asks.
        """
        if (queries, keys) not in self._blocks:
            inside = {"queries": _inside(self.queries, queries), "keys": _inside(self.keys, keys)}
            self._blocks[queries, keys] = Segments(**inside)
        return self._blocks[queries, keys]

    @cached_property
    def _blocks(self) -> dict[tuple[tuple[range, ...], tuple[range, ...]], "Segments"]:
        return {}

    @cached_property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Queries and keys of each segment, int64."""
        return np.diff(self.queries), np.diff(self.keys)

    @cached_property
    def singles(self) -> tuple[Run, ...]:
        """One run for each segment that has queries and keys."""
        queries, keys = self.lengths
        return tuple(
            Run(queries=self.queries[i : i + 2], keys=self.keys[i : i + 2])
            for i in np.flatnonzero((queries > 0) & (keys > 0)).tolist()
        )

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The same segments, joined wherever nothing lies between them."""
        joined: list[tuple[list[int], list[int]]] = []
        for each in self.singles:
            if joined and (joined[-1][0][-1], joined[-1][1][-1]) == (each.queries[0], each.keys[0]):
                joined[-1][0].append(each.queries[1])
                joined[-1][1].append(each.keys[1])
            else:
                joined.append((list(each.queries), list(each.keys)))
        return tuple(Run(queries=tuple(q), keys=tuple(k)) for q, k in joined)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """Which keys a query sees, and what their scores are multiplied by.

    Raises:
        ValueError: for a window that is not positive or not causal.
    """

    causal: bool = True
    """Only keys at its own place in its segment and before. A segment with both queries and keys
    then has as many of each."""
    window: int | None = None
    """The last so many of those, itself included; None is all of them."""
    segments: tuple[Segments, ...] | None = None
    """The documents of each sample; None is one for each."""
    scale: float | None = None
    """Of scores, before the softmax; None is 1 / sqrt(head width)."""

    def __post_init__(self) -> None:
        if self.window is not None and not (self.causal and self.window > 0):
            raise ValueError(
                f"a window of {self.window} keys "
                + ("must hold at least 1." if self.causal else "needs a causal mask.")
            )

    def num_pairs(self, num_queries: int, num_keys: int, num_samples: int) -> int:
        """Queries times the keys they see, over all samples: what attention costs."""
        if self.segments is None:
            one = np.array([num_queries]), np.array([num_keys])
            return num_samples * self._pairs(*one)
        return sum(self._pairs(*each.lengths) for each in self.segments)

    def _pairs(self, queries: np.ndarray, keys: np.ndarray) -> int:
        if not self.causal:
            return int((queries * keys).sum())
        both = queries[keys > 0]
        hidden = np.maximum(both - (self.window or 0), 0) if self.window else 0 * both
        return int((both * (both + 1) // 2 - hidden * (hidden + 1) // 2).sum())


def _inside(bounds: tuple[int, ...], runs: tuple[range, ...]) -> tuple[int, ...]:
    """How many rows of ``runs`` lie before each of ``bounds``."""
    return tuple(sum(np.clip(bounds, run.start, run.stop) - run.start for run in runs).tolist())


def _longest(bounds: tuple[int, ...]) -> int:
    return int(np.diff(bounds).max())
