"""Initial weights that depend on the seed and the parameter's name, never on the sharding."""

import hashlib
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_untied.config import ModelConfig
from megatron_untied.sharding.parameter_layout import (
    GlobalSlice,
    ParameterLayout,
    parameter_layouts,
)
from megatron_untied.sharding.shards import ModelShards, Shards

BLOCK_ELEMENTS = 1 << 20
"""Elements drawn at a time, in fp32 on the host: 4 MiB. Part of the definition of the weights."""


def initialize_weights(
    model: torch.nn.Module, model_config: ModelConfig, seed: int, tp_group: ProcessGroup
) -> None:
    """Fill every parameter of a bare model: the same model at every tensor-parallel size.

    Megatron's distribution: normal(0, init_method_std), output projections narrower by
    sqrt(2 num_layers), norm weights 1, biases 0. Rows of vocabulary padding are 0. Numbers are
    drawn on the host, so the device does not matter either.
    """
    layouts = parameter_layouts(
        model, model_config, tp_rank=tp_group.rank(), tp_size=tp_group.size()
    )
    initialize_shards(ModelShards(model), layouts, model_config, seed)


@torch.no_grad()
def initialize_shards(
    shards: Shards, layouts: Mapping[str, ParameterLayout], model_config: ModelConfig, seed: int
) -> None:
    """Fill what this rank holds of every parameter with its part of the same model."""
    for shard in shards.shards(with_moments=False):
        shard.value.zero_()
        layout = layouts[shard.name]
        fill_slices(layout.global_slices(shard.value, shard.slices), layout, model_config, seed)


def fill_slices(
    slices: Iterable[GlobalSlice], layout: ParameterLayout, model_config: ModelConfig, seed: int
) -> None:
    """Write a parameter's initial values into the slices of it that this rank holds."""
    if layout.name.endswith("bias"):
        std, mean = 0.0, 0.0
    elif len(layout.global_shape) == 1:  # a norm
        std, mean = 0.0, 1.0
    else:
        std, mean = _standard_deviation(layout.name, model_config), 0.0
    for part in slices:
        if std:
            _draw(part, layout, std, seed)
        else:
            part.tensor.fill_(mean)


def _standard_deviation(name: str, config: ModelConfig) -> float:
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return config.init_method_std / math.sqrt(2 * config.num_layers)
    return config.init_method_std


def _draw(part: GlobalSlice, layout: ParameterLayout, std: float, seed: int) -> None:
    """Fill one part of a matrix, a block of global rows at a time.

    Every block has a generator of its own, so a rank draws only the blocks that it has rows of.
    """
    rows, columns = layout.global_shape
    block_rows = max(1, BLOCK_ELEMENTS // columns)
    first, stop = part.offsets[0], part.offsets[0] + part.tensor.size(0)
    for block in range(first // block_rows, -(-stop // block_rows)):
        start = block * block_rows
        values = _block(layout.name, block, seed, (min(block_rows, rows - start), columns)) * std
        low, high = max(first, start), min(stop, start + values.size(0))
        left = part.offsets[1]
        held = values[low - start : high - start, left : left + part.tensor.size(1)]
        part.tensor[low - first : high - first].copy_(held)


def _block(name: str, block: int, seed: int, shape: tuple[int, int]) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.randn(shape, generator=generator)
