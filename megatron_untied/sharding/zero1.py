"""ZeRO-1 with megatron-core: whole weights and gradients per rank, optimizer states sharded.

:class:`MegatronSharding` puts together megatron-core's data-parallel wrapper and optimizer;
:class:`OptimizerShards` reads and writes their state. :func:`build_scheduler` builds the learning
rate schedule, for both kinds of sharding.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    FP32Optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from typing_extensions import override

from megatron_untied.config.run import RunConfig
from megatron_untied.platform import device
from megatron_untied.sharding.initialize_weights import initialize_shards, initialize_weights
from megatron_untied.sharding.interface import ModelProvider, Sharding
from megatron_untied.sharding.parameter_layout import parameter_layouts
from megatron_untied.sharding.shards import MOMENTS, Shard, Shards
from megatron_untied.sharding.tensor_slice import TensorSlice, slices_of_flat_range
from megatron_untied.step_progress import StepProgress


class MegatronSharding(Sharding):
    """Whole weights and gradients on every rank.

    With the distributed optimizer each rank updates its part of them, else all.
    """

    def __init__(
        self,
        model_provider: ModelProvider,
        config: RunConfig,
        groups: ProcessGroupCollection,
        progress: StepProgress,
    ):
        """Draws the weights. Collective over all ranks."""
        with device.current_device():
            model = model_provider(config, groups, progress)
        initialize_weights(model, config.model, config.seed, groups.tp)
        self.layouts = parameter_layouts(
            model, config.model, tp_rank=groups.tp.rank(), tp_size=groups.tp.size()
        )
        self._groups = groups
        # Gradients are summed over the data- and context-parallel ranks, not averaged: the loss of
        # a token is weighted by the whole batch before its backward (calculate_per_token_loss in
        # the model's own configuration).
        self.model = DistributedDataParallel(
            config=model.config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=config.optimization.use_distributed_optimizer,
            ),
            module=model,
            pg_collection=groups,
        )
        self.optimizer = build_optimizer(self.model, config, groups)
        self.param_groups = self.optimizer.param_groups
        self.shards = OptimizerShards(self.optimizer, model)
        if config.precision.bf16:
            # The fp32 main weights were copied from bf16: draw them again in full precision.
            initialize_shards(self.shards, self.layouts, config.model, config.seed)

    @override
    def zero_grad(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    @override
    def no_sync(self) -> AbstractContextManager:
        return self.model.no_sync()

    def finish_gradients(self) -> None:
        """Wait for the reductions; sum partial gradients over the tensor-parallel ranks."""
        finalize_model_grads([self.model], pg_collection=self._groups)

    # The two halves of the optimizer's own step(), between which nothing has changed yet.

    @override
    def gradient_norm(self) -> float:
        self.finish_gradients()
        self.optimizer.prepare_grads()  # True with loss scaling only
        return self.optimizer.get_grad_norm()

    @override
    def update(self, norm: float) -> None:
        clip_grad_by_total_norm_fp32(
            self.optimizer.get_parameters(), self.optimizer.config.clip_grad, norm
        )
        self.optimizer.step_with_ready_grads()


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
            # 0 would turn off the norm's computation, not only the clipping.
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
    """The learning rate as a function of consumed samples; sets its first value.

    Iterations become samples as in Megatron, so that ``step(increment=samples)`` and a checkpoint's
    ``num_steps`` mean the same in both.
    """
    schedule, samples = config.schedule, config.schedule_samples
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
    """A flat range of a parameter from ``start``, and the fp32 main values of it."""

    start: int
    main: Tensor


class OptimizerShards(Shards):
    """The state of megatron-core's Adam, distributed or not, for one bare model."""

    has_moments = True

    def __init__(self, optimizer: MegatronOptimizer, model: torch.nn.Module):
        if isinstance(optimizer, ChainedOptimizer):
            (optimizer,) = optimizer.chained_optimizers  # dense parameters are one optimizer's
        self._optimizer, self._model = optimizer, model
        self._held: dict[Tensor, HeldRange]  # the fp32 main values here, by the model's parameter
        if not isinstance(optimizer, DistributedOptimizer):  # every rank has all of each
            trained = (p for p in model.parameters() if p.requires_grad)
            self._held = {p: HeldRange(0, getattr(p, "main_param", p)) for p in trained}
            return
        # Not optimizer._get_main_param_and_optimizer_states: for a group with parameters of two
        # dtypes (fp32 norms in a bf16 model) it counts in another order than that of the list it
        # indexes.
        pairs = (
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        )
        self._held = {
            p: HeldRange(optimizer._get_model_param_range_map(p)["param"].start, main)
            for parameter_groups, main_groups in pairs
            for parameters, mains in zip(parameter_groups, main_groups, strict=True)
            for p, main in zip(parameters, mains, strict=True)
        }

    @override
    def shards(self, *, with_moments: bool) -> Iterator[Shard]:
        if with_moments:
            step = self.step()
            self._optimizer.init_state_fn(self._optimizer.optimizer, self._optimizer.config)
            self.set_step(step)  # torch's Adam requires a step beside moments
        for name, parameter in self._model.named_parameters():
            if not parameter.requires_grad:  # every rank has all of it, and no optimizer has any
                whole = TensorSlice((0,) * parameter.dim(), tuple(parameter.shape))
                yield Shard(name=name, slices=(whole,), value=parameter.detach(), moments={})
            elif held := self._held.get(parameter):
                state = self._optimizer.optimizer.state[held.main] if with_moments else {}
                stop = held.start + held.main.numel()
                yield Shard(
                    name=name,
                    slices=tuple(slices_of_flat_range(parameter.shape, held.start, stop)),
                    value=held.main.detach(),
                    moments={key: state[key] for key in MOMENTS if with_moments},
                )

    @override
    def step(self) -> int:
        adam = self._optimizer.optimizer
        counters = [*adam.state.values(), *adam.param_groups]  # torch's Adam, fused Adams
        steps = {int(counter["step"]) for counter in counters if "step" in counter}
        assert len(steps) <= 1, f"parameters at different steps: {sorted(steps)}"
        return steps.pop() if steps else 0

    @override
    def set_step(self, step: int) -> None:
        # torch's Adam counts in one tensor per parameter, on the host unless its kernel is fused or
        # captured; the fused Adams of Transformer Engine and Apex count in the group.
        adam = self._optimizer.optimizer
        for group in adam.param_groups:
            if not isinstance(adam, torch.optim.Adam):
                group["step"] = step
                continue
            on_device = group["capturable"] or group["fused"]
            for main in group["params"]:
                place = main.device if on_device else "cpu"
                adam.state[main]["step"] = torch.tensor(float(step), device=place)

    @override
    def working_copies(self) -> Iterable[tuple[str, Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self._model.named_parameters())

    @override
    def sync_model_params(self) -> None:
        # Main values go to this rank's part of the parameters, then to all data-parallel ranks.
        if not isinstance(self._optimizer, FP32Optimizer):
            self._optimizer._copy_main_params_to_model_params()
        if isinstance(self._optimizer, DistributedOptimizer):
            for chunk in self._optimizer.model_chunks:
                chunk.start_param_sync(force_sync=True)
