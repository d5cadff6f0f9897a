"""Initial weights that depend on the seed and the parameter's name, never on the sharding."""

import hashlib
import math
from collections.abc import Iterable, Mapping

import torch
from torch.distributed import ProcessGroup

from megatron_untied.config import ModelConfig
from megatron_untied.sharding.parameter_layout import (
    GlobalSlice,
    ParameterLayout,
    parameter_layouts,
)
from megatron_untied.sharding.shards import ModelShards, Shards

BLOCK_ELEMENTS = 1 << 20
"""Elements drawn at a time, in fp32 on the host: 4 MiB. Another value gives other weights."""


def initialize_weights(
    model: torch.nn.Module, model_config: ModelConfig, seed: int, tp_group: ProcessGroup
) -> None:
    """Fill every parameter of a bare model: the same model at every tensor-parallel size.

    Megatron's distribution: normal(0, init_method_std), output projections narrower by
    sqrt(2 num_layers), norm weights 1, biases 0. Of adapters B is 0 and A normal(0, 1 / sqrt(3 m))
    for m inputs. Rows of vocabulary padding are 0. Numbers are drawn on the host, so the device
    does not matter either.
    """
    layouts = parameter_layouts(
        model, model_config, tp_rank=tp_group.rank(), tp_size=tp_group.size()
    )
    initialize_shards(ModelShards(model), layouts, model_config, seed)


@torch.no_grad()
def initialize_shards(
    shards: Shards, layouts: Mapping[str, ParameterLayout], model_config: ModelConfig, seed: int
) -> None:
    """Fill this rank's part of every parameter; see :func:`initialize_weights`."""
    for shard in shards.shards(with_moments=False):
        shard.value.zero_()  # vocabulary padding, which no global slice covers, stays 0
        layout = layouts[shard.name]
        fill_slices(layout.global_slices(shard.value, shard.slices), layout, model_config, seed)


def fill_slices(
    slices: Iterable[GlobalSlice], layout: ParameterLayout, model_config: ModelConfig, seed: int
) -> None:
    """Write initial values into the slices of one parameter that this rank holds."""
    if layout.name.endswith(("bias", "lora_B")):  # an adapter begins without an effect
        std, mean = 0.0, 0.0
    elif layout.name.endswith("lora_A"):  # the variance of PEFT's uniform numbers
        std, mean = math.sqrt(1 / (3 * layout.global_shape[1])), 0.0
    elif len(layout.global_shape) == 1:  # a norm
        std, mean = 0.0, 1.0
    else:
        std, mean = model_config.init_method_std, 0.0
        if layout.name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            # These add to the residual, twice per layer: its variance stays bounded with depth.
            std /= math.sqrt(2 * model_config.num_layers)
    for part in slices:
        if std:
            _draw(part, layout, std, seed)
        else:
            part.tensor.fill_(mean)


def _draw(part: GlobalSlice, layout: ParameterLayout, std: float, seed: int) -> None:
    """Fill a slice of a matrix, one block of global rows at a time.

    Each block has a generator of its own, so a rank draws only the blocks of its own rows.
    """
    rows, columns = layout.global_shape
    block_rows = max(1, BLOCK_ELEMENTS // columns)
    first, stop = part.offsets[0], part.offsets[0] + part.tensor.size(0)
    for block in range(first // block_rows, -(-stop // block_rows)):
        start = block * block_rows
        # Python's own hash of a string differs between processes.
        digest = hashlib.sha256(f"{seed}/{layout.name}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        shape = min(block_rows, rows - start), columns
        values = torch.randn(shape, generator=generator) * std
        low, high = max(first, start), min(stop, start + values.size(0))
        left = part.offsets[1]
        held = values[low - start : high - start, left : left + part.tensor.size(1)]
        part.tensor[low - first : high - first].copy_(held)
