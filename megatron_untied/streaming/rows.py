"""[rows, b, m] that is read tile by tile: a layer's input, wherever it is."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from megatron_untied.streaming.host_arena import HostSlot
from megatron_untied.tiling import Tile


class Rows(ABC):
    """Rows that come tile by tile, on the device."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    host_slot: HostSlot | None
    """Where they are on the host; None if they are on the device."""

    @abstractmethod
    def tiles(self, tiles: Sequence[Tile]) -> Iterator[Tensor]:
        """The local rows of each tile; one is valid until the next is asked for."""

    @abstractmethod
    def release(self) -> None:
        """Has to be called after the last read."""


class DeviceRows(Rows):
    """Rows of a tensor that is on the device."""

    host_slot = None

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device

    @override
    def tiles(self, tiles: Sequence[Tile]) -> Iterator[Tensor]:
        return (self.tensor[tile.local] for tile in tiles)

    @override
    def release(self) -> None:
        pass
