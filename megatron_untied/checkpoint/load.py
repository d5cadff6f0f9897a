"""Read a checkpoint into a run."""

import logging
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_untied.checkpoint.agreement import on_every_rank, same_on_every_rank
from megatron_untied.checkpoint.compatibility import (
    TensorFiles,
    changed_settings,
    damaged,
    require_same_schedule,
    require_same_structure,
)
from megatron_untied.checkpoint.config import CheckpointConfig
from megatron_untied.checkpoint.directory import find_checkpoint
from megatron_untied.checkpoint.global_tensor import GlobalTensor, read_tensors
from megatron_untied.checkpoint.random_state import (
    load_random_state,
    read_random_state,
    seed_generators,
)
from megatron_untied.checkpoint.run_config import model_config_of
from megatron_untied.checkpoint.state import (
    Progress,
    RankLayout,
    StoredState,
    TrainingState,
    tensor_names,
    tensors_of,
)

logger = logging.getLogger(__name__)


def load_checkpoint(config: CheckpointConfig, state: TrainingState, *, seed: int) -> Progress:
    """Continue from the checkpoint that ``config`` names: how far it was, or the very start.

    Collective over all ranks; works at any number of ranks and any split of them. Every check is
    made on every rank before anything is changed.

    Args:
        config: what to load.
        state: written in place.
        seed: for new random states, where those of the checkpoint do not fit the ranks.

    Raises:
        ValueError: on every rank: nothing there though it must be, a damaged checkpoint, another
            model, another schedule.
    """
    folder = same_on_every_rank(lambda: _find(config), "the checkpoint in --load")
    if folder is None:
        return Progress()
    with_optimizer = config.load_optim and not config.finetune and state.shards.has_moments
    stored = on_every_rank(lambda: _check(folder, config, state, with_optimizer))
    _read(folder, _tensors_to_fill(state, with_optimizer))
    if with_optimizer:
        state.shards.set_step(stored.optimizer_step)
    state.shards.publish()
    if with_optimizer and state.scheduler is not None:
        state.scheduler.load_state_dict(stored.scheduler)
    if config.finetune:
        return Progress()
    if config.load_rng:
        _restore_random_state(folder, stored, state, seed)
    return stored.progress


def _find(config: CheckpointConfig) -> Path | None:
    folder = find_checkpoint(Path(config.load), config.ckpt_step) if config.load else None
    if folder is None and config.exit_on_missing_checkpoint:
        raise ValueError(
            f"--load {config.load} has no checkpoint and --exit-on-missing-checkpoint is given; "
            "check the path, or leave the flag out to start from random weights"
        )
    if folder is None and config.load and dist.get_rank() == 0:
        logger.warning("%s has no checkpoint: starting from random weights", config.load)
    return folder


def _check(
    folder: Path, config: CheckpointConfig, state: TrainingState, with_optimizer: bool
) -> StoredState:
    before, here = model_config_of(folder), state.model_config
    require_same_structure(folder, before, here, use_checkpoint_args=config.use_checkpoint_args)
    stored = StoredState.read(folder)
    if with_optimizer and stored.optimizer_step is None:
        raise ValueError(f"{folder} has weights only; give --finetune or --no-load-optim")
    if with_optimizer and state.scheduler is not None:
        require_same_schedule(folder, stored.scheduler, state.scheduler.state_dict())
    expected = {
        name: layout.global_shape
        for layout in state.layouts.values()
        for name in tensor_names(layout.name, with_moments=with_optimizer)
    }
    files = TensorFiles.open(folder)
    files.require(expected, allow_more=None if with_optimizer else "optimizer.")
    changed = changed_settings(before, here)
    if changed and dist.get_rank() == 0:
        logger.warning("%s becomes another function of its input: %s", folder, "; ".join(changed))
    if config.load_rng and stored.ranks == RankLayout.of(state.groups):
        read_random_state(folder, dist.get_rank())
    return stored


def _read(folder: Path, tensors: dict[str, GlobalTensor]) -> None:
    try:
        read_tensors(folder, tensors)
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        reason = f"{type(failure).__name__} where its tensors are read"
        raise ValueError(damaged(folder, reason)) from error


def _tensors_to_fill(state: TrainingState, with_optimizer: bool) -> dict[str, GlobalTensor]:
    tensors = {}
    for shard in state.shards.shards(with_moments=with_optimizer):
        layout = state.layouts[shard.name]
        for name, tensor in tensors_of(shard):
            if layout.has_padding:
                tensor.zero_()  # no file holds the padding
            tensors[name] = GlobalTensor(layout.global_shape, layout.pieces(tensor, shard.boxes))
    return tensors


def _restore_random_state(
    folder: Path, stored: StoredState, state: TrainingState, seed: int
) -> None:
    ranks, rank = RankLayout.of(state.groups), dist.get_rank()
    if stored.ranks == ranks:
        load_random_state(folder, rank)
        return
    seed_generators(seed + stored.progress.iteration)
    if rank == 0 and stored.ranks is not None:
        logger.warning(
            "%s was saved by %s, here are %s: random numbers start anew from seed %d, iteration %d",
            *(folder, stored.ranks, ranks, seed, stored.progress.iteration),
        )
