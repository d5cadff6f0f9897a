"""Compares what backward recomputes with what forward computed: ``--verify-recompute``.

A streamed layer saves its input and perhaps its attention output, on the device or the host, and
backward computes the rest again. In a verified step forward takes checksums of each layer's input,
attention output and output; before its own backward the layer is computed again from what was
saved, tile by tile, and the checksums have to be the same. The same kernels run on the same tiles,
so there is no tolerance.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron_untied.context_parallel.exchange import HeadChunks
from megatron_untied.dtypes import CHECKSUM_FACTOR, bit_checksum
from megatron_untied.residual import Rows
from megatron_untied.streaming.projections import attention_and_mlp
from megatron_untied.tiling import Tile

VERIFIED = ("input", "attention output", "output")


@dataclass(slots=True, eq=False)
class ReplayCheck:
    """Of the layers of one model; inactive, it costs nothing."""

    active: bool = False
    """Set before the forward of a step that is to be verified."""
    _compared: list[tuple[int, Tensor]] = field(default_factory=list)

    def begin(self, *, active: bool) -> None:
        """Forget the last step, and verify the next one if ``active``."""
        self.active, self._compared = active, []

    def replay(
        self, layer: nn.Module, x: Rows, out: HeadChunks, tiles: Sequence[Tile], forward: Tensor
    ) -> None:
        """Compute the output of ``layer`` again and compare it with that of ``forward``.

        Collective over the ranks that share the layer. Costs the part of the layer after attention
        once more; nothing is read on the host.

        Args:
            layer: the streamed layer whose backward comes next.
            x: its input as backward has it, [n, b, m].
            out: its attention output as backward has it, [n, b, h, d].
            tiles: of x.
            forward: what :func:`layer_checksums` returned in forward.
        """
        outputs = (
            torch.add(*attention_and_mlp(layer, x_tile, out.rows(tile.seen))).to(x.dtype)
            for tile, x_tile in zip(tiles, x.tiles(tiles), strict=True)
        )
        again = layer_checksums(row_checksum(x, tiles), out, outputs, tiles)
        self._compared.append((layer.layer_number - 1, again != forward))

    def differs(self, device: torch.device) -> Tensor:
        """Whether anything differed on this rank since :meth:`begin`: bool [] on ``device``."""
        flags = [flag.any() for _, flag in self._compared]
        return torch.stack(flags).any() if flags else torch.zeros((), dtype=bool, device=device)

    def differences(self) -> list[str]:
        """What differed on this rank, in the order of backward; waits for the device."""
        return [
            f"{name} of layer {index + 1}"
            for index, flags in self._compared
            for name, differs in zip(VERIFIED, flags.tolist(), strict=True)
            if differs
        ]


def layer_checksums(
    x_checksum: Tensor, out: HeadChunks, outputs: Iterable[Tensor], tiles: Sequence[Tile]
) -> Tensor:
    """Checksums in the order of ``VERIFIED``: int64 [3].

    Args:
        x_checksum: :func:`row_checksum` of the input, taken before the output overwrites it.
        out: attention output, [n, b, h, d].
        outputs: the layer's output by tiles, [t, b, m] each.
        tiles: of the layer.
    """
    sums = torch.zeros(2, dtype=torch.int64, device=x_checksum.device)
    for tile, y in zip(tiles, outputs, strict=True):
        pair = torch.stack([bit_checksum(out.rows(tile.seen)), bit_checksum(y)])
        sums = sums * CHECKSUM_FACTOR + pair
    return torch.cat([x_checksum[None], sums])


def row_checksum(x: Rows, tiles: Sequence[Tile]) -> Tensor:
    """Checksum of a residual [n, b, m], on the device or the host: int64 []."""
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in x.tiles(tiles):
        total = total * CHECKSUM_FACTOR + bit_checksum(part)
    return total
