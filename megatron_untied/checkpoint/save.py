"""Saves the live objects of a run as a checkpoint, published only when complete on the disk."""

import itertools
import logging
from collections import ChainMap
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_untied.checkpoint import directory as disk
from megatron_untied.checkpoint.checksums import write_checksums
from megatron_untied.checkpoint.collective_errors import gather_objects, raise_on_all_ranks
from megatron_untied.checkpoint.compatibility import schedule_state
from megatron_untied.checkpoint.global_tensor import GlobalTensor, in_blocks, write_tensors
from megatron_untied.checkpoint.random_state import save_random_state
from megatron_untied.checkpoint.run_config import Provenance, is_of_run, write_run_config
from megatron_untied.checkpoint.state import (
    CheckpointState,
    Progress,
    RankLayout,
    StoredState,
    tensors_of,
)

logger = logging.getLogger(__name__)


def save_checkpoint(
    directory: str | Path,
    state: CheckpointState,
    progress: Progress,
    *,
    run_config: Any = None,
    provenance: Provenance | None = None,
    save_retain_interval: int | None = None,
    most_recent_k: int | None = None,
) -> Path:
    """Save ``state`` under ``directory/iter_<iteration>``; returns that folder.

    Collective over all ranks. Until everything is on the disk, the previous checkpoint stays the
    latest.

    Args:
        directory: shared by all ranks.
        state: what to save. It is not changed, except that missing moments are created.
        progress: how far training is; names the folder.
        run_config: a dataclass of settings to keep beside the weights.
        provenance: of the checkpoint, with one ``run_id`` on all ranks. Only checkpoints with it,
            complete or not, are replaced or deleted; any other folder with the name of this one is
            renamed.
        save_retain_interval: afterwards delete the checkpoint that was the latest, if its
            iteration is earlier and not a multiple of this.
        most_recent_k: afterwards delete all earlier checkpoints of the run but the last ones, so
            that there are so many with this one; multiples of ``save_retain_interval`` stay.

    Raises:
        OSError: on every rank, if any of them could not write. What was saved before is as it was,
            and the latest checkpoint stays the latest.
    """
    directory, rank = Path(directory), dist.get_rank()
    provenance = provenance or Provenance()
    own = directory, progress.iteration, provenance.run_id
    staging = disk.staging_folder(*own)
    try:
        # Each step is also a barrier: no rank may write before the folder is there.
        raise_on_all_ranks(lambda: rank == 0 and disk.start(*own))
        parts = raise_on_all_ranks(lambda: save_random_state(staging, rank))
        tensors = {}
        for shard in state.shards.shards(with_moments=state.shards.has_moments):
            layout = state.layouts[shard.name]
            for name, tensor in tensors_of(shard):
                slices = in_blocks(layout.global_slices(tensor, shard.slices))  # views: no copy
                tensors[name] = GlobalTensor(layout.global_shape, slices)
        parts |= write_tensors(staging, tensors)
        parts_of_ranks = gather_objects(parts)

        # On rank 0, after write_tensors() has returned on all ranks: their files are flushed.
        def finish() -> None:
            StoredState(
                progress=progress,
                ranks=RankLayout.of(state.groups),
                optimizer_step=state.shards.step(),
                scheduler=schedule_state(state.scheduler) if state.scheduler else None,
            ).write(staging)
            write_run_config(staging, state.model_config, run_config, provenance)
            write_checksums(staging, dict(ChainMap(*parts_of_ranks)))
            _publish(*own, save_retain_interval, most_recent_k)

        raise_on_all_ranks(lambda: rank == 0 and finish())
    except OSError:  # on all ranks, so none of them still writes
        if rank == 0:
            disk.discard(*own)  # a full disk may need the space for the next attempt
        raise
    return disk.iteration_folder(directory, progress.iteration)


def _publish(
    directory: Path,
    iteration: int,
    run_id: str | None,
    save_retain_interval: int | None,
    most_recent_k: int | None,
) -> None:
    """Make the staged checkpoint the latest; delete the earlier ones that need not be kept."""
    before = disk.latest_iteration(directory)
    # The second is the only copy where another run was stopped while it replaced a checkpoint.
    for ending in ("", disk.REPLACED):
        folder = disk.iteration_folder(directory, iteration, ending)
        if folder.exists() and not is_of_run(folder, run_id):
            names = (f"{folder.name}.kept-{number}" for number in itertools.count(1))
            kept = next(path for path in map(folder.with_name, names) if not path.exists())
            folder.rename(kept)
            logger.warning("%s was not written by this run and is now %s", folder, kept.name)
    disk.publish(directory, iteration, run_id)
    if before is not None and before > iteration:
        # After --ckpt-step: the later checkpoint may still be needed.
        logger.warning(
            "%s now names iteration %d and no longer %d, whose checkpoint stays",
            *(directory / disk.TRACKER, iteration, before),
        )
        return
    earlier = []
    if most_recent_k or save_retain_interval:
        # Without most_recent_k the one before alone: the others were kept by runs without the flag.
        saved = disk.iterations(directory) if most_recent_k else [before]
        earlier = [each for each in saved if each is not None and each < iteration]
    folders = {each: disk.iteration_folder(directory, each) for each in earlier}
    own = [each for each in earlier if is_of_run(folders[each], run_id)]
    num_old = max(0, len(own) - (most_recent_k or 1) + 1)  # the new one is the last to keep
    for each in own[:num_old]:
        if not save_retain_interval or each % save_retain_interval:
            disk.retire(folders[each], run_id)
