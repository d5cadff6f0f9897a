"""Run a check on real gloo ranks.

Ranks are processes kept between tests, one pool for each world size: starting them costs seconds,
a check costs milliseconds. They come from a fork server that has imported torch and megatron-core
once, so no thread of pytest's own process is ever forked.
"""

import atexit
import faulthandler
import gc
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import megatron_untied  # noqa: F401

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.ranks_preload"])
_pools: dict[int, "RankPool"] = {}


class RankFailure(AssertionError):
    """A check failed on a rank; the message is that rank's traceback."""


class RankPool:
    """``world_size`` processes joined by gloo, waiting for functions to run."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self._store = tempfile.NamedTemporaryFile(prefix="gloo-store-")
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(rank, world_size, self._store.name, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable, args: tuple, kwargs: dict, timeout: float) -> list[Any]:
        """Results in rank order; raises the first failing rank's traceback."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((function, args, kwargs))
            except BrokenPipeError:
                self._fail(f"rank {rank} died between two checks")
        waiting = dict(enumerate(self._pipes))
        results: dict[int, Any] = {}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting.values()), timeout)
            if not ready:
                self._fail(f"ranks {sorted(waiting)} gave no answer within {timeout} s")
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    ok, value = waiting.pop(rank).recv()
                except EOFError:
                    self._fail(f"rank {rank} died (exit {self._processes[rank].exitcode})")
                if not ok:
                    self._fail(f"on rank {rank} of {self.world_size}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def _fail(self, message: str) -> None:
        self.close()  # the other ranks may be waiting in a collective: this pool is lost
        raise RankFailure(message)

    def close(self) -> None:
        """End the processes; the next check of this world size starts new ones."""
        _pools.pop(self.world_size, None)
        for process in self._processes:
            process.kill()
            process.join()
        self._store.close()


def run_on_ranks(
    function: Callable, world_size: int, *args: Any, timeout: float = 120, **kwargs: Any
) -> list[Any]:
    """Call ``function(group, *args, **kwargs)`` on ``world_size`` ranks: the results by rank.

    ``function`` must be importable (a module's own function) and what it returns picklable.
    Tensors are returned by value.

    Raises:
        RankFailure: with the traceback of a rank that raised, died or gave no answer in time.
    """
    if world_size not in _pools:
        _pools[world_size] = RankPool(world_size)
    return _pools[world_size].run(function, args, kwargs, timeout)


def rank_shard(x: torch.Tensor, group: dist.ProcessGroup, dim: int = 0) -> torch.Tensor:
    """This rank's contiguous part of ``x``: a copy of its own."""
    return x.chunk(group.size(), dim)[group.rank()].clone()


def _serve(rank: int, world_size: int, store: str, pipe) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            answer = True, function(dist.group.WORLD, *args, **kwargs)
        except BaseException:
            answer = False, traceback.format_exc()
        _forget_model_parallel_groups()
        pipe.send(answer)


def _forget_model_parallel_groups() -> None:
    """Give every group but WORLD back: each has threads of its own, and a pool lives long."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()  # models and optimizers are cycles, and as long as one is left so are its groups


@atexit.register
def _close_pools() -> None:
    for pool in list(_pools.values()):
        pool.close()
