"""Megatron-core's data-parallel wrapper, optimizer and schedule, configured."""

import math
from contextlib import AbstractContextManager

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from megatron_untied.platform import device
from megatron_untied.sharding.distributed_optimizer import OptimizerShards
from megatron_untied.sharding.initialize_weights import initialize_shards, initialize_weights
from megatron_untied.sharding.parameter_layout import parameter_layouts
from megatron_untied.step_progress import StepProgress
from megatron_untied.training.config import RunConfig
from megatron_untied.training.sharding import ModelProvider, Sharding


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

    def more_to_come(self) -> AbstractContextManager:
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
