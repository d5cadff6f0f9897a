"""A model together with what updates it."""

import math
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from megatron_untied.checkpoint import TrainingState
from megatron_untied.platform import device
from megatron_untied.sharding.distributed_optimizer import OptimizerShards
from megatron_untied.sharding.initialize_weights import initialize_weights
from megatron_untied.sharding.parameter_layout import parameter_layouts
from megatron_untied.training.config import RunConfig
from megatron_untied.training.optimizer import build_optimizer, build_scheduler, wrap_data_parallel


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """What a step reads and writes; the same on every rank but for the rank's share."""

    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    groups: ProcessGroupCollection
    state: TrainingState
    """The same objects, as checkpoints see them."""

    @property
    def num_parameters(self) -> int:
        """Of the whole model, vocabulary padding left out."""
        return sum(math.prod(layout.global_shape) for layout in self.state.layouts.values())

    def describe(self) -> str:
        """One line on the model and the ranks that share it."""
        groups = self.groups
        return (
            f"{self.num_parameters:,} parameters | {dist.get_world_size()} ranks: tensor parallel "
            f"{groups.tp.size()} x context parallel {groups.cp.size()} x data parallel "
            f"{groups.dp.size()}"
        )


def build_learner(
    bare_model: MegatronModule, config: RunConfig, groups: ProcessGroupCollection
) -> Learner:
    """Draw ``bare_model``'s weights, then wrap it and make its optimizer; collective."""
    bare_model.to(device.current_device())
    initialize_weights(bare_model, config.model, config.seed, groups.tp)
    layouts = parameter_layouts(
        bare_model, config.model, tp_rank=groups.tp.rank(), tp_size=groups.tp.size()
    )
    model = wrap_data_parallel(bare_model, config, groups)
    optimizer = build_optimizer(model, config, groups)
    scheduler = build_scheduler(optimizer, config)
    state = TrainingState(
        model_config=config.model,
        layouts=layouts,
        shards=OptimizerShards(optimizer, bare_model),
        scheduler=scheduler,
        groups=groups,
    )
    return Learner(
        model=model, optimizer=optimizer, scheduler=scheduler, groups=groups, state=state
    )
