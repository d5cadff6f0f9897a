"""What a rank holds of the training state, whatever holds it: the seam for sharding modes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_untied.sharding.boxes import Box

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's, one value a weight each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What this rank holds of one parameter, alive: writing into it changes the training state."""

    name: str
    boxes: tuple[Box, ...]
    """Boxes of the tensor-parallel rank's parameter, whose elements lie one box after the other in
    every tensor below."""
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

    def publish(self) -> None:
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
            whole = Box((0,) * parameter.dim(), tuple(parameter.shape))
            yield Shard(name=name, boxes=(whole,), value=parameter.detach(), moments={})

    def step(self) -> None:
        """Nothing counts."""

    def set_step(self, step: int) -> None:
        """There is nothing to count."""
        raise AssertionError("no optimizer, no step")

    def publish(self) -> None:
        """Nothing to copy: the values are the parameters."""
