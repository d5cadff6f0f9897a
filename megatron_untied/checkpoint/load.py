"""Loads a checkpoint into the live objects of a run, after all checks have passed on all ranks."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import torch.distributed as dist
from megatron.core.utils import log_single_rank
from torch.distributed.checkpoint.api import CheckpointException

from megatron_untied.checkpoint.checksums import CHECKSUMS, ChecksumError, Checksums
from megatron_untied.checkpoint.collective_errors import raise_on_all_ranks, same_on_all_ranks
from megatron_untied.checkpoint.compatibility import (
    TensorFiles,
    changed_settings,
    require_same_schedule,
    require_same_structure,
    resume_schedule,
)
from megatron_untied.checkpoint.directory import damaged, describe_skipped
from megatron_untied.checkpoint.global_tensor import GlobalTensor, TensorReader
from megatron_untied.checkpoint.random_state import (
    PREFIX,
    load_random_state,
    read_random_state,
    seed_generators,
)
from megatron_untied.checkpoint.run_config import model_config_of
from megatron_untied.checkpoint.start import Start, find_start
from megatron_untied.checkpoint.state import (
    STATE,
    CheckpointState,
    Progress,
    RankLayout,
    StoredState,
    tensors_of,
)
from megatron_untied.config.checkpoint import CheckpointConfig
from megatron_untied.sharding.shards import Shard

logger = logging.getLogger(__name__)


def load_checkpoint(
    config: CheckpointConfig,
    state: CheckpointState,
    *,
    seed: int,
    start: Start | None = None,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Progress:
    """Continue from the checkpoint of ``config``; returns its progress, or that of a new run.

    Collective over all ranks, whatever their number and layout. Every check is made on every rank
    before any state is changed.

    Args:
        config: what to load.
        state: written in place.
        seed: for new random states, where those of the checkpoint do not fit the ranks.
        start: the result of ``find_start``; None calls it.
        advance: called with the bytes of each slice that was read, of :func:`bytes_to_read`.

    Raises:
        ValueError: on every rank: a required checkpoint is missing, it is damaged, or it has
            another model or schedule.
    """
    if start is None:
        start = same_on_all_ranks(lambda: find_start(config), "the checkpoint in --load")
    folder = start.folder
    if folder is None:
        if config.load:
            warning = f"{config.load} has no checkpoint: starting from random weights"
            log_single_rank(logger, logging.WARNING, warning)
        return start.progress
    with_optimizer = _with_optimizer(config, state)
    stored = raise_on_all_ranks(lambda: _check(folder, config, state, with_optimizer))
    # By rank 0 alone: other runs may be saving there, so the ranks may see different folders.
    if config.ckpt_step is None and dist.get_rank() == 0:
        for line in describe_skipped(Path(config.load)):
            logger.warning(line)
    for note in start.notes:
        log_single_rank(logger, logging.WARNING, note)
    _read(folder, state, state.stored_shards(with_moments=with_optimizer), advance)
    if with_optimizer:
        state.shards.set_step(stored.optimizer_step)
    # The shards are fp32 main weights; the model computes with parameters of its own dtype.
    state.shards.sync_model_params()
    if with_optimizer and state.scheduler is not None:
        take_settings = config.use_checkpoint_opt_param_scheduler
        resume_schedule(state.scheduler, stored.scheduler, take_settings=take_settings)
    if config.load_rng and not config.finetune:  # last: nothing after it draws random numbers
        _restore_random_state(folder, stored, state, seed)
    return start.progress


def load_pretrained(
    folder: Path, state: CheckpointState, *, advance: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Load the frozen weights of ``state``, which its own checkpoints leave out; collective.

    Raises:
        ValueError: on every rank: the checkpoint in ``folder`` is damaged or of another model.
    """

    def check() -> None:
        before, here = model_config_of(folder), state.model_config
        require_same_structure(folder, before, here)
        expected = {f"model.{name}": state.layouts[name].global_shape for name in state.frozen}
        TensorFiles.open(folder).require(expected, allow_more="optimizer.")
        if changed := changed_settings(before, here):
            warning = f"{folder} becomes another function of its input: {'; '.join(changed)}"
            log_single_rank(logger, logging.WARNING, warning)

    raise_on_all_ranks(check)
    shards = (s for s in state.shards.shards(with_moments=False) if s.name in state.frozen)
    _read(folder, state, shards, advance)
    state.shards.sync_model_params()


