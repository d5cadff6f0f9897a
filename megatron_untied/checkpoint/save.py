"""Write a checkpoint."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_untied.checkpoint import directory as disk
from megatron_untied.checkpoint.agreement import on_every_rank
from megatron_untied.checkpoint.global_tensor import GlobalTensor, in_blocks, write_tensors
from megatron_untied.checkpoint.random_state import save_random_state
from megatron_untied.checkpoint.run_config import write_run_config
from megatron_untied.checkpoint.state import (
    Progress,
    RankLayout,
    StoredState,
    TrainingState,
    tensors_of,
)


def save_checkpoint(
    directory: str | Path,
    state: TrainingState,
    progress: Progress,
    *,
    run_config: Any = None,
    save_retain_interval: int | None = None,
) -> Path:
    """Save ``state`` under ``directory/iter_<iteration>``: the folder, complete and on the disk.

    Collective over all ranks. Until it returns, the checkpoint before stays the latest.

    Args:
        directory: shared by all ranks.
        state: what to save; only moments that do not exist yet are made in it.
        progress: names the folder.
        run_config: a dataclass of settings to keep beside the weights.
        save_retain_interval: afterwards delete the checkpoint that was the latest, if its
            iteration is earlier and not a multiple of this.
    """
    directory, rank = Path(directory), dist.get_rank()
    staging = disk.staging_folder(directory, progress.iteration)
    on_every_rank(lambda: rank == 0 and disk.start(directory, progress.iteration))
    on_every_rank(lambda: save_random_state(staging, rank))
    write_tensors(staging, _tensors(state))

    def finish() -> None:
        _write_small_state(staging, state, progress)
        write_run_config(staging, state.model_config, run_config)
        before = disk.latest_iteration(directory) if save_retain_interval else None
        disk.publish(directory, progress.iteration)
        if before is not None and before < progress.iteration and before % save_retain_interval:
            disk.retire(directory, before)

    on_every_rank(lambda: rank == 0 and finish())
    return disk.iteration_folder(directory, progress.iteration)


def _tensors(state: TrainingState) -> dict[str, GlobalTensor]:
    tensors = {}
    for shard in state.shards.shards(with_moments=state.shards.has_moments):
        layout = state.layouts[shard.name]
        for name, tensor in tensors_of(shard):
            pieces = in_blocks(layout.pieces(tensor, shard.boxes))
            tensors[name] = GlobalTensor(layout.global_shape, pieces)
    return tensors


def _write_small_state(folder: Path, state: TrainingState, progress: Progress) -> None:
    StoredState(
        progress=progress,
        ranks=RankLayout.of(state.groups),
        optimizer_step=state.shards.step(),
        scheduler=state.scheduler.state_dict() if state.scheduler else None,
    ).write(folder)
