"""What a run takes on disk: checkpoints, and saved activations.

Of checkpoints: bytes of one, how many there are at a time, what is free. Weights and both moments
are stored in fp32, without the padding of the vocabulary, whatever the ranks and their sharding.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron_untied.config.run import RunConfig
from megatron_untied.planner.weights import num_parameters
from megatron_untied.platform.device import GIB

_PARAMETER_BYTES = 12
_SECONDS_PER_DAY = 86400
_RANK_BYTES = 20 << 10
"""States of a rank's random generators."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """The checkpoints of one run."""

    save: str | None
    """The folder of ``--save``."""
    train_iters: int
    checkpoint_bytes: int
    """Of one checkpoint."""
    saved: tuple[int, ...]
    """Iterations after which a checkpoint is written."""
    num_kept: int
    """Checkpoints that are there when the run has ended."""
    peak_bytes: int
    """While the last checkpoint is written."""

    @classmethod
    def of(cls, config: RunConfig, world_size: int, done: int = 0) -> "Disk":
        """Of a run on ``world_size`` ranks that starts after ``done`` iterations."""
        loop, checkpoint = config.loop, config.checkpoint
        last = loop.train_iters
        if loop.exit_interval:
            last = min(last, (done // loop.exit_interval + 1) * loop.exit_interval)
        saved: list[int] = []
        if checkpoint.save and not loop.skip_train and last > done:
            interval = checkpoint.save_interval or last
            first = (done // interval + 1) * interval
            saved = sorted({*range(first, last + 1, interval), last})
        # Checkpoints that are not retained are deleted when a later one is complete, so while the
        # last one is written the one before it is still there.
        retain, recent = checkpoint.save_retain_interval, checkpoint.most_recent_k
        num_kept, num_at_most = (
            sum(iteration % retain == 0 if retain else not recent for iteration in saved[:-newest])
            + len(saved[-newest:])
            for newest in ((recent or 1), (recent or 1) + 1)
        )
        model, adaptation = config.model, config.adaptation
        trained = num_parameters(model, adaptation, trained=True)
        num_bytes = _PARAMETER_BYTES * trained + _RANK_BYTES * world_size
        if adaptation.lora_rank is None:  # checkpoints of adapters leave the rest out
            frozen = num_parameters(model, adaptation) - trained
            num_bytes += config.precision.params_dtype.itemsize * frozen
        return cls(
            save=checkpoint.save,
            train_iters=loop.train_iters,
            checkpoint_bytes=num_bytes,
            saved=tuple(saved),
            num_kept=num_kept,
            peak_bytes=num_at_most * num_bytes,
        )

    def free_bytes(self) -> int | None:
        """Of the file system of ``--save``, as this machine sees it; None without ``--save``."""
        if not self.save:
            return None
        folder = Path(self.save).absolute()  # made by the run: ask for its first parent that exists
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        return shutil.disk_usage(existing).free

    def describe(self) -> str:
        """One line for a report."""
        one = f"disk: {_gib(self.checkpoint_bytes)} per checkpoint"
        if not self.save:
            return f"{one}; none is written without --save"
        return (
            f"{one}, {len(self.saved)} written and {self.num_kept} kept: "
            f"{_gib(self.num_kept * self.checkpoint_bytes)}, at most {_gib(self.peak_bytes)}"
        )

    def shortfall(self) -> str | None:
        """A warning, if the file system of ``--save`` has too little free space."""
        free = self.free_bytes()
        if free is None or free >= self.peak_bytes:
            return None
        remedy = f"--save-retain-interval {self.train_iters} keeps the last checkpoint alone"
        if 2 * self.checkpoint_bytes > free:  # even then there are two while the last is written
            remedy = "give a folder on a larger file system"
        return (
            f"warning: checkpoints in --save {self.save} will take up to {_gib(self.peak_bytes)}, "
            f"and its file system has {_gib(free)} free; {remedy}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationDiskUse:
    """What ``--activation-disk`` asks of the disks of a node."""

    folders: tuple[str, ...]
    """One per disk."""
    rank_bytes: int
    """Reserved by one rank, in all folders together."""
    ranks_per_node: int
    written_bytes: int
    """By one rank in one step, in its forwards."""
    read_bytes: int
    """By one rank in one step, in its backwards."""
    step_seconds: float
    """As planned."""
    forward_share: float
    """Of a step."""

    @property
    def node_bytes(self) -> int:
        """Reserved by all ranks of a node."""
        return self.rank_bytes * self.ranks_per_node

    @property
    def written_terabytes_per_day(self) -> float:
        """By a node, to each of its disks: what wears them."""
        written = self.written_bytes * self.ranks_per_node / len(self.folders)
        return written / 1e12 * _SECONDS_PER_DAY / self.step_seconds

    @property
    def needed_gb_per_second(self) -> tuple[float, float]:
        """Bandwidth of writing and of reading, of a node, below which a step waits."""
        forward = self.step_seconds * self.forward_share
        backward = self.step_seconds - forward
        per_node = self.ranks_per_node / 1e9
        return per_node * self.written_bytes / forward, per_node * self.read_bytes / backward

    def describe(self) -> str:
        """One line for a report."""
        if not self.rank_bytes:
            return "saved activations on disk: none, the host holds all of them"
        write, read = self.needed_gb_per_second
        return (
            f"saved activations on disk: {_gib(self.rank_bytes)} per rank, "
            f"{_gib(self.node_bytes)} per node; to be hidden, writing needs {write:.2f} GB/s per "
            f"node and reading {read:.2f}; each disk is written "
            f"{self.written_terabytes_per_day:,.2f} TB a day"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.1f} GiB"
