"""Tensors of a layer that are on the host and come to the device in parts."""

from collections.abc import Iterator, Sequence
from typing import Literal

from torch import Tensor

from megatron_untied.context_parallel.head_major import DeviceHeadMajor, HeadMajorShape
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.streaming.copy_engine import Copy
from megatron_untied.streaming.host_arena import HostArena, HostSlot, prefetch
from megatron_untied.streaming.tiles import Tile


class HostRows:
    """[rows, b, m] on the host, read tile by tile with one tile ahead.

    See :class:`megatron_untied.streaming.stash.Rows`. Two tiles of device memory, shared by all
    layers: only one iteration may be under way.
    """

    def __init__(self, slot: HostSlot, workspace: Workspace, like: Tensor):
        # An empty one: to keep ``like`` itself would keep its memory.
        self.slot, self.workspace, self.like = slot, workspace, like.new_empty(0)
        self.shape = tuple(slot.shape)

    def tiles(self, tiles: Sequence[Tile]) -> Iterator[Tensor]:
        """See :class:`megatron_untied.streaming.stash.Rows`."""
        largest = max(tile.local.stop - tile.local.start for tile in tiles)
        numel = largest * self.slot.shape[1:].numel()
        room = self.workspace.take("rows_room", 2, numel, like=self.like)
        return prefetch(((self.slot, tile.local) for tile in tiles), room)

    def release(self) -> None:
        """Give the host memory back."""
        self.slot.release()


DEAD_BUFFERS = {
    "out": {"landing": "q", "slot": "dq"},
    "d_out": {"landing": "do", "slot": "dq"},
}
"""Buffers of the chunk loop through which slots pass between host and exchange, without overlap.

O lands when q was used, dQ when dO was; what is fetched is sent before dq is computed.
"""


class HostHeadMajor:
    """Head-major slots on the host, which pass through the device one chunk at a time.

    See :class:`megatron_untied.context_parallel.head_major.HeadMajor`. On its way a chunk takes
    memory of its own only where exchanges overlap, twice, or where there is nobody to exchange
    with.
    """

    def __init__(
        self,
        name: Literal["out", "d_out"],
        shape: HeadMajorShape,
        arena: HostArena,
        workspace: Workspace,
        like: Tensor,
    ):
        """``name`` tells which tensor it is, as the two are in use at the same time."""
        self.name, self.shape, self.workspace = name, shape, workspace
        self.like = like.new_empty(0)
        self._sets = 2 if shape.overlap else 1
        self._borrows = not shape.overlap and shape.num_ranks > 1
        self._slots = [arena.reserve((numel,), like.dtype) for numel in shape.slot_numels]
        self._leaving: list[Copy | None] = [None] * self._sets

    def slot(self, index: int) -> Tensor:
        """See :class:`HeadMajor`: fetched from the host."""
        slot = self._buffer("slot", index)
        self._slots[index].fetch(slot).wait()
        return slot

    def landing(self, index: int) -> Tensor:
        """See :class:`HeadMajor`: a device buffer, free once its last content is on the host."""
        leaving = self._leaving[index % self._sets]
        if leaving is not None:
            leaving.wait()
        return self._buffer("landing", index)

    def landed(self, index: int) -> None:
        """See :class:`HeadMajor`: starts the copy to the host."""
        self._leaving[index % self._sets] = self._slots[index].store(self._buffer("landing", index))
        if self._borrows:
            self.settle()

    def rows(self, rows: Sequence[slice]) -> Tensor:
        """See :class:`HeadMajor`."""
        self.settle()  # the next layer's slots leave through the same device buffers
        out, parts = self.shape.empty_rows(rows, self.like)
        for run, part in zip(rows, parts, strict=True):
            staged = self._staged(run)
            _wait([slot.read(place, piece) for slot, place, piece in self._pieces(run, staged)])
            staged.read(slice(None), part)
        return out

    def write(self, rows: slice, value: Tensor) -> None:
        """See :class:`HeadMajor`."""
        staged = self._staged(rows)
        staged.write(slice(None), value)
        _wait([slot.write(place, piece) for slot, place, piece in self._pieces(rows, staged)])

    def settle(self) -> None:
        """Wait until nothing is on its way to the host."""
        for leaving in self._leaving:
            if leaving is not None:
                leaving.wait()
        self._leaving = [None] * self._sets

    def release(self) -> None:
        """Give the host memory back."""
        self.settle()
        for slot in self._slots:
            slot.release()

    def _buffer(self, use: Literal["landing", "slot"], index: int) -> Tensor:
        name = f"{self.name}_{use}{index % self._sets}"
        if self._borrows:
            name = DEAD_BUFFERS[self.name][use]
        return self.workspace.take(name, self.shape.slot_numels[index], like=self.like)

    def _staged(self, rows: slice) -> DeviceHeadMajor:
        """Device memory for some tokens of all chunks."""
        shape = self.shape.of_tokens(rows.stop - rows.start)
        storage = self.workspace.take(f"{self.name}_tile", shape.numel, like=self.like)
        return DeviceHeadMajor(storage, shape)

    def _pieces(
        self, rows: slice, staged: DeviceHeadMajor
    ) -> Iterator[tuple[HostSlot, slice, Tensor]]:
        """Tokens ``rows`` cut so that each piece is contiguous: slot, its part of it, of staged.

        A piece is what one rank takes in one chunk, [rows, b, heads, d].
        """
        num_rows = rows.stop - rows.start
        for index, slot in enumerate(self._slots):
            start, staged_start, staged_slot = 0, 0, staged.slot(index)
            for count in self.shape.counts[index]:
                unit = self.shape.b * count * self.shape.d
                place = slice(start + rows.start * unit, start + rows.stop * unit)
                if count:
                    yield slot, place, staged_slot[staged_start : staged_start + num_rows * unit]
                start += self.shape.n * unit
                staged_start += num_rows * unit


def _wait(copies: Sequence[Copy]) -> None:
    for copy in copies:
        copy.wait()
