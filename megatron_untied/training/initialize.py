"""From a process that torchrun started to process groups and seeds."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_untied.checkpoint.random_state import seed_generators
from megatron_untied.config import ParallelConfig
from megatron_untied.config.run import DistributedConfig, RunConfig
from megatron_untied.platform import device

LARGEST_PORT = 65535


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What the launcher told this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def read_launch() -> Launch:
    """What torchrun said; a process started by hand is the only one.

    Raises:
        UserError: a variable is missing, as where a scheduler sets RANK for a whole node, or has a
            value that cannot be.
    """
    environment = os.environ  # noqa: TID251 - torchrun tells a process its rank in no other way
    if "RANK" not in environment:
        return Launch()
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK"]
    if environment.get("WORLD_SIZE") != "1":
        names += ["MASTER_ADDR", "MASTER_PORT"]
    told = {name: environment.get(name, "") for name in names}
    try:
        rank, world_size, local_rank = (int(told[name]) for name in names[:3])
        possible = 0 <= rank < world_size and 0 <= local_rank and all(told.values())
        possible = possible and 0 <= int(told.get("MASTER_PORT", 0)) <= LARGEST_PORT
    except ValueError:
        possible = False
    if not possible:
        said = ", ".join(f"{name} {value or 'not set'}" for name, value in told.items())
        raise UserError(
            f"error: the environment gives this process no rank: {said}. Start ranks with "
            "torchrun, which sets these; for a single rank without it, unset RANK"
        )
    return Launch(rank=rank, world_size=world_size, local_rank=local_rank)


def initialize(
    config: RunConfig, launch: Launch, store: dist.Store | None = None
) -> ProcessGroupCollection:
    """Join the other ranks, split them into groups and seed every generator.

    Collective over all ranks, which have met in ``store``. A process group that exists already is
    used as it is.
    """
    device.select_device(launch.local_rank)
    if not dist.is_initialized():
        join(config.distributed, launch, store)
    groups = make_groups(config.parallel, config.distributed)
    seed_generators(config.seed)
    return groups


def join(distributed: DistributedConfig, launch: Launch, store: dist.Store) -> None:
    """Make the process group of all ranks; collective over them."""
    dist.init_process_group(
        distributed.backend,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(minutes=distributed.timeout_minutes),
        store=store,
    )


def make_groups(parallel: ParallelConfig, distributed: DistributedConfig) -> ProcessGroupCollection:
    """The groups of tensor, context and data parallelism; collective over all ranks.

    Neighboring ranks share a tensor-parallel group, then a context-parallel one, and in that the
    ranks that trade sequence for heads before those of a ring, so that the groups that exchange
    most sit closest.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        hierarchical_context_parallel_sizes=parallel.hierarchical_context_parallel_sizes,
        distributed_timeout_minutes=distributed.timeout_minutes,
        create_gloo_process_groups=False,
    )
    return ProcessGroupCollection.use_mpu_process_groups()


class UserError(SystemExit):
    """A user's mistake that one line explains; the line is its ``code``."""


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Ends the process with a message instead of a traceback from every rank.

    For places where a ``ValueError``, a file that is missing or cannot be used, a missing optional
    package or a loss that is not finite is due to what the user chose.
    """
    try:
        yield
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        raise UserError(f"error: {error}") from error
