"""What a run's checkpoints take on disk: bytes of one, how many there are at a time, what is free.

Weights and both moments are stored in fp32, without the padding of the vocabulary, whatever the
ranks and their sharding.
"""

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron_untied.config.run import RunConfig
from megatron_untied.planner.machine import GIB
from megatron_untied.planner.weights import num_parameters

_PARAMETER_BYTES = 12
_RANK_BYTES = 20 << 10
"""States of a rank's random generators."""


@dataclass(frozen=True)
class Disk:
    """Checkpoints of ``config`` on ``world_size`` ranks that start after ``done`` iterations."""

    config: RunConfig
    world_size: int
    done: int = 0

    @property
    def checkpoint_bytes(self) -> int:
        """Of one checkpoint."""
        parameters = num_parameters(self.config.model)
        return _PARAMETER_BYTES * parameters + _RANK_BYTES * self.world_size

    @cached_property
    def saved(self) -> list[int]:
        """Iterations after which a checkpoint is written."""
        loop, checkpoint = self.config.loop, self.config.checkpoint
        last = loop.train_iters
        if loop.exit_interval:
            last = min(last, (self.done // loop.exit_interval + 1) * loop.exit_interval)
        if not checkpoint.save or loop.skip_train or last <= self.done:
            return []
        interval = checkpoint.save_interval or last
        first = (self.done // interval + 1) * interval
        return sorted({*range(first, last + 1, interval), last})

    @property
    def num_kept(self) -> int:
        """Checkpoints that are there when the run has ended."""
        return self._num_retained(self.saved[:-1]) + len(self.saved[-1:])

    @property
    def most_bytes(self) -> int:
        """While the last checkpoint is written: the one before goes only when it is complete."""
        before = self._num_retained(self.saved[:-2]) + len(self.saved[-2:])
        return before * self.checkpoint_bytes

    def free_bytes(self) -> int | None:
        """Of the file system of ``--save``, as this machine sees it; None without ``--save``."""
        if not self.config.checkpoint.save:
            return None
        folder = Path(self.config.checkpoint.save).absolute()
        there = next(path for path in (folder, *folder.parents) if path.exists())
        return shutil.disk_usage(there).free

    def describe(self) -> str:
        """One line for a report."""
        one = f"disk: {_gib(self.checkpoint_bytes)} per checkpoint"
        if not self.config.checkpoint.save:
            return f"{one}; none is written without --save"
        return (
            f"{one}, {len(self.saved)} written and {self.num_kept} kept: "
            f"{_gib(self.num_kept * self.checkpoint_bytes)}, at most {_gib(self.most_bytes)}"
        )

    def shortfall(self) -> str | None:
        """A warning, if the file system of ``--save`` has too little free space."""
        free = self.free_bytes()
        if free is None or free >= self.most_bytes:
            return None
        save = self.config.checkpoint.save
        return (
            f"warning: checkpoints in --save {save} will take up to {_gib(self.most_bytes)}, and "
            f"its file system has {_gib(free)} free; {self._remedy(free)}"
        )

    def _remedy(self, free: int) -> str:
        if 2 * self.checkpoint_bytes > free:
            return "give a folder on a larger file system"
        only_last = self.config.loop.train_iters
        return f"--save-retain-interval {only_last} keeps the last checkpoint alone"

    def _num_retained(self, iterations: list[int]) -> int:
        """Those of ``iterations`` that stay when later ones are complete."""
        retain = self.config.checkpoint.save_retain_interval
        return sum(not retain or iteration % retain == 0 for iteration in iterations)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.1f} GiB"
