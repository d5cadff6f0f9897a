"""Which keys a query sees, as cumulative lengths: no s x s mask exists."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Run:
    """Adjacent segments, none of them empty: rows of q and k where they start and the last ends."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    _tensors: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Queries of the segment with the most of them, and keys likewise."""
        return int(np.diff(self.queries).max()), int(np.diff(self.keys).max())

    def cumulative(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cumulative lengths of its queries and keys, int32 [segments + 1] from 0 on ``device``.

        Cached: a copy to the device costs more than a small call.
        """
        if device not in self._tensors:
            self._tensors[device] = tuple(
                torch.tensor(bounds, dtype=torch.int32, device=device) - bounds[0]
                for bounds in (self.queries, self.keys)
            )
        return self._tensors[device]


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The documents of one sample along the queries and along the keys of a call.

    Queries of a segment see keys of the same segment only. A segment may have no queries or no
    keys: if q and k are different blocks of the sequence, most documents are in one of them alone.
    """

    queries: tuple[int, ...]
    """Cumulative lengths along q, from 0 to s_q: one more than there are segments."""
    keys: tuple[int, ...]
    """The same along k, from 0 to s_k."""
    _blocks: dict[tuple[tuple[range, ...], tuple[range, ...]], "Segments"] = field(
        default_factory=dict, repr=False, compare=False
    )

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
        """The same documents over some blocks of rows of q and of k, each put together.

        Cached, as every layer needs the same.
        """
        if (queries, keys) not in self._blocks:
            bounds = []
            for whole, runs in ((self.queries, queries), (self.keys, keys)):
                # Rows of the runs before each bound: a bound outside a run counts all or none.
                before = sum(np.clip(whole, run.start, run.stop) - run.start for run in runs)
                bounds.append(tuple(before.tolist()))
            self._blocks[queries, keys] = Segments(queries=bounds[0], keys=bounds[1])
        return self._blocks[queries, keys]

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
        """The same segments, joined wherever they are adjacent in q and in k."""
        # Fewer runs are fewer kernel calls: packed documents become one run per sample.
        joined: list[tuple[list[int], list[int]]] = []
        for run in self.singles:
            if joined and (joined[-1][0][-1], joined[-1][1][-1]) == (run.queries[0], run.keys[0]):
                joined[-1][0].append(run.queries[1])
                joined[-1][1].append(run.keys[1])
            else:
                joined.append((list(run.queries), list(run.keys)))
        return tuple(Run(queries=tuple(q), keys=tuple(k)) for q, k in joined)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """Which keys a query sees, and what their scores are multiplied by.

    Raises:
        ValueError: for a window that is not positive or not causal.
    """

    causal: bool = True
    """Whether only keys up to its own position in its segment are visible. A segment with both
    queries and keys then has as many of each."""
    window: int | None = None
    """Number of the last of those that are visible, its own included; None is all of them."""
    segments: tuple[Segments, ...] | None = None
    """The documents of each sample; None is one document per sample."""
    scale: float | None = None
    """Factor of the scores before the softmax; None is 1 / sqrt(head width)."""

    def __post_init__(self) -> None:
        if self.window is not None and not (self.causal and self.window > 0):
            raise ValueError(
                f"a window of {self.window} keys "
                + ("must hold at least 1." if self.causal else "needs a causal mask.")
            )

    def num_pairs(self, num_queries: int, num_keys: int, num_samples: int) -> int:
        """Pairs of a query and a key that it sees, over all samples: the cost of attention."""
        lengths = [(np.array([num_queries]), np.array([num_keys]))] * num_samples
        if self.segments is not None:
            lengths = [segments.lengths for segments in self.segments]
        total = 0
        for queries, keys in lengths:
            if not self.causal:
                total += int((queries * keys).sum())
                continue
            visible = queries[keys > 0]  # as many keys: a triangle, less the one a window hides
            hidden = np.maximum(visible - self.window, 0) if self.window else 0 * visible
            total += int((visible * (visible + 1) // 2 - hidden * (hidden + 1) // 2).sum())
        return total
