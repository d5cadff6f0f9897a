"""Tensors of a layer that are on the host and come to the device in parts."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from megatron_untied.context_parallel.head_major import DeviceHeadMajor, HeadMajorShape
from megatron_untied.context_parallel.untied import LogSumExps
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
    "out": {"landing": "q", "slot": "dk"},
    "d_out": {"landing": "dk", "slot": "dk"},
}
"""Buffers of the chunk loop through which slots pass between host and exchange, without overlap.

O lands when q was used. What is fetched is sent before dk is computed, and dQ lands when dk was
added to its sum.
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
        self._slots = [
            [arena.reserve(blocks, like.dtype) for blocks in shape.even_blocks(index)]
            for index in range(len(shape.counts))
        ]
        self._leaving: list[list[Copy]] = [[] for _ in range(self._sets)]
        self._arriving: dict[int, list[Copy]] = {}

    def slot(self, index: int) -> Tensor:
        """See :class:`HeadMajor`: fetched from the host, where exchanges overlap one ahead."""
        if index not in self._arriving:
            self._fetch(index)
        _wait(self._arriving.pop(index))
        # The slot before this one was sent by now, so its buffer is free.
        if self._sets == 2 and index + 1 < len(self._slots):
            self._fetch(index + 1)
        return self._buffer("slot", index)

    def landing(self, index: int) -> Tensor:
        """See :class:`HeadMajor`: a device buffer, free once its last content is on the host."""
        _wait(self._leaving[index % self._sets])
        return self._buffer("landing", index)

    def landed(self, index: int) -> None:
        """See :class:`HeadMajor`: starts the copy to the host."""
        pairs = self._pairs(index, self._buffer("landing", index), self.shape)
        self._leaving[index % self._sets] = [host.store(blocks) for host, blocks in pairs]
        if self._borrows:
            self.settle()

    def rows(self, rows: Sequence[slice]) -> Tensor:
        """See :class:`HeadMajor`."""
        self.settle()  # the next layer's slots leave through the same device buffers
        out, parts = self.shape.empty_rows(rows, self.like)
        for run, part in zip(rows, parts, strict=True):
            staged, pairs = self._staged(run)
            _wait([host.read((slice(None), run), blocks) for host, blocks in pairs])
            staged.read(slice(0, len(part)), part)
        return out

    def write(self, rows: slice, value: Tensor) -> None:
        """See :class:`HeadMajor`."""
        staged, pairs = self._staged(rows)
        staged.write(slice(0, len(value)), value)
        _wait([host.write((slice(None), rows), blocks) for host, blocks in pairs])

    def settle(self) -> None:
        """Wait until nothing is on its way to the host."""
        for leaving in self._leaving:
            _wait(leaving)
            leaving.clear()

    def release(self) -> None:
        """Give the host memory back."""
        self.settle()
        for slot in itertools.chain(*self._slots):
            slot.release()

    def _fetch(self, index: int) -> None:
        pairs = self._pairs(index, self._buffer("slot", index), self.shape)
        self._arriving[index] = [host.fetch(blocks) for host, blocks in pairs]

    def _buffer(self, use: Literal["landing", "slot"], index: int) -> Tensor:
        name = f"{self.name}_{use}{index % self._sets}"
        if self._borrows:
            name = DEAD_BUFFERS[self.name][use]
        return self.workspace.take(name, self.shape.slot_numels[index], like=self.like)

    def _staged(self, rows: slice) -> tuple[DeviceHeadMajor, list[tuple[HostSlot, Tensor]]]:
        """Device memory for some tokens of all chunks, and its parts with the slots they are of."""
        shape = self.shape.of_tokens(rows.stop - rows.start)
        storage = self.workspace.take(f"{self.name}_tile", shape.numel, like=self.like)
        staged = DeviceHeadMajor(storage, shape)
        chunks = range(len(self._slots))
        return staged, [
            pair for index in chunks for pair in self._pairs(index, staged.slot(index), shape)
        ]

    def _pairs(
        self, index: int, flat: Tensor, shape: HeadMajorShape
    ) -> list[tuple[HostSlot, Tensor]]:
        """A chunk's slots on the host, each with its part of ``flat``, a chunk of ``shape``."""
        blocks = shape.even_blocks(index)
        parts = flat.split([each.numel() for each in blocks])
        views = (part.view(each) for part, each in zip(parts, blocks, strict=True))
        return list(zip(self._slots[index], views, strict=True))


class HostLogSumExps:
    """What attention's backward needs of its forward beside O, on the host: fp32 [b, heads, s]."""

    def __init__(self, lse: LogSumExps, arena: HostArena):
        self._slots = [[_stored(each.contiguous(), arena) for each in chunk] for chunk in lse]
        self._device = lse[0][0].device

    def on_device(self) -> LogSumExps:
        """Fetched; the host memory is given back."""
        return [[_fetched(slot, self._device) for slot in chunk] for chunk in self._slots]


def _stored(tensor: Tensor, arena: HostArena) -> HostSlot:
    slot = arena.reserve(tensor.shape, tensor.dtype)
    slot.store(tensor).wait()
    return slot


def _fetched(slot: HostSlot, device: torch.device) -> Tensor:
    tensor = torch.empty(slot.shape, dtype=slot.dtype, device=device)
    slot.fetch(tensor).wait()
    slot.release()
    return tensor


def _wait(copies: Sequence[Copy]) -> None:
    for copy in copies:
        copy.wait()
