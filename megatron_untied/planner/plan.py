"""A run's plan: memory by category and phase, the host's, time, and whether it fits."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron_untied.config.run import RunConfig
from megatron_untied.flops import attention_units
from megatron_untied.phases import MemoryCategory, Phase
from megatron_untied.planner.activations import memory_plan
from megatron_untied.planner.disk import ActivationDiskUse
from megatron_untied.planner.geometry import Bytes, Geometry
from megatron_untied.planner.machine import Machine
from megatron_untied.planner.step import MemorySnapshot, PlainStep, StreamedStep
from megatron_untied.planner.time import StepTime
from megatron_untied.planner.weights import ShardedWeights
from megatron_untied.platform.device import GIB
from megatron_untied.streaming.disk import ActivationDisk
from megatron_untied.streaming.host_arena import HostArena

_LOADER_BYTES = 2 * 28
"""Per token and worker: two micro-batches in shared memory; see ``config/data.py``."""
_WORKER_BYTES = 64 << 20
"""Of a data worker's own: pages that it has written since it was forked."""
_WRITTEN_BYTES = GIB
"""The most of a checkpoint that a rank has in the file cache, on its way to the disk."""
_LONGEST = 1 << 40
"""Tokens at which a search for the longest sequence gives up."""


@dataclass(frozen=True)
class Plan:
    """What ``config`` takes per rank of ``machine``, for the rank with the highest peak.

    Where the limit of disks is "auto" as much goes there as they hold, and time is without them.
    """

    config: RunConfig
    machine: Machine
    every_layer: bool = True
    """Otherwise only the layers that can be the peak, for searches."""

    @cached_property
    def geometry(self) -> Geometry:
        """Sizes of a rank."""
        return Geometry.of(self.config, self.machine)

    @cached_property
    def snapshots(self) -> tuple[MemorySnapshot, ...]:
        """Device memory through a step, of the rank whose peak is highest.

        Raises:
            ValueError: the attention kernel cannot index so many tokens.
        """
        return self._of_highest_rank(evaluates=False)

    @cached_property
    def evaluation_peak(self) -> MemorySnapshot:
        """The highest moment of ``tools/evaluate_context.py``: a forward without an optimizer."""
        return max(self._of_highest_rank(evaluates=True), key=lambda each: each.num_bytes)

    def _of_highest_rank(self, *, evaluates: bool) -> tuple[MemorySnapshot, ...]:
        step = StreamedStep if self.geometry.is_streamed else PlainStep
        by_rank = (
            tuple(step(self.geometry, rank, self.every_layer, evaluates=evaluates).snapshots())
            for rank in distinct_ranks(self.geometry)
        )
        return max(by_rank, key=lambda snapshots: max(each.num_bytes for each in snapshots))

    @cached_property
    def peak(self) -> MemorySnapshot:
        """The highest snapshot of a step."""
        return max(self.snapshots, key=lambda snapshot: snapshot.num_bytes)

    @cached_property
    def phases(self) -> dict[Phase, MemorySnapshot]:
        """The highest snapshot of each phase, in the order of a step."""
        highest: dict[Phase, MemorySnapshot] = {}
        for snapshot in self.snapshots:
            known = highest.get(snapshot.phase)
            if known is None or snapshot.num_bytes > known.num_bytes:
                highest[snapshot.phase] = snapshot
        return highest

    @cached_property
    def host(self) -> Bytes:
        """What one rank takes of its node's memory, in whole pages where it is registered."""
        geometry, batch, workers = self.geometry, self.config.batch, self.config.data.num_workers
        tokens = batch.seq_length * batch.micro_batch_size
        loader = (_LOADER_BYTES * tokens + _WORKER_BYTES) * workers
        weights = ShardedWeights.of(geometry)
        # The samples that are read, 4 bytes per token, and a checkpoint while it is written.
        cached = 4 * tokens * max(1, 2 * workers)
        if self.config.checkpoint.save:
            cached += min(_WRITTEN_BYTES, 12 * weights.units.numel // geometry.num_sharding)
        kept = max((arena.reserved_bytes for arena in self._arenas), default=0)
        others = Bytes({MemoryCategory.LOADER: loader, MemoryCategory.KEPT: kept})
        others[MemoryCategory.FILE_CACHE] = cached
        return weights.on_host() + weights.staged_for_checkpoint() + others

    @cached_property
    def activation_disk(self) -> ActivationDiskUse | None:
        """What saved activations take of disks; None without ``--activation-disk``."""
        if (disk := self._disk) is None:
            return None
        passes = self.geometry.num_micro_batches
        return ActivationDiskUse(
            folders=self.config.memory.activation_disk,
            rank_bytes=disk.reserved_bytes,
            ranks_per_node=self.machine.gpus_per_node,
            written_bytes=disk.written_bytes * passes,
            read_bytes=disk.read_bytes * passes,
            step_seconds=self.time.seconds,
            forward_share=1 / attention_units(self.config.memory, self.geometry.num_layers),
        )

    @cached_property
    def _arenas(self) -> list[HostArena]:
        """Host memory and disk after a step, of each kind of rank; without streamed layers none."""
        if not self.geometry.is_streamed:
            return []
        ranks = distinct_ranks(self.geometry)
        return [memory_plan(self.geometry, rank).host_arena() for rank in ranks]

    @cached_property
    def _disk(self) -> ActivationDisk | None:
        """That of the rank with most on disks, after a step."""
        disks = [arena.disk for arena in self._arenas if arena.disk is not None]
        return max(disks, key=lambda disk: disk.reserved_bytes, default=None)

    @cached_property
    def time(self) -> StepTime:
        """The roofline of a step."""
        memory, moved = self.config.memory, (0, 0)
        if memory.activation_disk and memory.activation_disk_gib != "auto" and self._disk:
            moved = self._disk.written_bytes, self._disk.read_bytes
        return StepTime.of(self.geometry, self.machine, moved)

    @property
    def fits_device(self) -> bool:
        """Whether the peak leaves the device its reserve; raises as :attr:`snapshots` does."""
        return self.peak.num_bytes <= self.machine.device_bytes

    @property
    def fits_host(self) -> bool:
        """Whether all ranks of a node leave the host its reserve, and disks hold the rest."""
        is_on_disk = self._disk is None or self._disk.reserved_bytes <= self.machine.disk_bytes
        return is_on_disk and self.host.total() <= self.machine.host_bytes

    @property
    def fits(self) -> bool:
        """Whether device, host and disks suffice; raises as :attr:`snapshots` does."""
        return self.fits_device and self.fits_host

    def with_settings(self, part: str, **values: Any) -> "Plan":
        """The same with other ``values`` in one part of the configuration, such as "memory"."""
        changed = replace(getattr(self.config, part), **values)
        return replace(self, config=replace(self.config, **{part: changed}))

    def at_length(self, seq_length: int) -> "Plan":
        """The same for another sequence length."""
        return self.with_settings("batch", seq_length=seq_length)


def fits(plan: Plan, *, with_host: bool = True) -> bool:
    """Whether ``plan`` can run; False too where its sequence is too long for the kernel."""
    try:
        return plan.fits_device and (plan.fits_host or not with_host)
    except ValueError:
        return False


def peak_bytes(plan: Plan) -> float:
    """The peak per GPU, infinite where the kernel cannot index the sequence: for comparisons."""
    try:
        return plan.peak.num_bytes
    except ValueError:
        return math.inf


def longest(plan: Plan, *, with_host: bool) -> int:
    """The longest sequence that fits, in steps of :func:`length_step`; 0 if none does."""
    step = length_step(plan)
    quick = replace(plan, every_layer=False)
    low, high = 0, 1  # in steps: low fits, and high is not known to
    while high * step < _LONGEST and fits(quick.at_length(high * step), with_host=with_host):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        longer = quick.at_length(middle * step)
        low, high = (middle, high) if fits(longer, with_host=with_host) else (low, middle)
    return low * step


def length_step(plan: Plan) -> int:
    """1024 tokens, and a multiple of what context and sequence parallelism divide by."""
    parallel = plan.config.parallel
    parts = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    blocks = 2 if parallel.num_ulysses_and_ring[1] > 1 else 1  # a causal ring: two for each rank
    return 1024 * parallel.context_parallel_size * parts * blocks


def distinct_ranks(geometry: Geometry) -> Iterator[int]:
    """One Ulysses rank of each kind: ranks whose chunks have equal sizes take equal memory."""
    seen = set()
    for rank in range(geometry.num_ulysses):
        sizes = []
        for chunk in geometry.schedule.chunks:
            heads = chunk[rank]
            calls = tuple(
                (call.query_columns.start, call.query_columns.stop, len(call.kv_heads))
                for call in heads.kernel_calls
            )
            counts = len(heads.query_heads), len(heads.kv_to_load), len(heads.kv_finished)
            sizes.append((*counts, heads.kv_buffer, calls))
        if tuple(sizes) not in seen:
            seen.add(tuple(sizes))
            yield rank
