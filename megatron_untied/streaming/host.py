"""Tensors of a layer that are on the host and come to the device in parts."""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from megatron_untied.context_parallel.buffer_plan import Buffer, Staging, row_tiles
from megatron_untied.context_parallel.exchange import DeviceHeadMajor, HeadMajor, HeadMajorLayout
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.streaming.copy_engine import Copy
from megatron_untied.streaming.host_arena import HostArena, HostSlot, prefetch
from megatron_untied.streaming.rows import Rows
from megatron_untied.tiling import Tile


class HostRows(Rows):
    """[rows, b, m] on the host, read tile by tile with one tile ahead.

    Two tiles of device memory, shared by all layers: only one iteration may be under way.
    """

    def __init__(self, slot: HostSlot, workspace: Workspace, device: torch.device):
        self.host_slot, self.workspace = slot, workspace
        self.shape, self.dtype, self.device = slot.shape, slot.dtype, device

    @override
    def tiles(self, tiles: Sequence[Tile]) -> Iterator[Tensor]:
        largest = max(tile.local.stop - tile.local.start for tile in tiles)
        numel = largest * self.shape[1:].numel()
        room = self.workspace.take(row_tiles(numel, self.dtype), self.device)
        return prefetch(((self.host_slot, tile.local) for tile in tiles), room.view(2, numel))

    @override
    def release(self) -> None:
        self.host_slot.release()


class HostHeadMajor(HeadMajor):
    """Head-major slots on the host, which pass through the device one chunk at a time."""

    def __init__(
        self,
        staging: Staging,
        layout: HeadMajorLayout,
        arena: HostArena,
        workspace: Workspace,
        device: torch.device,
    ):
        """``staging``: the device memory that chunks pass through."""
        self.staging, self.layout, self.workspace = staging, layout, workspace
        self.dtype, self.device = staging.tile.dtype, device
        self._num_chunks = len(layout.counts)
        self._slots = [
            [arena.reserve(blocks, self.dtype) for blocks in layout.even_blocks(j)]
            for j in range(self._num_chunks)
        ]
        self._leaving: list[list[Copy]] = [[] for _ in staging.recv]
        self._arriving: dict[int, list[Copy]] = {}

    @override
    def send_buffer(self, j: int) -> Tensor:
        if j not in self._arriving:
            self._fetch(j)
        _wait(self._arriving.pop(j))
        # The chunk before this one was sent by now, so its buffer is free.
        if len(self.staging.send) > 1 and j + 1 < self._num_chunks:
            self._fetch(j + 1)
        return self._take(self.staging.send[j], j)

    @override
    def recv_buffer(self, j: int) -> Tensor:
        _wait(self._leaving[j % len(self._leaving)])  # what was there before is on the host
        return self._take(self.staging.recv[j], j)

    @override
    def received(self, j: int) -> None:
        pairs = self._pairs(j, self._take(self.staging.recv[j], j), self.layout)
        self._leaving[j % len(self._leaving)] = [host.store(blocks) for host, blocks in pairs]
        if self.staging.borrowed:  # the buffer's own content comes next
            self.settle()

    @override
    def rows(self, rows: Sequence[slice]) -> Tensor:
        self.settle()  # the next layer's slots leave through the same device buffers
        out, parts = self.layout.empty_rows(rows, self.dtype, self.device)
        for run, part in zip(rows, parts, strict=True):
            staged, pairs = self._staged(run)
            _wait([host.read((slice(None), run), blocks) for host, blocks in pairs])
            staged.read(slice(0, len(part)), part)
        return out

    @override
    def write(self, rows: slice, value: Tensor) -> None:
        staged, pairs = self._staged(rows)
        staged.write(slice(0, len(value)), value)
        _wait([host.write((slice(None), rows), blocks) for host, blocks in pairs])

    @override
    def release(self) -> None:
        self.settle()
        for slot in itertools.chain(*self._slots):
            slot.release()

    def settle(self) -> None:
        """Wait until nothing is on its way to the host."""
        for leaving in self._leaving:
            _wait(leaving)
            leaving.clear()

    def _fetch(self, j: int) -> None:
        pairs = self._pairs(j, self._take(self.staging.send[j], j), self.layout)
        self._arriving[j] = [host.fetch(blocks) for host, blocks in pairs]

    def _take(self, buffer: Buffer, j: int) -> Tensor:
        return self.workspace.take(buffer, self.device)[: self.layout.slot_numels[j]]

    def _staged(self, rows: slice) -> tuple[DeviceHeadMajor, list[tuple[HostSlot, Tensor]]]:
        """Device memory for some tokens of all chunks, and its parts with the slots they are of."""
        layout = self.layout.of_tokens(rows.stop - rows.start)
        storage = self.workspace.take(self.staging.tile, self.device)[: layout.numel]
        staged = DeviceHeadMajor(storage, layout)
        return staged, [
            pair
            for j in range(self._num_chunks)
            for pair in self._pairs(j, staged.send_buffer(j), layout)
        ]

    def _pairs(
        self, j: int, flat: Tensor, layout: HeadMajorLayout
    ) -> list[tuple[HostSlot, Tensor]]:
        """The slots of chunk j, each with its part of ``flat``, which is chunk j of ``layout``."""
        blocks = layout.even_blocks(j)
        parts = flat.split([each.numel() for each in blocks])
        views = (part.view(each) for part, each in zip(parts, blocks, strict=True))
        return list(zip(self._slots[j], views, strict=True))


def _wait(copies: Sequence[Copy]) -> None:
    for copy in copies:
        copy.wait()
