"""[n, b, h, d] kept so that a chunk's heads are one buffer, ready to be exchanged."""

from torch import Tensor

from megatron_untied.context_parallel.all_to_all import blocks
from megatron_untied.context_parallel.head_schedule import HeadSchedule


class HeadMajor:
    """All query heads of a rank's tokens, chunk after chunk and, in a chunk, rank after rank.

    ``slots[j]`` is the flat sequence-side buffer of chunk j's exchange: what arrives lands in its
    place, and what leaves needs no copy.
    """

    def __init__(self, storage: Tensor, schedule: HeadSchedule, n: int, b: int, d: int):
        """``storage`` is flat, n * b * h * d elements."""
        self.shape = (n, b, schedule.num_heads, d)
        counts = [[len(turn.query) for turn in chunk] for chunk in schedule.chunks]
        self.slots = storage.split([n * b * d * sum(row) for row in counts])
        self._views = [
            (turn.query, view)
            for chunk, row, slot in zip(schedule.chunks, counts, self.slots, strict=True)
            for turn, view in zip(chunk, blocks(slot, row, n, b, d), strict=True)
        ]

    def read(self, rows: slice, out: Tensor) -> Tensor:
        """Tokens ``rows`` with heads in natural order, into ``out`` [rows, b, h, d]."""
        for heads, view in self._views:
            out[:, :, heads.start : heads.stop] = view[rows]
        return out

    def write(self, rows: slice, value: Tensor) -> None:
        """Put ``value`` [rows, b, h, d], heads in natural order, in its places."""
        for heads, view in self._views:
            view[rows] = value[:, :, heads.start : heads.stop]
