"""Run token-wise functions of a layer tile by tile, and their backward."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_untied.dtypes import widened
from megatron_untied.phases import MemoryCategory, allocating


@dataclass(frozen=True, slots=True)
class Tile:
    """Some tokens: their rows in the residual and in the tensors of attention.

    With sequence parallelism a rank holds n/t tokens of the residual, and attention all n: a tile
    is gathered over the t tensor-parallel ranks, so its tokens are t runs of rows.
    """

    local: slice
    """Rows of the residual on this rank, [n, b, m] or [n/t, b, m]."""
    seen: tuple[slice, ...]
    """Rows of [n, b, heads, d], in the order of a gathered tile."""


def tiles_of(num_local: int, tile_size: int, num_gathered: int = 1) -> list[Tile]:
    """Split ``num_local`` rows into tiles of at most ``tile_size`` rows after gathering.

    Each of the ``num_gathered`` ranks contributes its share of ``tile_size``, at least one row.
    """
    step = max(1, tile_size // num_gathered)
    tiles = []
    for start in range(0, num_local, step):
        stop = min(start + step, num_local)
        offsets = [rank * num_local for rank in range(num_gathered)]
        seen = tuple(slice(start + offset, stop + offset) for offset in offsets)
        tiles.append(Tile(slice(start, stop), seen))
    return tiles


class GradientSums:
    """Gradients of a layer's parameters, summed over tiles in at least fp32.

    bf16 sums over many tiles have a relative error of 7e-3, fp32 sums of bf16 products 1.7e-3.
    """

    def __init__(self, module: nn.Module):
        self.trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._names = [name for name, _ in module.named_parameters()]
        self._sums: dict[str, Tensor] = {}

    def names(self, prefixes: Sequence[str]) -> list[str]:
        """Trained parameters whose names start with one of ``prefixes``."""
        return [name for name in self.trained if name.startswith(tuple(prefixes))]

    def add(self, name: str, gradient: Tensor) -> None:
        """Add one tile's gradient, of the parameter's shape."""
        if name in self._sums:
            self._sums[name] += gradient
        else:
            with allocating(MemoryCategory.WEIGHT_GRADIENTS):
                self._sums[name] = widened(gradient)  # without a copy if it is wide already

    def in_order(self) -> list[Tensor | None]:
        """One gradient for each parameter of the module, None where it is frozen."""
        return [self._sums.get(name) for name in self._names]


def tile_backward(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    module: nn.Module,
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    sums: GradientSums,
    names: Sequence[str],
) -> list[Tensor]:
    """Gradients of ``inputs`` through ``function(module, *inputs)`` on one tile.

    The function is recomputed. Gradients of the parameters ``names`` are added to ``sums``. The
    module's own parameters are replaced by leaves, so hooks on them (FSDP2, DDP) see no tile.
    """
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        # Leaves of their own: gradient hooks of the parameters would fire once per tile.
        weights = {name: sums.trained[name].detach().requires_grad_() for name in names}
        call = _Call(module, function)
        replaced = {f"module.{name}": weight for name, weight in weights.items()}
        outputs = torch.func.functional_call(call, replaced, tuple(leaves))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    found = torch.autograd.grad(outputs, [*leaves, *weights.values()], list(gradients))
    for name, gradient in zip(weights, found[len(leaves) :], strict=True):
        sums.add(name, gradient)
    return list(found[: len(leaves)])


class _Call(nn.Module):
    """A function of a module as a module, which functional_call requires."""

    def __init__(self, module: nn.Module, function: Callable):
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(self.module, *args)


def rows_of(x: Tensor, rows: Sequence[slice]) -> Tensor:
    """Several runs of rows of ``x``, concatenated: [t, ...]; a view if there is one run."""
    return x[rows[0]] if len(rows) == 1 else torch.cat([x[run] for run in rows])


def split_rows(x: Tensor, rows: Sequence[slice]) -> Iterator[tuple[slice, Tensor]]:
    """The inverse of :func:`rows_of`: each run with its part of ``x``."""
    start = 0
    for run in rows:
        size = run.stop - run.start
        yield run, x[start : start + size]
        start += size
