"""A learner's gradients and training state put together from all ranks, by global parameter."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_untied.training.state import Learner
from tests.small_run import gather, gather_state

__all__ = ["gather_gradients", "gather_state"]


@torch.no_grad()
def gather_gradients(learner: Learner) -> dict[str, Tensor]:
    """The gradient of every trained parameter, after the step; collective over all ranks."""
    shards = {shard.name: shard for shard in learner.state.shards.shards(with_moments=False)}
    held = {}
    for name, parameter in getattr(learner.model, "module", learner.model).named_parameters():
        layout = learner.state.layouts[name]
        if isinstance(parameter.grad, DTensor):
            rows = parameter.grad.to_local()
            held[name] = layout, layout.pieces(rows, shards[name].boxes)
        elif parameter.requires_grad:
            held[name] = layout, layout.pieces(parameter.main_grad)
    return gather(held)
