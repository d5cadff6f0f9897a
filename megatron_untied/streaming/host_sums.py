"""Sums of key and value gradients that wait on the host while attention runs."""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from megatron_untied.context_parallel.buffer_plan import Sizes, sum_rows
from megatron_untied.context_parallel.kv_gradients import KvPair, KvSums
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.streaming.host_arena import HostArena, prefetch


class HostKvSums(KvSums):
    """Sums on the host.

    A head's sum comes to the device some rows at a time, is added to and goes back, between two
    kernels. Heads lie apart on the host, so that those rows are one piece of memory.
    """

    def __init__(
        self,
        heads: range,
        *,
        sizes: Sizes,
        rows_at_a_time: int,
        device: torch.device,
        arena: HostArena,
        workspace: Workspace,
    ):
        """``sizes`` of the attention call that adds."""
        self.heads = heads
        shape = sizes.kv_sum_shape(len(heads))
        self._slot, self._num_rows = arena.reserve(shape, sizes.sum_dtype), shape[2]
        self._started: set[int] = set()
        self._step = min(rows_at_a_time, self._num_rows)
        room = workspace.take(sum_rows(sizes, self._step), device)
        self._room = room.view(2, -1)

    @override
    def place(self, heads: range, dtype: torch.dtype) -> None:
        return None  # no kernel writes to the host

    @override
    def whole(self, index: int, heads: range, dtype: torch.dtype) -> None:
        return None  # no exchange reads from the host

    @override
    def add(self, heads: range, parts: KvPair, rows: slice | None = None) -> None:
        started = not self._started.isdisjoint(heads)
        assert started or rows is None, "nothing of the other rows would ever be written"
        rows = rows or slice(0, self._num_rows)
        for index, part in enumerate(parts):
            for column, head in enumerate(heads):
                self._add_head(index, head, rows, part[:, :, column], started)
        self._started.update(heads)

    @override
    def read(self, index: int, head: int, out: Tensor) -> None:
        for rows, total in self._totals(index, head, slice(0, self._num_rows)):
            out[rows].copy_(total)

    @override
    def release(self) -> None:
        self._slot.release()

    def _add_head(self, index: int, head: int, rows: slice, part: Tensor, started: bool) -> None:
        """``part`` [len(rows), b, d]."""
        for tile, total in self._totals(index, head, rows) if started else self._empty(part, rows):
            added = part[tile.start - rows.start : tile.stop - rows.start]
            if started:
                total += added
            else:
                total.copy_(added)
            # Waited for at once: the tile after next arrives in the same half of the room.
            self._slot.write(self._place(index, head, tile), total).wait()

    def _totals(self, index: int, head: int, rows: slice) -> Iterator[tuple[slice, Tensor]]:
        """Some rows at a time of a head's sum, on the device, the next ones on their way."""
        tiles = list(self._tiles(rows))
        reads = ((self._slot, self._place(index, head, tile)) for tile in tiles)
        return zip(tiles, prefetch(reads, self._room), strict=True)

    def _empty(self, like: Tensor, rows: slice) -> Iterator[tuple[slice, Tensor]]:
        """The same for a sum of nothing."""
        for tile in self._tiles(rows):
            shape = torch.Size((tile.stop - tile.start, *like.shape[1:]))
            yield tile, self._room[0][: shape.numel()].view(shape)

    def _tiles(self, rows: slice) -> Iterator[slice]:
        for start in range(rows.start, rows.stop, self._step):
            yield slice(start, min(start + self._step, rows.stop))

    def _place(self, index: int, head: int, rows: slice) -> tuple[int, int, slice]:
        return index, head - self.heads.start, rows
