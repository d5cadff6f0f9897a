"""Saves the live objects of a run as a checkpoint, published only when complete on the disk."""

import contextlib
import itertools
import logging
import threading
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_untied.checkpoint import directory as disk
from megatron_untied.checkpoint.checksums import Part, write_checksums
from megatron_untied.checkpoint.collective_errors import gather_objects, raise_on_all_ranks
from megatron_untied.checkpoint.compatibility import schedule_state
from megatron_untied.checkpoint.global_tensor import (
    GlobalTensor,
    StagedTensors,
    in_blocks,
    write_tensors,
)
from megatron_untied.checkpoint.random_state import save_random_state
from megatron_untied.checkpoint.run_config import Provenance, is_of_run, write_run_config
from megatron_untied.checkpoint.state import (
    CheckpointState,
    Progress,
    RankLayout,
    StoredState,
    tensors_of,
)
from megatron_untied.config import ModelConfig
from megatron_untied.platform import device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSave:
    """One save: where to, of what progress, and which earlier checkpoints to keep."""

    directory: Path
    """Shared by all ranks; the checkpoint is ``iter_<iteration>`` in it."""
    progress: Progress
    """How far training is; names the folder."""
    run_config: Any = None
    """A dataclass of settings to keep beside the weights."""
    provenance: Provenance = Provenance()
    """With one ``run_id`` on all ranks. Only checkpoints with it, complete or not, are replaced or
    deleted; any other folder with the name of this one is renamed."""
    save_retain_interval: int | None = None
    """Afterwards delete the checkpoint that was the latest, if its iteration is earlier and not a
    multiple of this."""
    most_recent_k: int | None = None
    """Afterwards delete all earlier checkpoints of the run but the last ones, so that there are so
    many with this one; multiples of ``save_retain_interval`` stay."""

    @property
    def folder(self) -> Path:
        """The folder of the complete checkpoint."""
        return disk.iteration_folder(self.directory, self.progress.iteration)

    def write(self, state: CheckpointState) -> Path:
        """Save ``state``; returns the folder. Collective over all ranks.

        Until everything is on the disk, the previous checkpoint stays the latest. ``state`` is not
        changed, except that missing moments are created.

        Raises:
            OSError: on every rank, if any of them could not write. What was saved before is as it
                was, and the latest checkpoint stays the latest.
        """
        with self._discarding_failures():
            parts = self._begin()
            parts |= write_tensors(self._staging, _tensors(state))
            self._finish(state.model_config, _stored_state(state, self.progress), parts)
        return self.folder

    def write_in_background(self, state: CheckpointState) -> "BackgroundSave":
        """Copy ``state`` to the host and begin to write it; collective over all ranks.

        ``state`` may change as soon as this returns. The copy takes as much host memory as this
        rank writes; it is given back while the file is written.

        Raises:
            OSError: as :meth:`write`, for the small files that come before the tensors.
        """
        with self._discarding_failures():
            parts = self._begin()
            staged = StagedTensors(self._staging, _tensors(state))
        stored = _stored_state(state, self.progress)
        return BackgroundSave(self, staged, parts, state.model_config, stored)

    @property
    def _own(self) -> tuple[Path, int, str | None]:
        return self.directory, self.progress.iteration, self.provenance.run_id

    @property
    def _staging(self) -> Path:
        return disk.staging_folder(*self._own)

    def _begin(self) -> dict[Part, int]:
        """Create the staging folder with the random states; the checksum of this rank's."""
        rank = dist.get_rank()
        # Each step is also a barrier: no rank may write before the folder is there.
        raise_on_all_ranks(lambda: rank == 0 and disk.start(*self._own))
        return raise_on_all_ranks(lambda: save_random_state(self._staging, rank))

    def _finish(self, model: ModelConfig, stored: StoredState, parts: dict[Part, int]) -> None:
        """Write the small files and publish, after all ranks have flushed their tensors."""
        parts_of_ranks = gather_objects(parts)

        def finish() -> None:
            stored.write(self._staging)
            write_run_config(self._staging, model, self.run_config, self.provenance)
            write_checksums(self._staging, dict(ChainMap(*parts_of_ranks)))
            _publish(*self._own, self.save_retain_interval, self.most_recent_k)

        raise_on_all_ranks(lambda: dist.get_rank() == 0 and finish())

    @contextlib.contextmanager
    def _discarding_failures(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # on all ranks, so none of them still writes
            if dist.get_rank() == 0:
                disk.discard(*self._own)  # a full disk may need the space for the next attempt
            raise


class BackgroundSave:
    """A checkpoint whose tensors one thread per rank is writing.

    The thread does nothing but write this rank's file: all collectives, the index and the
    publication are the training thread's, so a rank that dies leaves what a synchronous save does.
    """

    def __init__(
        self,
        save: CheckpointSave,
        staged: StagedTensors,
        parts: dict[Part, int],
        model: ModelConfig,
        stored: StoredState,
    ):
        """From :meth:`CheckpointSave.write_in_background`."""
        self._save, self._staged, self._parts = save, staged, parts
        self._model, self._stored = model, stored
        self._failure: BaseException | None = None
        # A daemon: a run that has failed exits without waiting for a checkpoint.
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def progress(self) -> Progress:
        """Of the checkpoint."""
        return self._save.progress

    def has_ended(self) -> bool:
        """Whether all ranks have written their files, or one has failed; collective over them."""
        is_alive = self._thread.is_alive()
        counts = torch.tensor(
            [not is_alive, self._failure is not None],
            dtype=torch.int32,
            device=device.current_device(),
        )
        dist.all_reduce(counts)
        num_ended, num_failed = counts.tolist()
        return num_ended == dist.get_world_size() or num_failed > 0

    def finish(self) -> Path:
        """Wait for the files and publish the checkpoint; returns its folder.

        Collective over all ranks.

        Raises:
            OSError: on every rank, as :meth:`CheckpointSave.write`.
        """
        self._thread.join()
        with self._save._discarding_failures():
            raise_on_all_ranks(self._raise_failure)
            parts = self._parts | self._staged.finish()
            self._save._finish(self._model, self._stored, parts)
        return self._save.folder

    def _write(self) -> None:
        try:
            self._staged.writer.write()
        except BaseException as error:  # raised again in the training thread
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


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
    """Save ``state`` under ``directory/iter_<iteration>``: :meth:`CheckpointSave.write`."""
    return CheckpointSave(
        directory=Path(directory),
        progress=progress,
        run_config=run_config,
        provenance=provenance or Provenance(),
        save_retain_interval=save_retain_interval,
        most_recent_k=most_recent_k,
    ).write(state)


def _tensors(state: CheckpointState) -> dict[str, GlobalTensor]:
    tensors = {}
    for shard in state.stored_shards(with_moments=state.shards.has_moments):
        layout = state.layouts[shard.name]
        for name, tensor in tensors_of(shard):
            slices = in_blocks(layout.global_slices(tensor, shard.slices))  # views: no copy
            tensors[name] = GlobalTensor(layout.global_shape, slices)
    return tensors


def _stored_state(state: CheckpointState, progress: Progress) -> StoredState:
    return StoredState(
        progress=progress,
        ranks=RankLayout.of(state.groups),
        optimizer_step=state.shards.step(),
        scheduler=schedule_state(state.scheduler) if state.scheduler else None,
    )


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
