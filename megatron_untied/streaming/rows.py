"""A layer's input [rows, b, m], read tile by tile from the device or the host."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from megatron_untied.streaming.host_arena import HostSlot
from megatron_untied.tiling import Tile


class Rows(ABC):
    """A tensor [rows, b, m] that may not fit on the device: its tiles do."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    host_slot: HostSlot | None
    """Their host memory; None if they are on the device."""

    @abstractmethod
    def tiles(self, tiles: Sequence[Tile]) -> Iterator[Tensor]:
        """The local rows of each tile, [rows of the tile, b, m]; valid until the next is taken."""

    @abstractmethod
    def release(self) -> None:
        """Free host memory; call it after the last read."""


class DeviceRows(Rows):
    """Rows of a tensor that is on the device."""

    host_slot = None

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device

    @override
    def tiles(self, tiles: Sequence[Tile]) -> Iterator[Tensor]:
        return (self.tensor[tile.local] for tile in tiles)  # views

    @override
    def release(self) -> None:
        pass  # freed with the last reference
