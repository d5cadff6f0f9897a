"""Slices of tensors, each an offset and a size per dimension, and flat ranges as such slices."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The elements [offset, offset + size) in every dimension of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the slice."""
        return math.prod(self.sizes)

    def intersect(self, other: "TensorSlice") -> "TensorSlice | None":
        """The elements in both slices; None if there are none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a + m, b + n) - start
            for start, a, m, b, n in zip(
                starts, self.offsets, self.sizes, other.offsets, other.sizes, strict=True
            )
        )
        return TensorSlice(starts, sizes) if min(sizes) > 0 else None

    def shifted(self, by: Sequence[int]) -> "TensorSlice":
        """The same slice with ``by`` added to its offsets."""
        return TensorSlice(tuple(o + b for o, b in zip(self.offsets, by, strict=True)), self.sizes)

    def view(self, x: Tensor) -> Tensor:
        """The slice of ``x``, as a view of its memory."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            x = x.narrow(dim, offset, size)
        return x


def slices_of_flat_range(shape: Sequence[int], start: int, stop: int) -> Iterator[TensorSlice]:
    """Elements [start, stop) of a row-major tensor as slices, in order: at most 3 for a matrix.

    A matrix has the end of one row, whole rows, and the beginning of another.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield TensorSlice((start,), (stop - start,))
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows are [first, last)
    if first > last:
        yield from _slices_in_row(shape, last, start, stop)
        return
    yield from _slices_in_row(shape, first - 1, start, first * row)
    if last > first:
        yield TensorSlice((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    yield from _slices_in_row(shape, last, last * row, stop)


def _slices_in_row(
    shape: Sequence[int], index: int, start: int, stop: int
) -> Iterator[TensorSlice]:
    origin = index * math.prod(shape[1:])
    for tensor_slice in slices_of_flat_range(shape[1:], start - origin, stop - origin):
        yield TensorSlice((index, *tensor_slice.offsets), (1, *tensor_slice.sizes))
