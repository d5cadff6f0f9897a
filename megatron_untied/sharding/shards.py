"""This rank's part of the training state, in one form for every kind of sharding.

Checkpoints and initial weights read and write the state only through these classes. The one for
megatron-core's optimizers is in ``zero1.py``.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from megatron_untied.sharding.tensor_slice import TensorSlice

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's moments, each of one value per weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """This rank's part of one parameter; writing to its tensors changes the training state."""

    name: str
    slices: tuple[TensorSlice, ...]
    """Slices of the tensor-parallel rank's parameter. Every tensor below holds their elements, one
    slice after the other."""
    value: Tensor
    """fp32 main value; the parameter itself if it is frozen, or where there is no optimizer."""
    moments: dict[str, Tensor]
    """``exp_avg`` and ``exp_avg_sq``, fp32; empty where they were not asked for, and of a frozen
    parameter."""


class Shards(Protocol):
    """This rank's part of a bare model's weights and of their optimizer's state."""

    has_moments: bool
    """Whether there is an optimizer."""

    def shards(self, *, with_moments: bool) -> Iterator[Shard]:
        """Each parameter that this rank holds a part of; creates moments that do not exist yet."""

    def step(self) -> int | None:
        """Updates done so far, the same for every parameter; None without an optimizer."""

    def set_step(self, step: int) -> None:
        """Continue after ``step`` updates, once there are moments."""

    def sync_model_params(self) -> None:
        """Make the model compute with the values written to shards; collective over all ranks."""

    def working_copies(self) -> Iterable[tuple[str, Tensor]]:
        """Whole parameters of this tensor-parallel rank that forward reads, by name.

        None where they are gathered for each use, or are the shards' values themselves.
        """
        return ()


class ModelShards(Shards):
    """A bare model without an optimizer, for evaluation and conversion.

    There is no step to count, and the values are the parameters themselves: ``step`` and
    ``sync_model_params`` are those of :class:`Shards`, which do nothing.
    """

    has_moments = False

    def __init__(self, model: torch.nn.Module):
        self._model = model

    @override
    def shards(self, *, with_moments: bool) -> Iterator[Shard]:
        assert not with_moments, "no optimizer, no moments"
        for name, parameter in self._model.named_parameters():
            whole = TensorSlice((0,) * parameter.dim(), tuple(parameter.shape))
            yield Shard(name=name, slices=(whole,), value=parameter.detach(), moments={})

    @override
    def set_step(self, step: int) -> None:
        raise AssertionError("no optimizer, no step")


class RowShards(Shards):
    """A model after ``fsdp.shard_model``, and the Adam of its parameters if it is trained."""

    def __init__(self, model: nn.Module, adam: torch.optim.Adam | None, group: ProcessGroup):
        """``group``: the ranks that share the rows. ``adam`` must have its moments already."""
        self._model, self._adam, self._group = model, adam, group
        self.has_moments = adam is not None
        # Stored now: while weights are gathered, the model's parameters are other tensors.
        self._parameters = dict(model.named_parameters())

    @override
    @torch.no_grad()
    def shards(self, *, with_moments: bool) -> Iterator[Shard]:
        for name, parameter in self._parameters.items():
            rows = parameter.to_local()  # [rows of this rank, ...]
            # FSDP2 splits dimension 0 as torch.chunk does: the last ranks may have no rows.
            start = self._group.rank() * -(-parameter.size(0) // self._group.size())
            place = TensorSlice((start, *(0,) * (rows.dim() - 1)), tuple(rows.shape))
            # A frozen parameter is not in the dictionary.
            state = self._adam.state.get(parameter, {}) if with_moments else {}
            yield Shard(
                name=name,
                slices=(place,) if rows.numel() else (),
                value=rows,
                moments={key: state[key].to_local() for key in MOMENTS if state},
            )

    @override
    def step(self) -> int | None:
        return int(next(iter(self._adam.state.values()))["step"]) if self._adam else None

    @override
    def set_step(self, step: int) -> None:
        for state in self._adam.state.values():
            state["step"].fill_(step)

    @override
    def sync_model_params(self) -> None:
        # Frees gathered weights, which are stale now; the next forward gathers the new rows.
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
