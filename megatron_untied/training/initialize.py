"""From a process started by torchrun to process groups and seeds; and one-line errors."""

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
    """Rank and world size, as passed by the launcher."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def read_launch() -> Launch:
    """Read torchrun's environment variables; without them the process is the only rank.

    Raises:
        UserError: a variable is missing or invalid, such as where a scheduler sets RANK per node.
    """
    environment = os.environ  # noqa: TID251 - torchrun passes them in no other way
    if "RANK" not in environment:
        return Launch()
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK"]
    if environment.get("WORLD_SIZE") != "1":
        names += ["MASTER_ADDR", "MASTER_PORT"]
    values = {name: environment.get(name, "") for name in names}
    try:
        rank, world_size, local_rank = (int(values[name]) for name in names[:3])
        is_valid = 0 <= rank < world_size and 0 <= local_rank and all(values.values())
        is_valid = is_valid and 0 <= int(values.get("MASTER_PORT", 0)) <= LARGEST_PORT
    except ValueError:
        is_valid = False
    if not is_valid:
        listed = ", ".join(f"{name} {value or 'not set'}" for name, value in values.items())
        raise UserError(
            f"error: the environment gives this process no rank: {listed}. Start ranks with "
            "torchrun, which sets these; for a single rank without it, unset RANK"
        )
    return Launch(rank=rank, world_size=world_size, local_rank=local_rank)


def initialize(
    config: RunConfig, launch: Launch, store: dist.Store | None = None
) -> ProcessGroupCollection:
    """Create the process group of all ranks, split it into groups, and seed all generators.

    Collective over all ranks.

    Args:
        config: the whole run.
        launch: this rank.
        store: shared by all ranks; not used if a process group exists already.
    """
    device.select_device(launch.local_rank)  # before nccl, which binds to the current device
    if not dist.is_initialized():
        # Without device_id, though torch may ask for it: with it each of megatron-core's groups is
        # split off at once, with a communicator and its device memory, also if it is never used.
        dist.init_process_group(
            config.distributed.backend,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timedelta(minutes=config.distributed.timeout_minutes),
            store=store,
        )
    groups = make_groups(config.parallel, config.distributed)
    seed_generators(config.seed)  # after the groups: tensor-parallel ranks get different seeds
    return groups


def make_groups(parallel: ParallelConfig, distributed: DistributedConfig) -> ProcessGroupCollection:
    """Create the tensor-, context- and data-parallel groups; collective over all ranks.

    The groups that communicate most get neighboring ranks: tensor parallelism first, then within
    context parallelism the Ulysses groups, then the rings, and data parallelism last.
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
    """An error of the user, whose message of one line is the exception's ``code``."""


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Turn errors of the user into :class:`UserError`: one line instead of a traceback per rank.

    Use it only around code where a ``ValueError``, an ``OSError``, a missing package or a loss that
    is not finite results from flags or files. Elsewhere these are bugs and keep their traceback.
    """
    try:
        yield
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        raise UserError(f"error: {error}") from error
