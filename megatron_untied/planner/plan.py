"""A run's plan: memory by cause and phase, the host's, time, and whether it fits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_untied.config.run import RunConfig
from megatron_untied.context_parallel.head_schedule import ChunkAssignment
from megatron_untied.phases import Phase
from megatron_untied.planner.activations import host_bytes
from megatron_untied.planner.causes import Bytes, Cause
from megatron_untied.planner.geometry import Geometry
from megatron_untied.planner.machine import Machine
from megatron_untied.planner.step import Moment, PlainStep, StreamedStep
from megatron_untied.planner.time import StepTime
from megatron_untied.planner.weights import ShardedWeights

_LOADER_BYTES = 2 * 28
"""A token, for each worker: two micro-batches in shared memory; see ``config/data.py``."""


@dataclass(frozen=True)
class Plan:
    """What ``config`` would take of each rank of ``machine``: the rank that needs most."""

    config: RunConfig
    machine: Machine
    every_layer: bool = True
    """Otherwise what is highest only, for searches."""

    @cached_property
    def geometry(self) -> Geometry:
        """Sizes of a rank."""
        return Geometry(self.config, self.machine.world_size)

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """Device memory through a step, of the rank whose peak is highest."""
        geometry = self.geometry
        streamed = self.config.memory.recompute_granularity is not None
        kind = StreamedStep if streamed else PlainStep
        ranks = (
            tuple(kind(geometry, rank, self.every_layer).moments())
            for rank in unlike_ranks(geometry)
        )
        return max(ranks, key=lambda moments: max(each.num_bytes for each in moments))

    @cached_property
    def peak(self) -> Moment:
        """The highest moment of a step."""
        return max(self.moments, key=lambda moment: moment.num_bytes)

    @cached_property
    def phases(self) -> dict[Phase, Moment]:
        """The highest moment of each phase, in the order of a step."""
        highest: dict[Phase, Moment] = {}
        for moment in self.moments:
            before = highest.get(moment.phase)
            if before is None or moment.num_bytes > before.num_bytes:
                highest[moment.phase] = moment
        return highest

    @cached_property
    def host(self) -> Bytes:
        """What one rank takes of its node's memory."""
        geometry, data = self.geometry, self.config.data
        tokens = self.config.batch.seq_length * self.config.batch.micro_batch_size
        loader = Bytes({Cause.LOADER: _LOADER_BYTES * tokens * data.num_workers})
        stash = 0
        if self.config.memory.recompute_granularity is not None:
            stash = max(host_bytes(geometry, rank) for rank in unlike_ranks(geometry))
        return ShardedWeights(geometry).on_host() + loader + Bytes({Cause.KEPT: stash})

    @cached_property
    def time(self) -> StepTime:
        """The roofline of a step."""
        return StepTime(self.geometry, self.machine)

    @property
    def fits_device(self) -> bool:
        """Whether the peak leaves the device its reserve.

        Raises:
            ValueError: the attention kernel cannot index so many tokens.
        """
        return self.peak.num_bytes <= self.machine.device_bytes

    @property
    def fits_host(self) -> bool:
        """Whether all ranks of a node leave the host its reserve."""
        return self.host.total() <= self.machine.host_bytes

    @property
    def fits(self) -> bool:
        """Whether it can run."""
        return self.fits_device and self.fits_host

    def at_length(self, seq_length: int) -> "Plan":
        """The same for another sequence length."""
        batch = replace(self.config.batch, seq_length=seq_length)
        return replace(self, config=replace(self.config, batch=batch))


def fits(plan: Plan, *, with_host: bool = True) -> bool:
    """Whether ``plan`` can run, also where its sequence is too long for the kernel's indices."""
    try:
        return plan.fits_device and (plan.fits_host or not with_host)
    except ValueError:
        return False


def longest(plan: Plan, *, with_host: bool) -> int:
    """The longest sequence that fits, in steps of what the ranks need it to be a multiple of.

    0 if none does.
    """
    step = length_step(plan)
    quick = replace(plan, every_layer=False)
    low, high = 0, 1
    while fits(quick.at_length(high * step), with_host=with_host) and high * step < 1 << 40:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        longer = quick.at_length(middle * step)
        low, high = (middle, high) if fits(longer, with_host=with_host) else (low, middle)
    return low * step


def length_step(plan: Plan) -> int:
    """1024 tokens, and a multiple of what context and sequence parallelism divide by."""
    geometry = plan.geometry
    blocks = 2 if geometry.num_ring > 1 else 1
    return 1024 * geometry.p * geometry.num_token_parts * blocks


def unlike_ranks(geometry: Geometry) -> Iterator[int]:
    """One Ulysses rank of each kind: those whose chunks have the same sizes need the same."""
    seen = set()
    for rank in range(geometry.num_ulysses):
        sizes = tuple(_sizes(chunk[rank]) for chunk in geometry.schedule.chunks)
        if sizes not in seen:
            seen.add(sizes)
            yield rank


def _sizes(heads: ChunkAssignment) -> tuple:
    calls = [
        (call.query_columns.start, call.query_columns.stop, len(call.kv_heads))
        for call in heads.kernel_calls
    ]
    counts = map(len, (heads.query_heads, heads.kv_to_load, heads.kv_finished))
    return *counts, heads.kv_buffer, *calls
