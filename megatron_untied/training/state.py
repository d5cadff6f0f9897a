"""The train state: model, optimizer and schedule of one rank."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import nn

from megatron_untied.checkpoint import (
    BackgroundSave,
    CheckpointSave,
    CheckpointState,
    Progress,
    Provenance,
    Start,
    bytes_to_read,
    load_checkpoint,
    load_pretrained,
)
from megatron_untied.config.run import RunConfig
from megatron_untied.phases import Phase
from megatron_untied.sharding.fsdp2 import FullSharding
from megatron_untied.sharding.interface import ModelProvider, Sharding
from megatron_untied.sharding.zero1 import MegatronSharding, build_scheduler
from megatron_untied.step_progress import StepProgress
from megatron_untied.streaming.copy_engine import Waits
from megatron_untied.streaming.disk import ActivationDisk


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """Everything that a training step reads and updates, as sharded on this rank."""

    sharding: Sharding
    """Holds the model, its gradients and AdamW."""
    scheduler: OptimizerParamScheduler
    groups: ProcessGroupCollection
    checkpoint_state: CheckpointState
    """The same objects, as saving and loading see them."""
    progress: StepProgress
    """Position in the current step; the model records its phases in the same object."""
    disk: ActivationDisk | None = None
    """Where the model's saved activations go on to from the host."""
    waits: Waits | None = None
    """For copies between device and host, and for the disk; None if no layer can use them."""

    @property
    def model(self) -> nn.Module:
        """The model to call: wrapped by DDP or FSDP2, which reduce its gradients."""
        return self.sharding.model

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model over all ranks, without the padding of the vocabulary."""
        layouts = self.checkpoint_state.layouts.values()
        # Of checkpoints' layouts: a rank's own tensors are shards, with padding.
        return sum(math.prod(layout.global_shape) for layout in layouts)

    def describe(self) -> str:
        """One log line: size of the model, parallel sizes, and the choices made in the model."""
        groups = self.groups
        trained = ""
        if frozen := self.checkpoint_state.frozen:
            layouts = self.checkpoint_state.layouts.items()
            numel = sum(math.prod(its.global_shape) for name, its in layouts if name not in frozen)
            trained = f", {numel:,} trained"
        return (
            f"{self.num_parameters:,} parameters{trained} | {dist.get_world_size()} ranks: "
            f"tensor parallel {groups.tp.size()} x context parallel {groups.cp.size()} x "
            f"data parallel {groups.dp.size()} | {unwrap_model(self.model).describe()}"
        )

    def load(self, config: RunConfig, start: Start) -> Progress:
        """Load the checkpoint of ``start``, if any; collective over all ranks.

        Returns:
            Iterations and samples done before this run.

        Raises:
            ValueError: on every rank, if the checkpoint does not fit this run.
        """
        if start.pretrained is not None:
            load_pretrained(start.pretrained, self.checkpoint_state)
        if start.folder is not None:
            num_bytes = bytes_to_read(config.checkpoint, self.checkpoint_state)
            self.progress.begin(str(start.folder), num_bytes, phase=Phase.LOADING)
        return load_checkpoint(
            config.checkpoint,
            self.checkpoint_state,
            seed=config.seed,
            start=start,
            advance=self.progress.advance,  # in bytes, so the heartbeat shows a percentage
        )

    def save(
        self, config: RunConfig, progress: Progress, provenance: Provenance
    ) -> Path | BackgroundSave:
        """Save a checkpoint of ``progress`` with ``config`` in it; collective over all ranks.

        Returns:
            The folder of the checkpoint; with ``--async-save`` the save that has begun.
        """
        name = f"checkpoint of iteration {progress.iteration}"
        self.progress.begin(name, phase=Phase.SAVING)
        save = CheckpointSave(
            directory=Path(config.checkpoint.save),
            progress=progress,
            run_config=config,
            provenance=provenance,
            save_retain_interval=config.checkpoint.save_retain_interval,
            most_recent_k=config.checkpoint.most_recent_k,
        )
        if config.checkpoint.async_save:
            return save.write_in_background(self.checkpoint_state)
        return save.write(self.checkpoint_state)


def build_train_state(
    model_provider: ModelProvider,
    config: RunConfig,
    groups: ProcessGroupCollection,
    progress: StepProgress,
) -> TrainState:
    """Build this rank's shard of the model, initialize its weights and create its optimizer.

    Collective over all ranks.

    Args:
        model_provider: builds the bare model.
        config: the whole run.
        groups: from ``initialize``.
        progress: passed to the model, which records its phases in it.
    """
    kind = FullSharding if config.optimization.use_torch_fsdp2 else MegatronSharding
    # Allocates the weights; Adam's moments follow in the first step.
    sharding = kind(model_provider, config, groups, progress)
    scheduler = build_scheduler(sharding, config)
    model = unwrap_model(sharding.model)
    parameters = model.named_parameters()
    return TrainState(
        sharding=sharding,
        scheduler=scheduler,
        groups=groups,
        checkpoint_state=CheckpointState(
            model_config=config.model,
            layouts=sharding.layouts,
            shards=sharding.shards,
            scheduler=scheduler,
            groups=groups,
            frozen=frozenset(name for name, p in parameters if not p.requires_grad),
            leaves_out_frozen=config.checkpoint.pretrained_checkpoint is not None,
        ),
        progress=progress,
        disk=model.store and model.store.arena.disk,
        waits=model.store and model.store.arena.engine.waits,
    )
