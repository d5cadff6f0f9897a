"""Rendezvous of ranks before they have a process group, and the check that their flags agree.

Everything here goes through the key-value store of the launcher. A process group would need a
timeout, a device and a backend, which come from flags that may differ between ranks.
"""

import functools
import json
import os
import pickle
import sys
from collections.abc import Callable, Container
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron_untied.checkpoint.collective_errors import Gather
from megatron_untied.config.flag_names import flag_of
from megatron_untied.config.run import RunConfig
from megatron_untied.platform.host_names import require_resolvable
from megatron_untied.training.initialize import Launch
from megatron_untied.training.liveness import listed_ranks

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
"""Nodes may start their ranks minutes apart."""

RANK_LOCAL_FIELDS = ("logging.", "data.num_workers", "data.data_cache_path")
"""Prefixes of fields that may differ between ranks: only rank 0 writes logs, and nodes may have
different numbers of cores for data workers and different paths of the sample index cache."""

DERIVED_FIELDS = (
    "model.max_position_embeddings",
    "model.ffn_hidden_size",
    "model.kv_channels",
    "batch.global_batch_size",
    "schedule.lr_decay_iters",
    "distributed.timeout_minutes",
)
"""Fields whose default depends on other flags; listed only if nothing else differs."""

Fields = dict[str, Any]
"""Values by path, such as ``batch.seq_length``."""


def open_store(launch: Launch) -> dist.Store:
    """A key-value store shared by all ranks of this run and by no other run.

    Raises:
        ValueError: the name of the rendezvous host does not resolve.
    """
    initialized = dist.is_initialized()
    store = dist.distributed_c10d._get_default_store() if initialized else _connect(launch)
    # Several runs may use one store in turn. All ranks count them in the same order.
    run = store.add(f"runs of rank {launch.rank}", 1)
    return dist.PrefixStore(f"run {run}", store)


@functools.cache  # the store's host can bind its port only once per process
def _connect(launch: Launch) -> dist.Store:
    if launch.world_size == 1:
        return dist.HashStore()
    host = os.environ["MASTER_ADDR"]  # noqa: TID251 - torchrun passes it in no other way
    say = sys.stderr.write if launch.local_rank == 0 else len
    require_resolvable(host, "MASTER_ADDR", warn=lambda line: say(f"{line}\n"))
    store, _, _ = next(
        rendezvous("env://", launch.rank, launch.world_size, timeout=RENDEZVOUS_TIMEOUT)
    )
    return store


def require_on_first_rank(check: Callable[[], None], launch: Launch, store: dist.Store) -> None:
    """Call ``check`` on rank 0; if it raises ``ValueError``, raise it on every rank."""
    if launch.rank == 0:
        message = ""
        try:
            check()
        except ValueError as error:
            message = str(error)
        store.set("found by rank 0", message)  # also if empty: the other ranks wait for it
    if message := store.get("found by rank 0").decode():
        _barrier(store, "read the error of rank 0", launch)
        raise ValueError(message)


def require_same_config(config: RunConfig, launch: Launch, store: dist.Store) -> None:
    """Check that all ranks were started with the same flags; waits for all of them.

    This comes before any collective. Ranks with different sizes or groups would wait for each other
    until the timeout, or train silently on different settings.

    Raises:
        ValueError: on every rank, with the flags that differ, their values and the ranks.
    """
    mine = _fields(json.loads(json.dumps(asdict(config), default=str)))  # as the store passes it on
    if launch.rank == 0:
        store.set("config", json.dumps(mine))
    first = json.loads(store.get("config"))  # blocks until rank 0 has set it
    differing = {name: mine.get(name) for name in first | mine if mine.get(name) != first.get(name)}
    if differing:
        number = store.add("ranks that differ", 1)  # atomic, so each report has its own key
        store.set(f"difference {number}", json.dumps([launch.rank, differing]))
    _barrier(store, "compared", launch, ranks_that_wait=range(launch.world_size))
    numbers = range(1, store.add("ranks that differ", 0) + 1)
    reports = dict(json.loads(store.get(f"difference {number}")) for number in numbers)
    if reports:
        _barrier(store, "read the differences", launch)
        raise ValueError(_message(first, reports, launch.world_size))


def gather_in(store: dist.Store, launch: Launch) -> Gather:
    """A :data:`Gather` through ``store``, for ranks that have no process group yet."""

    def gather(value: Any) -> list[Any]:
        name = f"gathering {store.add(f'gatherings of rank {launch.rank}', 1)}"
        store.set(f"{name}: rank {launch.rank}", pickle.dumps(value))
        if launch.rank == 0:
            # Rank 0 joins the values, so that each rank reads one key instead of one per rank.
            pickled = [store.get(f"{name}: rank {rank}") for rank in range(launch.world_size)]
            store.set(name, pickle.dumps([pickle.loads(data) for data in pickled]))
        values = pickle.loads(store.get(name))
        _barrier(store, f"{name}: read", launch)
        return values

    return gather


def _barrier(
    store: dist.Store, name: str, launch: Launch, ranks_that_wait: Container[int] = (0,)
) -> None:
    """Record that this rank has arrived; ``ranks_that_wait`` return when all ranks have.

    Rank 0 always waits, because its process may host the store and exit next.
    """
    if store.add(name, 1) == launch.world_size:
        store.set(f"{name}: all", "")
    if launch.rank in ranks_that_wait:
        store.wait([f"{name}: all"])


def _fields(values: dict[str, Any], prefix: str = "") -> Fields:
    """Values of all fields that must agree between ranks, by path."""
    fields: Fields = {}
    for name, value in values.items():
        path = prefix + name
        if isinstance(value, dict):
            fields |= _fields(value, f"{path}.")
        elif not path.startswith(RANK_LOCAL_FIELDS):
            fields[path] = value
    return fields


def _message(first: Fields, reports: dict[int, Fields], world_size: int) -> str:
    # In the order of the fields, each once: all ranks print the same line.
    names = list(dict.fromkeys(name for fields in reports.values() for name in fields))
    listed = [name for name in names if name not in DERIVED_FIELDS] or names
    parts = []
    for name in listed:
        ranks_of: dict[str, list[int]] = {}
        for rank in range(world_size):
            value = reports.get(rank, {}).get(name, first.get(name))
            ranks_of.setdefault(str(value), []).append(rank)
        values = " and ".join(
            f"{value} on {listed_ranks(ranks)}" for value, ranks in ranks_of.items()
        )
        parts.append(f"{flag_of(name)} is {values}")
    return (
        f"ranks were started with different flags: {'; '.join(parts)}. Start all ranks with the "
        "same flags; only logging flags, --num-workers and --data-cache-path may differ"
    )
