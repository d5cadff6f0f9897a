"""Parameters, gradients and training state put together from all ranks, by global parameter."""

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_untied.checkpoint import CheckpointState
from megatron_untied.checkpoint.state import tensors_of
from megatron_untied.sharding.parameter_layout import GlobalSlice, ParameterLayout
from megatron_untied.sharding.tensor_slice import TensorSlice
from megatron_untied.training.state import TrainState


def gather_state(state: CheckpointState) -> dict[str, Tensor]:
    """Main values and moments of the whole model, on every rank; collective over all ranks."""
    held = {}
    for shard in state.shards.shards(with_moments=True):
        layout = state.layouts[shard.name]
        for name, tensor in tensors_of(shard):
            held[name] = layout, layout.global_slices(tensor, shard.slices)
    return gather(held)


def gather_parameters(model: GPTModel, layouts) -> dict[str, Tensor]:
    """The whole model's parameters, on every rank; collective over all ranks."""
    return gather(
        {
            name: (layouts[name], layouts[name].global_slices(p))
            for name, p in model.named_parameters()
        }
    )


@torch.no_grad()
def gather(
    held: dict[str, tuple[ParameterLayout, list[GlobalSlice]]],
) -> dict[str, Tensor]:
    """Put global tensors together from all ranks' slices; what nobody holds is NaN."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, held)
    found = {}
    for theirs in everyone:
        for name, (layout, slices) in theirs.items():
            whole = found.setdefault(name, torch.full(layout.global_shape, torch.nan))
            for part in slices:
                part_of(whole, part).copy_(part.tensor)
    return found


def part_of(whole: Tensor, part: GlobalSlice) -> Tensor:
    """The part of the global tensor where a part lies."""
    return TensorSlice(part.offsets, tuple(part.tensor.shape)).view(whole)


@torch.no_grad()
def gather_gradients(train_state: TrainState) -> dict[str, Tensor]:
    """The gradient of every trained parameter, after the step; collective over all ranks."""
    shards = {
        shard.name: shard
        for shard in train_state.checkpoint_state.shards.shards(with_moments=False)
    }
    held = {}
    for name, parameter in getattr(
        train_state.model, "module", train_state.model
    ).named_parameters():
        layout = train_state.checkpoint_state.layouts[name]
        if isinstance(parameter.grad, DTensor):
            rows = parameter.grad.to_local()
            held[name] = layout, layout.global_slices(rows, shards[name].slices)
        elif parameter.requires_grad and name in shards:
            # A distributed optimizer reduces only the part that it updates.
            slices = shards[name].slices
            owned = torch.cat([part.view(parameter.main_grad).flatten() for part in slices])
            held[name] = layout, layout.global_slices(owned, slices)
    return gather(held)
