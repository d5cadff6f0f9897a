"""Where the gradients of keys and values are summed over the chunks that use them."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class KeyValueSums(Protocol):
    """Sums of dk and of dv of some key-value heads, each over the whole sequence."""

    heads: range

    def place(self, heads: range, dtype: torch.dtype) -> list[Tensor] | None:
        """Where a kernel may write dk and dv [s, b, len(heads), d] itself, to be added.

        None if it has to write elsewhere.
        """

    def add(self, heads: range, parts: Sequence[Tensor], rows: slice | None = None) -> None:
        """Add dk and dv [s, b, len(heads), d], or of ``rows`` only, once all rows had some."""

    def whole(self, index: int, heads: range, dtype: torch.dtype) -> Tensor | None:
        """The sum of dk (0) or dv (1), contiguous, if it is of just ``heads`` in ``dtype``."""

    def read(self, index: int, head: int, out: Tensor) -> None:
        """Write the sum of dk (0) or dv (1) of one head into ``out`` [s, b, d]."""

    def release(self) -> None:
        """Nothing will be read any more."""


MakeSums = Callable[[range, torch.Size, torch.dtype], KeyValueSums]
"""(heads, [s, b, d], dtype) -> sums of nothing."""


class DeviceSums:
    """Sums in two tensors. See :class:`KeyValueSums`."""

    def __init__(self, heads: range, tensors: Sequence[Tensor]):
        """``tensors``: [s, b, len(heads), d] for dk and for dv, their content undefined."""
        self.heads, self._tensors = heads, tensors
        self._started: set[int] = set()

    def place(self, heads: range, dtype: torch.dtype) -> list[Tensor] | None:
        """See :class:`KeyValueSums`."""
        writable = self._started.isdisjoint(heads) and self._tensors[0].dtype == dtype
        return self._columns(heads) if writable else None

    def add(self, heads: range, parts: Sequence[Tensor], rows: slice | None = None) -> None:
        """See :class:`KeyValueSums`."""
        started = not self._started.isdisjoint(heads)
        assert started or rows is None, "nothing of the other rows would ever be written"
        for total, part in zip(self._columns(heads), parts, strict=True):
            if started:
                total[rows or slice(None)].add_(part)
            elif total.dtype != part.dtype:  # else it was written in its place
                total.copy_(part)
        self._started.update(heads)

    def whole(self, index: int, heads: range, dtype: torch.dtype) -> Tensor | None:
        """See :class:`KeyValueSums`."""
        tensor = self._tensors[index]
        return tensor if heads == self.heads and tensor.dtype == dtype else None

    def read(self, index: int, head: int, out: Tensor) -> None:
        """See :class:`KeyValueSums`."""
        out.copy_(self._tensors[index][:, :, head - self.heads.start])

    def release(self) -> None:
        """See :class:`KeyValueSums`."""

    def _columns(self, heads: range) -> list[Tensor]:
        first = heads.start - self.heads.start
        return [x[:, :, first : first + len(heads)] for x in self._tensors]
