"""Ranks before they have a process group: where they meet, and whether they want the same."""

import functools
import json
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron_untied.checkpoint.collective_errors import Gather
from megatron_untied.checkpoint.compatibility import name_of_setting
from megatron_untied.config.run import RunConfig
from megatron_untied.platform.host_names import require_resolvable
from megatron_untied.training.initialize import Launch
from megatron_untied.training.liveness import listed_ranks

LATECOMERS = timedelta(minutes=10)
"""Nodes may start their ranks minutes apart."""

OF_A_RANK_ALONE = ("logging.", "data.num_workers", "data.data_cache_path")
"""What may differ: rank 0 alone writes logs, and a node prepares samples with the cores it has and
keeps their indices where it can."""

DERIVED = (
    "model.max_position_embeddings",
    "model.ffn_hidden_size",
    "model.kv_channels",
    "batch.global_batch_size",
    "schedule.lr_decay_iters",
    "distributed.timeout_minutes",
)
"""What follows from other flags where it is not given: no news beside one of those."""

Fields = dict[str, Any]


_FLAGS = {
    "check_for_nan": "--no-check-for-nan-in-loss-and-grad",
    "cp_overlap": "--no-cp-overlap",
    "heads_per_chunk": "--cp-heads-per-chunk",
    "backend": "--distributed-backend",
    "timeout_minutes": "--distributed-timeout-minutes",
}
"""Flags of fields that are not spelled as their field is."""


def open_store(launch: Launch) -> dist.Store:
    """Keys and values that all ranks of this run see, and no other run.

    Raises:
        ValueError: the name of the host where ranks meet does not resolve.
    """
    initialized = dist.is_initialized()
    store = dist.distributed_c10d._get_default_store() if initialized else _meet(launch)
    # Several runs of one process group use one store; each rank counts them alike.
    run = store.add(f"runs of rank {launch.rank}", 1)
    return dist.PrefixStore(f"run {run}", store)


@functools.cache  # its host listens at one port, once
def _meet(launch: Launch) -> dist.Store:
    if launch.world_size == 1:
        return dist.HashStore()
    host = os.environ["MASTER_ADDR"]  # noqa: TID251 - torchrun tells it in no other way
    say = sys.stderr.write if launch.local_rank == 0 else len
    require_resolvable(host, "MASTER_ADDR", say=lambda line: say(f"{line}\n"))
    store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size, timeout=LATECOMERS))
    return store


def require_on_first_rank(check: Callable[[], None], launch: Launch, store: dist.Store) -> None:
    """Call ``check`` on rank 0; raises on every rank the ``ValueError`` that it raised there."""
    if launch.rank == 0:
        message = ""
        try:
            check()
        except ValueError as error:
            message = str(error)
        store.set("found by rank 0", message)
    if message := store.get("found by rank 0").decode():
        _wait_until_all_know(store, launch)
        raise ValueError(message)


def require_same_config(config: RunConfig, launch: Launch, store: dist.Store) -> None:
    """Check that all ranks were started with the same flags; waits for all of them.

    Before any collective: ranks that disagree about sizes or groups would wait for each other, or
    worse, not notice.

    Raises:
        ValueError: on every rank, with the flags that differ, their values and the ranks.
    """
    mine = _fields(config)
    if launch.rank == 0:
        store.set("config", json.dumps(mine))
    first = json.loads(store.get("config"))
    differing = {name: mine.get(name) for name in first | mine if mine.get(name) != first.get(name)}
    if differing:
        number = store.add("ranks that differ", 1)
        store.set(f"difference {number}", json.dumps([launch.rank, differing]))
    _arrive(store, "have compared", launch)
    store.wait(["have compared: all"])
    numbers = range(1, store.add("ranks that differ", 0) + 1)
    reports = dict(json.loads(store.get(f"difference {number}")) for number in numbers)
    if reports:
        _wait_until_all_know(store, launch)
        raise ValueError(_message(first, reports, launch.world_size))


def gather_in(store: dist.Store, launch: Launch) -> Gather:
    """:data:`Gather` for ranks that have met in ``store`` and have no process group yet."""

    def gather(value: Any) -> list[Any]:
        name = f"gathering {store.add(f'gatherings of rank {launch.rank}', 1)}"
        store.set(f"{name}: rank {launch.rank}", pickle.dumps(value))
        if launch.rank == 0:
            each = [store.get(f"{name}: rank {rank}") for rank in range(launch.world_size)]
            store.set(name, pickle.dumps([pickle.loads(one) for one in each]))
        values = pickle.loads(store.get(name))
        _arrive(store, f"{name}: read", launch)
        if launch.rank == 0:  # it may be the host of the store
            store.wait([f"{name}: read: all"])
        return values

    return gather


def _wait_until_all_know(store: dist.Store, launch: Launch) -> None:
    _arrive(store, "know", launch)
    if launch.rank == 0:  # it may be the host of the store
        store.wait(["know: all"])


def _arrive(store: dist.Store, where: str, launch: Launch) -> None:
    if store.add(where, 1) == launch.world_size:
        store.set(f"{where}: all", "")


def _fields(config: RunConfig) -> Fields:
    """Every setting that must be the same, by its place such as ``batch.seq_length``."""
    fields: Fields = {}

    def flatten(prefix: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                flatten(f"{prefix}{name}.", value)
            else:
                fields[prefix + name] = value

    flatten("", json.loads(json.dumps(asdict(config), default=str)))
    return {name: fields[name] for name in fields if not name.startswith(OF_A_RANK_ALONE)}


def _message(first: Fields, reports: dict[int, Fields], world_size: int) -> str:
    names = list(dict.fromkeys(name for fields in reports.values() for name in fields))
    told = [name for name in names if name not in DERIVED] or names
    parts = []
    for name in told:
        ranks_of: dict[str, list[int]] = {}
        for rank in range(world_size):
            value = reports.get(rank, {}).get(name, first.get(name))
            ranks_of.setdefault(str(value), []).append(rank)
        values = " and ".join(
            f"{value} on {listed_ranks(ranks)}" for value, ranks in ranks_of.items()
        )
        parts.append(f"{flag_of(name)} is {values}")
    return (
        f"ranks were started with different flags: {'; '.join(parts)}. Start all of them with the "
        "same; only logging flags, --num-workers and --data-cache-path may differ"
    )


def flag_of(field: str) -> str:
    """The flag that sets a field of the configuration, such as ``batch.seq_length``."""
    section, _, name = field.rpartition(".")
    if section.startswith("model"):
        return name_of_setting(field.removeprefix("model."))
    return _FLAGS.get(name) or "--" + name.replace("_", "-")
