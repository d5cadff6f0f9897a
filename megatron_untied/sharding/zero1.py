"""Megatron-core's data-parallel wrapper, optimizer and schedule, configured."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    FP32Optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_untied.config.run import RunConfig
from megatron_untied.platform import device
from megatron_untied.sharding.initialize_weights import initialize_shards, initialize_weights
from megatron_untied.sharding.interface import ModelProvider, Sharding
from megatron_untied.sharding.parameter_layout import parameter_layouts
from megatron_untied.sharding.shards import MOMENTS, Shard
from megatron_untied.sharding.tensor_slice import TensorSlice, slices_of_flat_range
from megatron_untied.step_progress import StepProgress


class MegatronSharding:
    """Whole weights and gradients on every rank; with the distributed optimizer it updates a part.

    See :class:`Sharding`.
    """

    def __init__(
        self,
        model_provider: ModelProvider,
        config: RunConfig,
        groups: ProcessGroupCollection,
        progress: StepProgress,
    ):
        with device.current_device():
            bare_model = model_provider(config, groups, progress)
        require_all_trained(bare_model)
        initialize_weights(bare_model, config.model, config.seed, groups.tp)
        self.layouts = parameter_layouts(
            bare_model, config.model, tp_rank=groups.tp.rank(), tp_size=groups.tp.size()
        )
        self._groups = groups
        self.model = wrap_data_parallel(bare_model, config, groups)
        self.optimizer = build_optimizer(self.model, config, groups)
        self.shards = OptimizerShards(self.optimizer, bare_model)
        if config.precision.bf16:
            # Main weights were copied from the model's; they need not be as coarse.
            initialize_shards(self.shards, self.layouts, config.model, config.seed)

    @property
    def param_groups(self) -> list[dict]:
        """See :class:`Sharding`."""
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        """See :class:`Sharding`."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def no_sync(self) -> AbstractContextManager:
        """Gradients are reduced once a step, in its last backward."""
        return self.model.no_sync()

    def finish_gradients(self) -> None:
        """Sum what tensor-parallel ranks have of one gradient; wait for all reductions."""
        finalize_model_grads([self.model], pg_collection=self._groups)

    def step(self) -> tuple[bool, float]:
        """See :class:`Sharding`."""
        self.finish_gradients()
        updated, norm, _ = self.optimizer.step()
        return updated, norm


def require_all_trained(model: MegatronModule) -> None:
    """Refuse frozen parameters: megatron-core's optimizer does not know them, nor would a load.

    Raises:
        ValueError: with the first of them.
    """
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if frozen:
        raise ValueError(
            f"{len(frozen)} parameters are frozen, {frozen[0]} the first, and megatron-core's "
            "optimizer neither saves nor loads what it does not update; give --use-torch-fsdp2, "
            "which does, or leave requires_grad on"
        )


def wrap_data_parallel(
    model: MegatronModule, config: RunConfig, groups: ProcessGroupCollection
) -> DistributedDataParallel:
    """``model`` with fp32 gradient buffers, summed over the data- and context-parallel ranks.

    Summed, not averaged: the loss of a token is weighted by the whole batch before its backward
    (``calculate_per_token_loss`` in the model's own configuration).
    """
    return DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=config.optimization.use_distributed_optimizer,
        ),
        module=model,
        pg_collection=groups,
    )


def build_optimizer(
    model: DistributedDataParallel, config: RunConfig, groups: ProcessGroupCollection
) -> MegatronOptimizer:
    """AdamW on fp32 main parameters; vectors (norms, biases) have no weight decay.

    Clipping counts each logical element once: megatron-core leaves out the copies that
    tensor-parallel ranks hold of an unsplit parameter. Collective over all ranks.
    """
    optimization = config.optimization
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.schedule.lr,
            min_lr=config.schedule.min_lr,
            weight_decay=optimization.weight_decay,
            adam_beta1=optimization.adam_beta1,
            adam_beta2=optimization.adam_beta2,
            adam_eps=optimization.adam_eps,
            # Without a limit it would not report the norm either.
            clip_grad=optimization.clip_grad or math.inf,
            use_distributed_optimizer=optimization.use_distributed_optimizer,
            bf16=config.precision.bf16,
            params_dtype=config.precision.params_dtype,
        ),
        [model],
        use_gloo_process_groups=False,
        pg_collection=groups,
    )


def build_scheduler(sharding: Sharding, config: RunConfig) -> OptimizerParamScheduler:
    """The learning rate as a function of consumed samples; sets the first one.

    Iterations become samples as in Megatron, so that ``step(increment=samples)`` and a checkpoint's
    ``num_steps`` mean the same in both.
    """
    schedule, samples = config.schedule, config.batch.global_batch_size
    return OptimizerParamScheduler(
        sharding,
        init_lr=schedule.lr_warmup_init,
        max_lr=schedule.lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=schedule.lr_warmup_iters * samples,
        lr_decay_steps=schedule.lr_decay_iters * samples,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=config.optimization.weight_decay,
        end_wd=config.optimization.weight_decay,
        wd_incr_steps=0,  # constant: not --train-iters, which may grow when training goes on
        wd_incr_style="constant",
        wsd_decay_steps=(schedule.lr_wsd_decay_iters or 0) * samples,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )


class HeldRange(NamedTuple):
    """A flat range of a parameter, from ``start``, and the fp32 values that are updated for it."""

    start: int
    main: Tensor

    def slices(self, shape: torch.Size) -> tuple[TensorSlice, ...]:
        """The range as slices of the parameter."""
        return tuple(slices_of_flat_range(shape, self.start, self.start + self.main.numel()))


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
                    slices=held.slices(parameter.shape),
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

    def sync_model_params(self) -> None:
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
