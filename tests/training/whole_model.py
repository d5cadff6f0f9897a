"""A train_state's gradients and training state put together from all ranks, by global parameter."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_untied.training.state import TrainState
from tests.small_run import gather, gather_state

__all__ = ["gather_gradients", "gather_state"]


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
        elif parameter.requires_grad:
            held[name] = layout, layout.global_slices(parameter.main_grad)
    return gather(held)
