"""What is left to do with gradients that lie on many ranks: add up, measure, clip."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_untied.platform import device


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallelCopies:
    """Names of parameters that every tensor-parallel rank holds all of."""

    names: frozenset[str]
    partial: frozenset[str]
    """Those of whose gradient each rank has a part only: it saw its tokens or its heads."""

    @classmethod
    def of(cls, model: nn.Module) -> "TensorParallelCopies":
        """Reads megatron-core's marks, which sharding drops: ``model`` is bare."""
        names = {
            name: parameter
            for name, parameter in model.named_parameters()
            if not getattr(parameter, "tensor_model_parallel", False)
        }
        partial = (
            name
            for name, parameter in names.items()
            if getattr(parameter, "sequence_parallel", False)
            or "q_layernorm" in name
            or "k_layernorm" in name
        )
        return cls(names=frozenset(names), partial=frozenset(partial))


def add_up_(gradients: Sequence[Tensor], group: ProcessGroup) -> None:
    """Sum each gradient over ``group``, in one exchange; they may be on the host."""
    if not gradients or group.size() == 1:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients]).to(device.current_device())
    dist.all_reduce(flat, group=group)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def global_norm(gradients: Sequence[Tensor], groups: Sequence[ProcessGroup]) -> Tensor:
    """L2 norm, fp64 [], of what lies on the ranks of ``groups``, each element on one of them."""
    squares = torch.zeros((), dtype=torch.float64, device=device.current_device())
    if gradients:
        norms = torch.stack(torch._foreach_norm(gradients))
        squares += norms.double().square().sum().to(squares.device)
    for group in groups:
        dist.all_reduce(squares, group=group)
    return squares.sqrt()


def clip_(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Scale gradients of norm ``norm`` down to ``limit`` (0 is none), in Megatron's way."""
    if gradients and limit:
        # Multiplied whatever it is: to ask would make the host wait for the device.
        scale = (limit / (norm + 1e-6)).clamp(max=1.0).to(gradients[0])
        torch._foreach_mul_(gradients, scale)
