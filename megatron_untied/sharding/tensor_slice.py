"""Axis-aligned parts of tensors, and flat ranges as such parts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.sizes)

    def intersect(self, other: "Box") -> "Box | None":
        """The part in both boxes, or None where there is none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = map(min, self._stops(), other._stops())
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if min(sizes) > 0 else None

    def shifted(self, by: Sequence[int]) -> "Box":
        """The same box, ``by`` further along each dimension."""
        return Box(tuple(o + b for o, b in zip(self.offsets, by, strict=True)), self.sizes)

    def view(self, x: Tensor) -> Tensor:
        """The box of ``x``."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            x = x.narrow(dim, offset, size)
        return x

    def _stops(self) -> Iterator[int]:
        return (offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


def boxes_of_flat_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) of a row-major tensor as boxes, in order: at most 3 for a matrix."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield Box((start,), (stop - start,))
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows are [first, last)
    if first > last:
        yield from _boxes_in_row(shape, last, start, stop)
        return
    yield from _boxes_in_row(shape, first - 1, start, first * row)
    if last > first:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    yield from _boxes_in_row(shape, last, last * row, stop)


def _boxes_in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    origin = index * math.prod(shape[1:])
    for box in boxes_of_flat_range(shape[1:], start - origin, stop - origin):
        yield Box((index, *box.offsets), (1, *box.sizes))
