"""The content of a checkpoint: the live objects it is made from, and its small state."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_untied.checkpoint.directory import read_json, write_json
from megatron_untied.checkpoint.run_config import from_json, is_a
from megatron_untied.config import ModelConfig
from megatron_untied.sharding.parameter_layout import ParameterLayout
from megatron_untied.sharding.shards import MOMENTS, Shard, Shards

STATE = "state.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far training is."""

    iteration: int = 0
    consumed_samples: int = 0
    data_start: int = 0
    """The iteration after which the order of samples began: of ``--reset-data-position``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    """The live objects of a run: saving reads them, loading writes into them."""

    model_config: ModelConfig
    layouts: Mapping[str, ParameterLayout]
    """Of every parameter, by name."""
    shards: Shards
    """This rank's part of the weights and moments."""
    scheduler: OptimizerParamScheduler | None = None
    groups: ProcessGroupCollection
    frozen: frozenset[str] = frozenset()
    """Parameters that are not trained: checkpoints have no moments of them."""
    leaves_out_frozen: bool = False
    """Whether checkpoints have no values of them either: they are in another checkpoint."""

    def stored_shards(self, *, with_moments: bool) -> Iterator[Shard]:
        """This rank's part of each parameter that is in a checkpoint of this state."""
        for shard in self.shards.shards(with_moments=with_moments):
            if not (self.leaves_out_frozen and shard.name in self.frozen):
                yield shard

    def stored_shapes(self, *, with_moments: bool) -> dict[str, tuple[int, ...]]:
        """Global shapes of the tensors of such a checkpoint, on any rank, by name."""
        shapes = {}
        for name, layout in self.layouts.items():
            is_frozen = name in self.frozen
            if is_frozen and self.leaves_out_frozen:
                continue
            names = tensor_names(name, with_moments=with_moments and not is_frozen)
            shapes |= dict.fromkeys(names, layout.global_shape)
        return shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLayout:
    """Numbers of ranks. Random states belong to ranks, so they fit only the same layout."""

    world: int
    tensor: int
    context: int

    @classmethod
    def of(cls, groups: ProcessGroupCollection) -> "RankLayout":
        """The layout of the running ranks."""
        return cls(world=dist.get_world_size(), tensor=groups.tp.size(), context=groups.cp.size())

    def __str__(self) -> str:
        return (
            f"{self.world} ranks (tensor parallel {self.tensor}, context parallel {self.context})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredState:
    """Everything in a checkpoint except tensors, random states and settings."""

    progress: Progress
    ranks: RankLayout | None
    """The layout whose random states are stored; None if there are none."""
    optimizer_step: int | None
    """Adam's step; None in a checkpoint of weights alone."""
    scheduler: dict[str, Any] | None

    def write(self, folder: Path) -> None:
        """Write it to a checkpoint's folder."""
        write_json(folder / STATE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> "StoredState":
        """Read it from a checkpoint's folder.

        Raises:
            ValueError: the file is missing or not valid.
        """
        path = folder / STATE
        values = read_json(path)
        # Unknown and missing fields, of another version for example, are refused.
        for name, kind in (("progress", Progress), ("ranks", RankLayout)):
            if values.get(name) is not None:
                values[name] = from_json(kind, values[name], path)
        stored = from_json(cls, values, path)
        counts = asdict(stored.progress) | {"optimizer_step": stored.optimizer_step or 0}
        wrong = [f"{name} is {count}" for name, count in counts.items() if count < 0]
        if stored.scheduler is not None:
            wrong += _wrong_settings(stored.scheduler)
        if wrong:
            raise ValueError(
                f"{path} is not a checkpoint's state ({', '.join(wrong)}); choose another with "
                "--ckpt-step"
            )
        return stored


_SCHEDULE = {
    **dict.fromkeys(("max_lr", "min_lr", "start_wd", "end_wd", "init_lr"), float),
    **dict.fromkeys(("num_steps", "lr_warmup_steps", "lr_decay_steps", "wd_incr_steps"), int),
    **dict.fromkeys(("lr_decay_style", "wd_incr_style"), str),
    **{"wsd_decay_steps": int | None, "lr_wsd_decay_style": str | None},
}
"""The settings of megatron-core's schedule, and its position, with their types."""
NOT_IN_STATE = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")
"""Settings of a schedule that are missing in megatron-core's own ``state_dict``."""


def _wrong_settings(schedule: Mapping[str, Any]) -> list[str]:
    """The settings that are missing or have another type.

    Those of other versions of megatron-core may be among them, and earlier checkpoints have none
    that is ``NOT_IN_STATE``.
    """
    wrong = [n for n in _SCHEDULE if n not in schedule and n not in NOT_IN_STATE]
    for name, kind in _SCHEDULE.items():
        value = schedule.get(name)
        is_negative = isinstance(value, int | float) and value < 0
        if name in schedule and (is_negative or not is_a(value, kind)):
            wrong.append(name)
    return [f"{name} is {schedule.get(name)!r}" for name in wrong]


def tensors_of(shard: Shard) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a shard, by name in a checkpoint."""
    yield f"model.{shard.name}", shard.value
    for moment, tensor in shard.moments.items():
        yield f"optimizer.{moment}.{shard.name}", tensor


def tensor_names(parameter: str, *, with_moments: bool) -> list[str]:
    """The names in a checkpoint of a parameter and its moments."""
    moments = MOMENTS if with_moments else ()
    # Of every parameter of the model: tensors_of() names those that this rank has a shard of.
    return [f"model.{parameter}", *(f"optimizer.{moment}.{parameter}" for moment in moments)]
