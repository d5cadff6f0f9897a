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
    """Sums [s/r, b, d] of dK and dV on the host, one piece of memory per head.

    Between two kernels a head's sum comes to the device some rows at a time, is added to and goes
    back. Heads lie apart on the host, so that those rows are contiguous: one copy.
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
        super().__init__(heads, tensors=None)
        shape = sizes.kv_sum_shape(len(heads))  # [2, heads, s/r, b, d]
        self._slot, self._num_rows = arena.reserve(shape, sizes.sum_dtype), shape[2]
        self._rows_at_a_time = min(rows_at_a_time, self._num_rows)
        room = workspace.take(sum_rows(sizes, self._rows_at_a_time), device)
        self._room = room.view(2, -1)

    @override
    def add(self, heads: range, parts: KvPair, rows: slice | None = None) -> None:
        started = not self.started.isdisjoint(heads)
        assert started or rows is None, "the first gradients must be of all rows"
        rows = rows or slice(0, self._num_rows)
        for index, part in enumerate(parts):
            for column, head in enumerate(heads):
                self._add_head(index, head, rows, part[:, :, column], started)
        self.started.update(heads)

    @override
    def read(self, index: int, head: int, out: Tensor) -> None:
        for rows, total in self._totals(index, head, slice(0, self._num_rows), fetch=True):
            out[rows].copy_(total)

    @override
    def release(self) -> None:
        self._slot.release()

    def _add_head(self, index: int, head: int, rows: slice, part: Tensor, started: bool) -> None:
        """``part`` [len(rows), b, d]; before a head is ``started`` its sum is uninitialized."""
        for tile, total in self._totals(index, head, rows, fetch=started):
            added = part[tile.start - rows.start : tile.stop - rows.start]
            if started:
                total += added
            else:
                total.copy_(added)
            # Waited for at once: the tile after next arrives in the same half of the room.
            self._slot.write(total, (index, head - self.heads.start, tile)).wait()

    def _totals(
        self, index: int, head: int, rows: slice, *, fetch: bool
    ) -> Iterator[tuple[slice, Tensor]]:
        """A head's sum on the device, some rows at a time with the next ones in flight.

        Without ``fetch`` the memory is handed out uninitialized.
        """
        step = self._rows_at_a_time
        starts = range(rows.start, rows.stop, step)
        tiles = [slice(start, min(start + step, rows.stop)) for start in starts]
        reads = [(self._slot, (index, head - self.heads.start, tile)) for tile in tiles]
        if fetch:
            yield from zip(tiles, prefetch(reads, self._room), strict=True)
            return
        for tile, (slot, place) in zip(tiles, reads, strict=True):
            shape = slot.shape_of(place)  # [rows of the tile, b, d]
            yield tile, self._room[0][: shape.numel()].view(shape)
