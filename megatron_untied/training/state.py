"""A model together with what updates it."""

import math
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import nn

from megatron_untied.checkpoint import TrainingState
from megatron_untied.config.run import RunConfig
from megatron_untied.sharding.fsdp2 import FullSharding
from megatron_untied.sharding.interface import ModelProvider, Sharding
from megatron_untied.sharding.zero1 import MegatronSharding, build_scheduler
from megatron_untied.step_progress import StepProgress


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """What a step reads and writes; the same on every rank but for the rank's share."""

    sharding: Sharding
    scheduler: OptimizerParamScheduler
    groups: ProcessGroupCollection
    state: TrainingState
    """The same objects, as checkpoints see them."""
    progress: StepProgress
    """Where the step that is running is; the model states its phases to the same object."""

    @property
    def model(self) -> nn.Module:
        """The model to call."""
        return self.sharding.model

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
            f"{groups.dp.size()} | {unwrap_model(self.model).describe()}"
        )


def build_learner(
    model_provider: ModelProvider,
    config: RunConfig,
    groups: ProcessGroupCollection,
    progress: StepProgress,
) -> Learner:
    """Build this rank's share of the model, draw its weights, make its optimizer; collective."""
    kind = FullSharding if config.optimization.use_torch_fsdp2 else MegatronSharding
    sharding = kind(model_provider, config, groups, progress)
    scheduler = build_scheduler(sharding, config)
    state = TrainingState(
        model_config=config.model,
        layouts=sharding.layouts,
        shards=sharding.shards,
        scheduler=scheduler,
        groups=groups,
    )
    return Learner(
        sharding=sharding, scheduler=scheduler, groups=groups, state=state, progress=progress
    )
