"""What a rank holds of the training state, whatever holds it: the seam for sharding modes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from megatron_untied.sharding.tensor_slice import TensorSlice

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's, one value a weight each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What this rank holds of one parameter, alive: writing into it changes the training state."""

    name: str
    slices: tuple[TensorSlice, ...]
    """Slices of the tensor-parallel rank's parameter. Every tensor below holds their elements, one
    slice after the other."""
    value: Tensor
    """fp32 main value; the parameter itself where there is no optimizer."""
    moments: dict[str, Tensor]
    """``exp_avg`` and ``exp_avg_sq``, fp32; empty where they were not asked for."""


class Shards(Protocol):
    """All that a rank holds of a bare model's weights and of their optimizer's state."""

    has_moments: bool
    """Whether anything is trained."""

    def shards(self, *, with_moments: bool) -> Iterator[Shard]:
        """Every parameter that this rank holds a part of; makes moments that do not exist yet."""

    def step(self) -> int | None:
        """Updates done so far, the same for every parameter; None where nothing is trained."""

    def set_step(self, step: int) -> None:
        """Continue after ``step`` updates, once there are moments."""

    def sync_model_params(self) -> None:
        """Make the model compute with values that were written; collective over all ranks."""


class ModelShards:
    """A bare model without an optimizer, for evaluation and conversion."""

    has_moments = False

    def __init__(self, model: torch.nn.Module):
        self._model = model

    def shards(self, *, with_moments: bool) -> Iterator[Shard]:
        """Every parameter, itself."""
        assert not with_moments, "no optimizer, no moments"
        for name, parameter in self._model.named_parameters():
            whole = TensorSlice((0,) * parameter.dim(), tuple(parameter.shape))
            yield Shard(name=name, slices=(whole,), value=parameter.detach(), moments={})

    def step(self) -> None:
        """Nothing counts."""

    def set_step(self, step: int) -> None:
        """There is nothing to count."""
        raise AssertionError("no optimizer, no step")

    def sync_model_params(self) -> None:
        """Nothing to copy: the values are the parameters."""


class RowShards:
    """A model after ``fsdp.shard_model`` and the Adam of its trained parameters."""

    has_moments = True

    def __init__(self, model: nn.Module, adam: torch.optim.Adam, group: ProcessGroup):
        """``group``: the ranks that share the rows; ``adam`` has its moments already."""
        self._model, self._adam, self._group = model, adam, group
        # Now: while weights are gathered, the model's parameters are other tensors.
        self._parameters = dict(model.named_parameters())

    @torch.no_grad()
    def shards(self, *, with_moments: bool) -> Iterator[Shard]:
        """This rank's rows of every parameter. Moments of a frozen one are zeros made for it."""
        for name, parameter in self._parameters.items():
            rows = parameter.to_local()
            state = self._adam.state.get(parameter) if with_moments else None
            yield Shard(
                name=name,
                slices=self._boxes(parameter, rows),
                value=rows,
                moments={
                    moment: state[moment].to_local() if state else torch.zeros_like(rows)
                    for moment in MOMENTS
                    if with_moments
                },
            )

    def step(self) -> int:
        """Updates done so far, the same for every parameter."""
        return int(next(iter(self._adam.state.values()))["step"])

    def set_step(self, step: int) -> None:
        """Continue after ``step`` updates."""
        for state in self._adam.state.values():
            state["step"].fill_(step)

    def sync_model_params(self) -> None:
        """Drop what is gathered: the next forward gathers the rows as they are now."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _boxes(self, parameter: Tensor, rows: Tensor) -> tuple[TensorSlice, ...]:
        """Where ``rows`` lie in the parameter, which is cut as ``torch.chunk`` does it."""
        if not rows.numel():
            return ()
        start = self._group.rank() * -(-parameter.size(0) // self._group.size())
        return (TensorSlice((start, *(0,) * (rows.dim() - 1)), tuple(rows.shape)),)
