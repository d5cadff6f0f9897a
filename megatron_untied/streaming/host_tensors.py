"""A layer's tensors that may be in host memory and pass through the device in parts.

The layer's input is read tile by tile (:class:`Rows`), attention outputs chunk by chunk
(:class:`HostHeadChunks`), and sums of key and value gradients head by head (:class:`HostKvSums`).
"""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from megatron_untied.context_parallel.buffer_plan import (
    PerChunk,
    Sizes,
    Staging,
    row_tiles,
    sum_rows,
)
from megatron_untied.context_parallel.exchange import HeadChunkLayout, HeadChunks
from megatron_untied.context_parallel.kv_gradients import KvPair, KvSums
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.streaming.copy_engine import Copy
from megatron_untied.streaming.host_arena import HostArena, HostSlot, prefetch
from megatron_untied.tiling import Tile


class Rows:
    """A layer's input [rows, b, m], on the device or on the host, read tile by tile."""

    host_slot: HostSlot | None
    """Its host memory; None if it is on the device."""

    def __init__(self, source: Tensor | HostSlot, workspace: Workspace, device: torch.device):
        """``device``: where tiles are read; ``workspace``: lends the memory for those of a slot."""
        self.shape, self.dtype, self.device = source.shape, source.dtype, device
        self.host_slot = source if isinstance(source, HostSlot) else None
        self._source, self._workspace = source, workspace

    def tiles(self, tiles: Sequence[Tile]) -> Iterator[Tensor]:
        """The local rows of each tile, [rows of the tile, b, m]; valid until the next is taken.

        Rows on the device are views. For rows on the host the next tile is in flight; the two tiles
        of device memory are shared by all layers: only one iteration may be under way.
        """
        if self.host_slot is None:
            return (self._source[tile.local] for tile in tiles)
        largest = max(tile.local.stop - tile.local.start for tile in tiles)
        numel = largest * self.shape[1:].numel()  # the last tile may be smaller
        room = self._workspace.take(row_tiles(numel, self.dtype), self.device)
        return prefetch(((self.host_slot, tile.local) for tile in tiles), room.view(2, numel))

    def release(self) -> None:
        """Free host memory; call it after the last read. The device's goes with its last use."""
        if self.host_slot is not None:
            self.host_slot.release()


class HostHeadChunks(HeadChunks):
    """Chunks of heads on the host, which pass through the device one chunk at a time.

    Copies are waited for by compute alone, as late as their device buffer's reuse allows.
    """

    def __init__(
        self,
        staging: Staging,
        layout: HeadChunkLayout,
        arena: HostArena,
        workspace: Workspace,
        device: torch.device,
    ):
        """``staging``: the device memory that chunks pass through."""
        self.staging, self.layout, self.workspace = staging, layout, workspace
        self.dtype, self.device = staging.tile.dtype, device
        self._num_chunks = len(layout.counts)
        self._slots = [
            [arena.reserve(shape, self.dtype) for shape in layout.even_blocks(j)]
            for j in range(self._num_chunks)
        ]
        self._copies_out: list[list[Copy]] = [[] for _ in set(staging.recv)]  # by receive buffer
        self._copies_in: dict[int, list[Copy]] = {}  # by chunk

    @override
    def send_buffer(self, j: int) -> Tensor:
        if j not in self._copies_in:
            self._fetch(j)
        _wait(self._copies_in.pop(j))
        # The chunk before this one was sent by now, so its buffer is free.
        if len(set(self.staging.send)) > 1 and j + 1 < self._num_chunks:
            self._fetch(j + 1)
        return self._buffer(self.staging.send, j)

    @override
    def recv_buffer(self, j: int) -> Tensor:
        # The previous chunk in this buffer must be on the host before another is received.
        _wait(self._copies_out[j % len(self._copies_out)])
        return self._buffer(self.staging.recv, j)

    @override
    def received(self, j: int) -> None:
        pairs = self._pairs(j, self._buffer(self.staging.recv, j), self.layout)
        self._copies_out[j % len(self._copies_out)] = [slot.write(part) for slot, part in pairs]
        if self.staging.borrowed:  # the memory's owner writes to it next
            self._wait_copies_out()

    @override
    def read(self, rows: slice, out: Tensor) -> None:
        self._wait_copies_out()  # the next layer's chunks pass through the same device buffers
        staged, pairs = self._staged(rows)
        _wait([slot.read(block, (slice(None), rows)) for slot, block in pairs])
        staged.read(slice(0, len(out)), out)

    @override
    def write(self, rows: slice, value: Tensor) -> None:
        staged, pairs = self._staged(rows)
        staged.write(slice(0, len(value)), value)
        _wait([slot.write(block, (slice(None), rows)) for slot, block in pairs])

    @override
    def release(self) -> None:
        self._wait_copies_out()
        for slot in itertools.chain(*self._slots):
            slot.release()

    def _wait_copies_out(self) -> None:
        for copies in self._copies_out:
            _wait(copies)
            copies.clear()

    def _fetch(self, j: int) -> None:
        pairs = self._pairs(j, self._buffer(self.staging.send, j), self.layout)
        self._copies_in[j] = [slot.read(part) for slot, part in pairs]

    def _buffer(self, buffers: PerChunk, j: int) -> Tensor:
        return self.workspace.take(buffers[j], self.device)[: self.layout.slot_numels[j]]

    def _staged(self, rows: slice) -> tuple[HeadChunks, list[tuple[HostSlot, Tensor]]]:
        """Device memory for ``rows`` of all chunks, and its parts with their slots."""
        own = self.layout
        # A layout of its own: all chunks of a few tokens, as small as a tile of the residual.
        layout = HeadChunkLayout(own.schedule, rows.stop - rows.start, own.b, own.d)
        storage = self.workspace.take(self.staging.tile, self.device)[: layout.numel]
        staged, pairs = HeadChunks(storage, layout), []
        for j in range(self._num_chunks):
            pairs += self._pairs(j, staged.send_buffer(j), layout)
        return staged, pairs

    def _pairs(
        self, j: int, flat: Tensor, layout: HeadChunkLayout
    ) -> list[tuple[HostSlot, Tensor]]:
        """The slots of chunk j, each with its part of ``flat``, which is chunk j of ``layout``."""
        shapes = layout.even_blocks(j)  # [ranks, n, b, heads per rank, d] each
        parts = flat.split([shape.numel() for shape in shapes])
        views = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        return list(zip(self._slots[j], views, strict=True))


def _wait(copies: Sequence[Copy]) -> None:
    for copy in copies:
        copy.wait()


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
        for (index, part), (column, head) in itertools.product(enumerate(parts), enumerate(heads)):
            # Before a head is started its sum is uninitialized: it is written, not fetched.
            for tile, total in self._totals(index, head, rows, fetch=started):
                added = part[tile.start - rows.start : tile.stop - rows.start, :, column]
                if started:
                    total += added
                else:
                    total.copy_(added)
                # Waited for at once: the tile after next arrives in the same half of the room.
                self._slot.write(total, (index, head - self.heads.start, tile)).wait()
        self.started.update(heads)

    @override
    def read(self, index: int, head: int, out: Tensor) -> None:
        for rows, total in self._totals(index, head, slice(0, self._num_rows), fetch=True):
            out[rows].copy_(total)

    @override
    def release(self) -> None:
        self._slot.release()

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
