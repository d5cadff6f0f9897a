"""A layer's tensors that are in host memory and pass through the device in parts.

Residual and gradient pass tile by tile (:class:`HostRows`), attention outputs chunk by chunk
(:class:`HostHeadChunks`), sums of key and value gradients head by head (:class:`HostKvSums`) and,
once they are home, tile by tile (:class:`HostKvHome`).
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from copy import copy as shallow_copy

import torch
from torch import Tensor
from typing_extensions import override

from megatron_untied.context_parallel.buffer_plan import (
    PerChunk,
    Sizes,
    Staging,
    kv_tile,
    row_tiles,
    sum_rows,
)
from megatron_untied.context_parallel.exchange import HeadChunkLayout, HeadChunks
from megatron_untied.context_parallel.kv_gradients import KvHome, KvPair, KvSums
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.residual import Rows, stand_in
from megatron_untied.streaming.copy_engine import Copy
from megatron_untied.streaming.host_arena import HostArena, HostSlot, prefetch
from megatron_untied.tiling import Tile


class HostRows(Rows):
    """A residual [rows, b, m] or its gradient in host memory, which passes the device by tiles."""

    is_on_host = True

    def __init__(
        self,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        arena: HostArena,
        workspace: Workspace,
    ):
        """Uninitialized. ``device``: where tiles are; ``workspace``: lends the memory for them."""
        self.shape, self.dtype, self.device = shape, dtype, device
        self._arena, self._workspace = arena, workspace
        self._slot = arena.reserve((shape.numel(),), dtype)
        self.host_slots = (self._slot,)

    def fill(self, tensor: Tensor) -> Copy:
        """Start to copy all rows from the device; wait before changing ``tensor``."""
        return self._slot.write(tensor.contiguous().view(-1))

    @override
    def as_tensor(self) -> Tensor:
        return stand_in(self)

    @override
    def flat(self) -> Rows:
        rows = shallow_copy(self)
        rows.shape = torch.Size((self.shape[:-1].numel(), self.shape[-1]))
        return rows

    @override
    def on_device(self) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        self._slot.read(out.view(-1)).wait()
        return out

    @override
    def tiles(self, tiles: Sequence[Tile], memory: str = "row_tiles") -> Iterator[Tensor]:
        room = self._room(tiles, memory)
        parts = prefetch(((self._slot, self._elements(tile)) for tile in tiles), room)
        return map(self._tile_of, parts)

    @override
    def outputs(self, tiles: Sequence[Tile]) -> Iterator[Tensor]:
        room, writes = self._room(tiles, "row_tiles"), deque[Copy]()
        for i, tile in enumerate(tiles):
            elements = self._elements(tile)
            part = room[i % len(room), : elements.stop - elements.start]
            if len(writes) == len(room):  # the oldest leaves from this part
                writes.popleft().wait()
            yield self._tile_of(part)
            writes.append(self._slot.write(part, elements))
        _wait(writes)

    @override
    def updates(
        self, tiles: Sequence[Tile], into: Rows, memory: str = "row_tiles"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        if not into.is_on_host:
            yield from super().updates(tiles, into, memory)
            return
        # A tile leaves from the memory that it arrived in.
        room, places = self._room(tiles, memory), list(map(self._elements, tiles))
        writes: deque[Copy] = deque()

        def fetch(i: int) -> tuple[Copy, Tensor]:
            part = room[i % len(room), : places[i].stop - places[i].start]
            # The tile before in this memory is left to the copy streams: compute does not wait.
            return self._slot.read(part, places[i], leaving=writes[-1] if writes else None), part

        ahead = fetch(0)
        for i, place in enumerate(places):
            arrival, part = ahead
            if i + 1 < len(places):
                ahead = fetch(i + 1)
            arrival.wait()
            if len(writes) > 1:  # done by now: this tile arrived behind it
                writes.popleft().wait()
            tile = self._tile_of(part)
            yield tile, tile
            writes.append(into._slot.write(part, place))
        _wait(writes)

    @override
    def release(self) -> None:
        self._slot.release()

    def _elements(self, tile: Tile) -> slice:
        width = self.shape[1:].numel()
        return slice(tile.local.start * width, tile.local.stop * width)

    def _tile_of(self, part: Tensor) -> Tensor:
        return part.view(-1, *self.shape[1:])

    def _room(self, tiles: Sequence[Tile], memory: str) -> Tensor:
        """Flat device memory for the largest tile, twice if there are more: [1 or 2, elements]."""
        numel = max(tile.local.stop - tile.local.start for tile in tiles)
        numel *= self.shape[1:].numel()
        buffer = row_tiles(numel, len(tiles), self.dtype, memory)
        return self._workspace.take(buffer, self.device).view(-1, numel)


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
        self.host_slots = tuple(itertools.chain(*self._slots))
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
        if self.staging.shares_memory:  # the memory's owner writes to it next
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
        for slot in self.host_slots:
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


def _wait(copies: Iterable[Copy]) -> None:
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
        tile_tokens: int,
        device: torch.device,
        arena: HostArena,
        workspace: Workspace,
    ):
        """``sizes`` of the attention call that adds; see :func:`sum_rows`."""
        super().__init__(heads, tensors=None)
        shape = sizes.kv_sum_shape(len(heads))  # [2, heads, s/r, b, d]
        self._slot, self._num_rows = arena.reserve(shape, sizes.sum_dtype), shape[2]
        self._room = workspace.take(sum_rows(sizes, tile_tokens), device).view(2, -1)
        self._rows_at_a_time = self._room.shape[1] // shape[3:].numel()

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


class HostKvHome(KvHome):
    """dK and dV of this rank's own tokens on the host, as chunks brought them.

    What ranks that share a head sent is added up when a tile is read.
    """

    def __init__(self, sizes: Sizes, tile_rows: int, arena: HostArena, workspace: Workspace):
        """``tile_rows``: the most tokens that are read at once."""
        super().__init__(sizes)
        self._tile_rows, self._arena, self._workspace = tile_rows, arena, workspace
        self._received: tuple[list[tuple[HostSlot, Sequence[range]]], ...] = ([], [])

    @override
    def add(self, index: int, received: Tensor, heads: Sequence[range]) -> None:
        slot = self._arena.reserve((received.numel(),), received.dtype)
        slot.write(received.view(-1)).wait()  # its memory receives dV next
        self._received[index].append((slot, heads))
        self._device = received.device

    @override
    def rows(self, index: int, rows: Sequence[slice]) -> Tensor:
        sizes, device = self.sizes, self._device
        counts = [run.stop - run.start for run in rows]
        shape = sum(counts), sizes.b, sizes.schedule.num_kv_heads, sizes.d
        out = torch.zeros(shape, dtype=sizes.home_dtype, device=device)
        room = self._workspace.take(kv_tile(sizes, self._tile_rows), device)
        for run, total in zip(rows, out.split(counts), strict=True):
            copies, parts, used = [], [], 0
            for slot, heads, start in self._blocks(index):
                width = sizes.b * len(heads) * sizes.d
                part = room[used : used + len(total) * width]
                place = slice(start + run.start * width, start + run.stop * width)
                copies.append(slot.read(part, place))
                parts.append((heads, part.view(len(total), sizes.b, len(heads), sizes.d)))
                used += part.numel()
            _wait(copies)
            for heads, part in parts:
                total[:, :, heads.start : heads.stop] += part
        return out

    @override
    def release(self) -> None:
        for slot, _ in itertools.chain(*self._received):
            slot.release()

    def _blocks(self, index: int) -> Iterator[tuple[HostSlot, range, int]]:
        """Each rank's heads in each slot, [n, b, heads, d] from that element on."""
        for slot, of_ranks in self._received[index]:
            start = 0
            for heads in filter(None, of_ranks):
                yield slot, heads, start
                start += self.sizes.n * self.sizes.b * len(heads) * self.sizes.d
