"""The one place that reaches into megatron-core's optimizers: which values a rank updates.

Serves the distributed optimizer, whose rank owns a flat range of some parameters, and the plain
ones, where every data-parallel rank holds everything. Checked against megatron-core 0.16.1, whose
own loading loses or shares Adam's step.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    FP32Optimizer,
    MegatronOptimizer,
)
from torch import Tensor

from megatron_untied.sharding.boxes import Box, boxes_of_flat_range
from megatron_untied.sharding.shards import MOMENTS, Shard


class HeldRange(NamedTuple):
    """A flat range of a parameter, from ``start``, and the fp32 values that are updated for it."""

    start: int
    main: Tensor

    def boxes(self, shape: torch.Size) -> tuple[Box, ...]:
        """The range as boxes of the parameter."""
        return tuple(boxes_of_flat_range(shape, self.start, self.start + self.main.numel()))


class OptimizerShards:
    """What a megatron-core Adam, distributed or not, updates of one bare model."""

    has_moments = True

    def __init__(self, optimizer: MegatronOptimizer, model: torch.nn.Module):
        if isinstance(optimizer, ChainedOptimizer):
            (optimizer,) = optimizer.chained_optimizers  # dense parameters are one optimizer's
        self._optimizer, self._model = optimizer, model
        self._held = _main_values(optimizer, model)

    def shards(self, *, with_moments: bool) -> Iterator[Shard]:
        """Every parameter that this rank updates a part of; makes moments that do not exist yet."""
        if with_moments:
            step = self.step()
            self._optimizer.init_state_fn(self._optimizer.optimizer, self._optimizer.config)
            self.set_step(step)  # torch's Adam takes moments without a step for its own
        for name, parameter in self._model.named_parameters():
            if held := self._held.get(parameter):
                state = self._optimizer.optimizer.state[held.main] if with_moments else {}
                yield Shard(
                    name=name,
                    boxes=held.boxes(parameter.shape),
                    value=held.main.detach(),
                    moments={key: state[key] for key in MOMENTS if with_moments},
                )

    def step(self) -> int:
        """Updates done so far, the same for every parameter."""
        adam = self._optimizer.optimizer
        counters = [*adam.state.values(), *adam.param_groups]  # torch's Adam, fused Adams
        steps = {int(counter["step"]) for counter in counters if "step" in counter}
        assert len(steps) <= 1, f"parameters at different steps: {sorted(steps)}"
        return steps.pop() if steps else 0

    def set_step(self, step: int) -> None:
        """Continue after ``step`` updates, once there are moments.

        torch's Adam counts in a tensor of its own for every parameter, on the host unless its
        kernel is fused or captured; the fused Adams of Transformer Engine and Apex in the group.
        """
        adam = self._optimizer.optimizer
        for group in adam.param_groups:
            if not isinstance(adam, torch.optim.Adam):
                group["step"] = step
                continue
            on_device = group["capturable"] or group["fused"]
            for main in group["params"]:
                device = main.device if on_device else "cpu"
                adam.state[main]["step"] = torch.tensor(float(step), device=device)

    def publish(self) -> None:
        """Copy main values into the model's parameters, on every data-parallel rank.

        Collective over the data-parallel group, context-parallel ranks included.
        """
        if not isinstance(self._optimizer, FP32Optimizer):
            self._optimizer._copy_main_params_to_model_params()
        if isinstance(self._optimizer, DistributedOptimizer):
            for chunk in self._optimizer.model_chunks:
                chunk.start_param_sync(force_sync=True)


def _main_values(optimizer: MegatronOptimizer, model: torch.nn.Module) -> dict[Tensor, HeldRange]:
    """What the optimizer updates on this rank, by the model's parameter."""
    if not isinstance(optimizer, DistributedOptimizer):
        return {p: HeldRange(0, getattr(p, "main_param", p)) for p in model.parameters()}
    # Not optimizer._get_main_param_and_optimizer_states: where a group has parameters of two dtypes
    # (fp32 norms in a bf16 model) it counts them in another order than the list it takes them from.
    pairs = (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    )
    return {
        parameter: HeldRange(optimizer._get_model_param_range_map(parameter)["param"].start, main)
        for parameter_groups, main_groups in pairs
        for parameters, mains in zip(parameter_groups, main_groups, strict=True)
        for parameter, main in zip(parameters, mains, strict=True)
    }
