"""Axis-aligned parts of tensors, and flat ranges as such parts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """An axis-aligned part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the slice."""
        return math.prod(self.sizes)

    def intersect(self, other: "TensorSlice") -> "TensorSlice | None":
        """The part in both slices, or None where there is none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = map(min, self._stops(), other._stops())
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return TensorSlice(starts, sizes) if min(sizes) > 0 else None

    def shifted(self, by: Sequence[int]) -> "TensorSlice":
        """The same slice, ``by`` further along each dimension."""
        return TensorSlice(tuple(o + b for o, b in zip(self.offsets, by, strict=True)), self.sizes)

    def view(self, x: Tensor) -> Tensor:
        """The part of ``x``."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            x = x.narrow(dim, offset, size)
        return x

    def _stops(self) -> Iterator[int]:
        return (offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


def slices_of_flat_range(shape: Sequence[int], start: int, stop: int) -> Iterator[TensorSlice]:
    """Elements [start, stop) of a row-major tensor as slices, in order: at most 3 for a matrix."""
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
