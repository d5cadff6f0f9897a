"""The residual between layers, and its gradient: on the device, or on the host and read by tiles.

Autograd passes tensors. A residual on the host is passed as a *stand-in* of its shape, dtype and
device that has one element of memory, NaN, and carries the rows. So whatever reads a stand-in as
if it were data gets NaN, and writing to it is an error.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_untied.tiling import Tile


class Rows:
    """A residual [rows, b, m] or its gradient, read and written tile by tile. On the device here.

    :class:`.streaming.host_tensors.HostRows` is the same on the host.
    """

    is_on_host = False
    host_slots: Sequence = ()
    """The host memory of the rows: of a type that :class:`.streaming.host_tensors.HostRows` has."""

    def __init__(self, tensor: Tensor):
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self._tensor = tensor

    @staticmethod
    def of(tensor: Tensor) -> "Rows":
        """The rows on the host that ``tensor`` stands in for, else those of ``tensor`` itself."""
        # Views and aliases, such as those of FSDP2, share the storage.
        return getattr(tensor.untyped_storage(), "rows", None) or Rows(tensor)

    def as_tensor(self) -> Tensor:
        """What autograd passes on: the memory itself, or a stand-in."""
        return self._tensor

    def flat(self) -> "Rows":
        """The same rows without the dimension of the samples, [rows * b, m]."""
        return Rows(self._tensor.view(-1, self.shape[-1]))

    def on_device(self) -> Tensor:
        """A copy of all rows on the device, [rows, b, m]."""
        return self._tensor.clone()

    def tiles(self, tiles: Sequence[Tile], memory: str = "row_tiles") -> Iterator[Tensor]:
        """The local rows of each tile, [rows of the tile, b, m]; valid until the next is taken.

        Rows on the device are views. For rows on the host the next tile is in flight; all layers
        share the device ``memory`` of two tiles: only one iteration over it may be under way.
        """
        del memory
        # Transposed from [1, n, m], the dimension of the samples keeps a stride of n * m, for which
        # torch runs a product as a batch of vectors, three times slower: the view has none.
        rows = self._tensor.view(self.shape)
        return (rows[tile.local] for tile in tiles)

    def outputs(self, tiles: Sequence[Tile]) -> Iterator[Tensor]:
        """Memory to write each tile into, complete when the next is taken.

        For rows on the host that is device memory in turns: the tile before is on its way to the
        host. Exhaust the iterator (``zip`` with ``strict=True`` does): the last one goes then.
        """
        return self.tiles(tiles)

    def updates(
        self, tiles: Sequence[Tile], into: "Rows", memory: str = "row_tiles"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tile with the memory to write its successor into, which goes to ``into``.

        Both may be the same memory: read a tile before writing. Rules are those of :meth:`outputs`;
        ``into`` may be these rows.
        """
        return zip(self.tiles(tiles, memory), into.outputs(tiles), strict=True)

    def release(self) -> None:
        """Free host memory; call it after the last read. The device's goes with its last use."""


def stand_in(rows: Rows) -> Tensor:
    """A new tensor that carries ``rows`` through autograd; see the head of the module."""
    element = torch.full((1,), torch.nan, dtype=rows.dtype, device=rows.device)
    tensor = element.expand(rows.shape).detach()  # not a view: autograd refuses some uses of those
    # torch keeps the Python object of a storage as long as the storage lives.
    tensor.untyped_storage().rows = rows
    return tensor
