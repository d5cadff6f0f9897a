"""Low-rank adapters (LoRA, arXiv:2106.09685) for megatron-core's slots of linear layers.

``y = x W^T + alpha / r (x A^T) B^T``, unmerged as in PEFT: a change of B that is below the
resolution of a bf16 weight is not lost. Beside its output a linear layer with adapters allocates
[t, r] for t tokens. The streamed layer projects q, k and v of a chunk of heads with the rows of B
that belong to them.

Over tensor-parallel ranks A is whole and B is cut with the rows of a column-parallel weight; A is
cut with the columns of a row-parallel one and B is whole. The ranks exchange [t, r] values, not
activations.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_untied.config.parameters import AdaptationConfig
from megatron_untied.dtypes import accumulation_dtype
from megatron_untied.matmul import add_product_

Rows = Mapping[str, Sequence[range]]
"""By target, its rows of the weight on this rank in the order of the target's own matrix."""


def adapted(
    linear: type[nn.Module], rows: Rows, adaptation: AdaptationConfig
) -> type[nn.Module] | ModuleSpec:
    """``linear`` for a slot, with adapters for the targets among ``rows`` that have one."""
    chosen = {target: rows[target] for target in adaptation.targets(*rows)}
    if not chosen:
        return linear
    kinds = {
        ColumnParallelLinear: AdaptedColumnParallelLinear,
        RowParallelLinear: AdaptedRowParallelLinear,
    }
    return ModuleSpec(module=kinds[linear], params={"rows": chosen, "adaptation": adaptation})


class Adapter(nn.Module):
    """A and B of one target on one rank."""

    def __init__(
        self,
        input_size: int,
        rows: Sequence[range],
        adaptation: AdaptationConfig,
        config: TransformerConfig,
        *,
        split: str,
    ):
        """Uninitialized. ``split``: which of the two is cut over tensor-parallel ranks."""
        super().__init__()
        self.rows, self.scale = tuple(rows), adaptation.lora_alpha / adaptation.lora_rank
        shapes = {
            "lora_A": (adaptation.lora_rank, input_size),
            "lora_B": (sum(map(len, rows)), adaptation.lora_rank),
        }
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            is_split = name == split
            dim = 0 if name == "lora_B" else 1
            set_tensor_model_parallel_attributes(parameter, is_split, dim if is_split else -1, 1)
            # With sequence parallelism each rank has the gradient of its own tokens only.
            parameter.sequence_parallel = config.sequence_parallel and not is_split
            self.register_parameter(name, parameter)


class _Adapted(nn.Module):
    """What both linear layers of megatron-core have with adapters; it comes before theirs."""

    split: ClassVar[str]
    """The matrix of an adapter that is cut over tensor-parallel ranks, as the layer's is."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        rows: Rows,
        adaptation: AdaptationConfig,
        **arguments: object,
    ):
        """``arguments``: megatron-core's other ones."""
        super().__init__(input_size, output_size, config=config, **arguments)
        width = self.weight.shape[1]  # of the input on this rank
        self.adapters = nn.ModuleDict(
            {
                target: Adapter(width, its, adaptation, config, split=self.split)
                for target, its in rows.items()
            }
        )


class AdaptedColumnParallelLinear(_Adapted, ColumnParallelLinear):
    """Megatron-core's layer, whose output the adapters add to in place."""

    split = "lora_B"

    def forward(self, input_: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor | None]:
        """[n, b, m] or [n/t, b, m] -> [n, b, rows], and the bias if the caller adds it."""
        y, bias = super().forward(input_, *args, **kwargs)
        adapters = self.adapters.values()
        # In one product: the gradient of the input is then made once, not for each target.
        z = F.linear(input_, torch.cat([each.lora_A for each in adapters]))  # [n or n/t, b, all r]
        z = _for_all_rows(z, self.tp_group, self.sequence_parallel)
        for adapter, its in zip(adapters, z.chunk(len(adapters), -1), strict=True):
            y = AddLowRank.apply(y, its, adapter.lora_B, adapter.scale, adapter.rows)
        return y, bias


class AdaptedRowParallelLinear(_Adapted, RowParallelLinear):
    """Megatron-core's layer, plus the output of its adapter."""

    split = "lora_A"

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[n, b, columns of this rank] -> [n, b, m] or [n/t, b, m], and the bias."""
        y, bias = super().forward(input_)
        for adapter in self.adapters.values():
            z = F.linear(input_, adapter.lora_A)  # [n, b, r], this rank's part of the sum
            z = _summed(z, self.tp_group, self.sequence_parallel)
            # Not in place: with one rank megatron-core returns a view that autograd protects.
            flat = torch.addmm(
                y.flatten(0, 1), z.flatten(0, 1), adapter.lora_B.t(), alpha=adapter.scale
            )
            y = flat.view_as(y)
        return y, bias


class AddLowRank(torch.autograd.Function):
    """``y[..., rows] += scale * z b^T`` in place.

    The backward of the same with slices of y would copy y's whole gradient for each of them.
    """

    @staticmethod
    def forward(ctx, y: Tensor, z: Tensor, b: Tensor, scale: float, rows: Sequence[range]):
        """``y`` [..., all rows], z [..., r], b [rows, r]."""
        add_low_rank_(y, z, b, scale, rows)
        ctx.mark_dirty(y)
        ctx.save_for_backward(z, b)
        ctx.scale, ctx.rows = scale, rows
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor):
        """The gradient of y as it came, and those of z and b."""
        z, b = ctx.saved_tensors
        flat, flat_z = gradient.flatten(0, -2), z.reshape(-1, z.shape[-1])
        # Several runs of rows add to it: fp32, so that no sum is rounded on the way.
        d_z = torch.zeros_like(flat_z, dtype=accumulation_dtype(z.dtype))
        d_b, start = torch.empty_like(b), 0
        for run in ctx.rows:
            part, its = flat[:, run.start : run.stop], slice(start, start + len(run))
            add_product_(d_z, part, b[its])
            torch.mm(part.t(), flat_z, out=d_b[its])
            start += len(run)
        d_z = d_z.mul_(ctx.scale).to(z.dtype).view_as(z)
        return gradient, d_z, d_b.mul_(ctx.scale), None, None


def add_low_rank_(
    y: Tensor, z: Tensor, b: Tensor, scale: float, rows: Sequence[range] | None = None
) -> None:
    """``y[..., rows] += scale * z b^T``: y [..., all rows], z [..., r], b [rows, r].

    ``rows`` are all of y's by default.
    """
    flat, flat_z, start = y.view(-1, y.shape[-1]), z.reshape(-1, z.shape[-1]), 0
    for run in rows or (range(y.shape[-1]),):
        stop = start + len(run)
        flat[:, run.start : run.stop].addmm_(flat_z, b[start:stop].t(), alpha=scale)
        start = stop


def _for_all_rows(z: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Values that each rank multiplies by its own rows: their gradient is a sum over ranks."""
    if group.size() == 1:
        return z
    if sequence_parallel:
        return mappings.gather_from_sequence_parallel_region(z, group=group)
    return mappings.copy_to_tensor_model_parallel_region(z, group=group)


def _summed(z: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """The sum over ranks; with sequence parallelism of this rank's tokens."""
    if group.size() == 1:
        return z
    if sequence_parallel:
        return mappings.reduce_scatter_to_sequence_parallel_region(z, group=group)
    return mappings.reduce_from_tensor_model_parallel_region(z, group=group)
