"""A fully sharded model and its Adam, as checkpoints and initial weights see them: by rows."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from megatron_untied.sharding.boxes import Box
from megatron_untied.sharding.shards import MOMENTS, Shard


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
                boxes=self._boxes(parameter, rows),
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

    def publish(self) -> None:
        """Drop what is gathered: the next forward gathers the rows as they are now."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _boxes(self, parameter: Tensor, rows: Tensor) -> tuple[Box, ...]:
        """Where ``rows`` lie in the parameter, which is cut as ``torch.chunk`` does it."""
        if not rows.numel():
            return ()
        start = self._group.rank() * -(-parameter.size(0) // self._group.size())
        return (Box((start, *(0,) * (rows.dim() - 1)), tuple(rows.shape)),)