def describe_loading(config: CheckpointConfig, start: Start) -> str:
    """One log line: the parts of the checkpoint that :func:`load_checkpoint` restored."""
    taken, progress = ["weights"], start.progress
    if config.finetune:
        return f"loaded {start.folder}: weights alone (--finetune)"
    if config.load_optim:
        taken.append("optimizer")
        if not config.override_opt_param_scheduler:
            taken.append("schedule")
    if config.load_rng:
        taken.append("random states")
    position = f"{progress.consumed_samples} samples consumed"
    if config.reset_data_position:
        position = "samples restart (--reset-data-position)"
    return f"loaded {start.folder}: iteration {progress.iteration}, {position}; {', '.join(taken)}"


def bytes_to_read(config: CheckpointConfig, state: CheckpointState) -> int:
    """Bytes that this rank fills from a checkpoint, in its own dtypes; padding is in no file."""
    return sum(
        part.tensor.nbytes
        for shard in state.stored_shards(with_moments=_with_optimizer(config, state))
        for _, tensor in tensors_of(shard)
        for part in state.layouts[shard.name].global_slices(tensor, shard.slices)
    )


def _read(
    folder: Path,
    state: CheckpointState,
    shards: Iterable[Shard],
    advance: Callable[[int], None],
) -> None:
    """Fill the tensors of ``shards`` from a checkpoint that was checked; collective."""
    tensors = {}
    for shard in shards:
        layout = state.layouts[shard.name]
        for name, tensor in tensors_of(shard):
            if layout.has_padding:
                tensor.zero_()  # padding is in no file
            slices = layout.global_slices(tensor, shard.slices)  # views: DCP fills the live tensors
            tensors[name] = GlobalTensor(layout.global_shape, slices)
    try:
        TensorReader(folder).read(tensors, advance)
    except CheckpointException as error:  # on all ranks, for an error on any of them
        failure, _ = next(iter(error.failures.values()))
        if isinstance(failure, ChecksumError):
            raise ValueError(str(failure)) from error
        reason = f"{type(failure).__name__} where its tensors are read"
        raise ValueError(damaged(folder, reason)) from error


def _with_optimizer(config: CheckpointConfig, state: CheckpointState) -> bool:
    # A run that only evaluates has no moments to load into.
    return config.load_optim and not config.finetune and state.shards.has_moments


def _check(
    folder: Path, config: CheckpointConfig, state: CheckpointState, with_optimizer: bool
) -> StoredState:
    """Everything that can be refused, cheapest first; reads only small files and the index."""
    before, here = model_config_of(folder), state.model_config
    require_same_structure(folder, before, here, use_checkpoint_args=config.use_checkpoint_args)
    stored = StoredState.read(folder)
    if with_optimizer and stored.optimizer_step is None:
        raise ValueError(f"{folder} has weights only; give --finetune or --no-load-optim")
    chosen = config.override_opt_param_scheduler or config.use_checkpoint_opt_param_scheduler
    if with_optimizer and state.scheduler is not None and stored.scheduler is None:
        raise ValueError(damaged(folder, f"{STATE} has no schedule"))
    if with_optimizer and state.scheduler is not None and not chosen:
        require_same_schedule(folder, stored.scheduler, state.scheduler)
    expected = state.stored_shapes(with_moments=with_optimizer)
    # Every rank reads the index and the sizes of all files: a node may have an incomplete copy.
    files = TensorFiles.open(folder)
    files.require(expected, allow_more=None if with_optimizer else "optimizer.")
    if changed := changed_settings(before, here):
        warning = f"{folder} becomes another function of its input: {'; '.join(changed)}"
        log_single_rank(logger, logging.WARNING, warning)
    if config.load_rng and stored.ranks == RankLayout.of(state.groups):
        read_random_state(folder, dist.get_rank())  # to fail now, not after the weights are read
    checksums = Checksums.read(folder)
    if checksums is None:
        log = f"{folder} has no {CHECKSUMS}: changes since it was saved go unnoticed"
        log_single_rank(logger, logging.WARNING, log)
    elif config.load_rng and not config.finetune:
        # Tens of KB for each rank that saved, so the ranks here share the files.
        states = sorted({part.file for part in checksums.parts if part.file.startswith(PREFIX)})
        for name in states[dist.get_rank() :: dist.get_world_size()]:
            checksums.require_small_file(name)
    return stored


def _restore_random_state(
    folder: Path, stored: StoredState, state: CheckpointState, seed: int
) -> None:
    ranks, rank = RankLayout.of(state.groups), dist.get_rank()
    if stored.ranks == ranks:
        load_random_state(folder, rank)
        return
    # Not the seed alone: the random numbers of the first iterations would repeat.
    seed_generators(seed + stored.progress.iteration)
    if stored.ranks is not None:
        log_single_rank(
            logger,
            logging.WARNING,
            f"{folder} was saved by {stored.ranks}, here are {ranks}: random numbers restart "
            f"from seed {seed}, iteration {stored.progress.iteration}",
        )
