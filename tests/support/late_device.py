"""A device on which nothing ends before it is waited for, for finding races on a CPU.

On a CPU copies, and gloo's collectives soon, end on their own, so a wait that is missing or a
buffer that is reused too soon changes nothing. While :func:`late_device` is entered,

* what a collective receives arrives at its ``wait()``; until then the receive buffer is poisoned;
* a buffer in flight must hold at ``wait()`` what it held after the launch, because the device may
  read or write it at any time between;
* a copy between device and host runs when compute waits for it (:class:`.LateStreams`), and until
  then the memory fetched into is poisoned;
* a request to a disk runs when the host waits for it, or for another one (:class:`.LateThreads`);
* ``backward()`` runs in another thread, as autograd's does for a CUDA device.

Poison is NaN, or the largest integer. Faults are collected and raised at the end: a rank that
stopped at one would leave the others in a collective.
"""

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from megatron_untied.config import MemoryConfig
from megatron_untied.streaming.copy_engine import Copy, CopyEngine
from megatron_untied.streaming.disk import ActivationDisk
from megatron_untied.streaming.host_arena import HostArena, allocate_pageable
from tests.support.late_threads import LateThreads
from tests.support.simulated_streams import LateStreams, run_until

# Positions of the arguments that are received and sent: tensors or lists of them.
COLLECTIVES = {
    "all_to_all_single": ((0,), (1,)),
    "all_gather_single": ((0,), (1,)),
    "all_gather_single_coalesced": ((0,), (1,)),
    "allgather": ((0,), (1,)),
    "reduce_scatter_single": ((0,), (1,)),
    "reduce_scatter_single_coalesced": ((0,), (1,)),
    "allreduce": ((0,), (0,)),
    "allreduce_coalesced": ((0,), (0,)),
    "broadcast": ((0,), (0,)),
    "send": ((), (0,)),
    "recv": ((0,), ()),
}
# Other methods of a process group that move data; nothing here calls them.
NOT_SIMULATED = (
    "_allgather_base",
    "_reduce_scatter_base",
    "_start_coalescing",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "gather",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)


class LateDevice:
    """Operations in flight, and the faults seen so far."""

    def __init__(self):
        self.in_flight: list[LateWork] = []
        self.engines: list[LateCopyEngine] = []
        self.num_launches = 0
        self.faults: list[str] = []

    def launch(self, name: str, original: Callable, group: dist.ProcessGroup, *args) -> "LateWork":
        """Run a collective on buffers of its own, and poison those that it receives in."""
        received, sent = COLLECTIVES[name]
        places = {*received, *sent}
        own = [
            tree_map_only(Tensor, torch.clone, arg) if place in places else arg
            for place, arg in enumerate(args)
        ]
        real = original(group, *own)
        arriving = []
        for place in received:
            arriving += zip(tree_leaves(args[place]), tree_leaves(own[place]), strict=True)
        for buffer, _ in arriving:
            poison_(buffer)
        buffers = [buffer for place in places for buffer in tree_leaves(args[place])]
        work = LateWork(self, name, real, arriving, buffers)
        self.in_flight.append(work)
        self.num_launches += 1
        return work

    def host_arena(self, _: torch.device, memory: MemoryConfig) -> HostArena:
        """Stands for :meth:`.HostArena.for_device`."""
        self.engines.append(LateCopyEngine())
        disk = ActivationDisk.of(memory)
        if disk is not None:
            disk._threads = LateThreads()
        return HostArena(self.engines[-1], allocate_pageable, disk)

    def require_no_fault(self) -> None:
        """Raise if a buffer in flight was written to, or if something was never waited for."""
        for work in self.in_flight:
            self.faults.append(f"{work.name} is never waited for, launched {work.launched}")
        for engine in self.engines:
            self.faults += ["a copy is never waited for"] * len(engine.device_tensors)
        assert not self.faults, "\n".join([f"{len(self.faults)} faults", *self.faults[:3]])


class LateWork(dist.Work):
    """A collective whose results arrive in :meth:`wait`."""

    def __init__(
        self,
        device: LateDevice,
        name: str,
        real: dist.Work | None,
        arriving: list[tuple[Tensor, Tensor]],
        buffers: list[Tensor],
    ):
        """``arriving``: receive buffers, and what arrives in them; ``buffers``: sent ones too."""
        super().__init__()
        self.device, self.name, self.real, self.arriving = device, name, real, arriving
        self.launched = _place()
        self._launched_with = [(buffer, _bytes_of(buffer).clone()) for buffer in buffers]

    @override
    def wait(self, timeout: Any = None) -> bool:
        if self not in self.device.in_flight:
            return True
        self.device.in_flight.remove(self)
        if self.real is not None:  # gloo has waited itself if it was not asked to return a work
            self.real.wait()
        for buffer, before in self._launched_with:
            if not torch.equal(_bytes_of(buffer), before):
                self.device.faults.append(
                    f"{self.name}: a buffer {list(buffer.shape)} in flight is written to before "
                    f"wait(), launched {self.launched}, waited for {_place()}"
                )
        for buffer, arrived in self.arriving:
            buffer.data.copy_(arrived)
        return True


class LateCopyEngine(CopyEngine):
    """Copies that run when they are waited for."""

    def __init__(self):
        super().__init__(LateStreams())

    @override
    def copy_in(
        self,
        host: Tensor,
        device_tensor: Tensor,
        *,
        after: Copy | None,
        leaving: Copy | None = None,
    ) -> Copy:
        if leaving is not None:
            run_until(leaving.done)  # as late as its edge allows
        poison_(device_tensor)
        return super().copy_in(host, device_tensor, after=after, leaving=leaving)


@contextlib.contextmanager
def late_device() -> Iterator[LateDevice]:
    """Make copies, collectives and backward passes of this process late; raises on a fault.

    Build the model inside: its host arena is then one of late copies.
    """
    device = LateDevice()
    group = dist.ProcessGroup
    replaced = {(group, name): _late(device, name) for name in COLLECTIVES}
    replaced |= {(group, name): _refuse(name) for name in NOT_SIMULATED}
    replaced[HostArena, "for_device"] = device.host_arena
    replaced[Tensor, "backward"] = _in_another_thread(Tensor.backward)
    with contextlib.ExitStack() as patches:
        for (owner, name), method in replaced.items():
            patches.enter_context(mock.patch.object(owner, name, method))
        yield device
    device.require_no_fault()


def poison_(x: Tensor) -> None:
    """Overwrite ``x`` with values that no result may depend on."""
    x.data.fill_(math.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)


def _late(device: LateDevice, name: str) -> Callable:
    original = getattr(dist.ProcessGroup, name)
    return lambda group, *args: device.launch(name, original, group, *args)


def _refuse(name: str) -> Callable:
    def refuse(*_: Any) -> None:
        raise NotImplementedError(f"ProcessGroup.{name}: add it to COLLECTIVES")

    return refuse


def _in_another_thread(backward: Callable) -> Callable:
    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        # A new thread has OpenMP's default number, and gradients of embeddings depend on it.
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(
            1, initializer=torch.set_num_threads, initargs=(threads,)
        ) as thread:
            thread.submit(backward, tensor, *args, **kwargs).result()

    return run


def _bytes_of(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).view(torch.uint8)  # NaN is equal to itself


def _place() -> str:
    """The innermost lines of the project in the stack."""
    frames = [f for f in traceback.extract_stack() if "/megatron_untied/" in f.filename]
    names = [f"{f.filename.rpartition('/megatron_untied/')[2]}:{f.lineno}" for f in frames[-3:]]
    return "at " + " > ".join(names)
