"""What attention and the activations of all layers take: the run's own plans, in bytes by cause."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_untied.context_parallel.buffer_plan import (
    BackwardBuffers,
    Buffer,
    ForwardBuffers,
    Sizes,
    buffers_of,
    head_major_slots,
    ring_buffers,
)
from megatron_untied.context_parallel.head_schedule import KernelCall
from megatron_untied.context_parallel.kernels import TracedFlashAttention3
from megatron_untied.context_parallel.kernels.split_calls import Shape
from megatron_untied.phases import MemoryCategory, Phase
from megatron_untied.planner.causes import Bytes, Cause
from megatron_untied.planner.geometry import Geometry
from megatron_untied.streaming.activation_policy import ActivationPolicy
from megatron_untied.streaming.memory_plan import LayerSizes, MemoryPlan


def attention_sizes(geometry: Geometry, rank: int) -> Sizes:
    """What the buffers of one attention call of a Ulysses rank depend on."""
    return Sizes(
        schedule=geometry.schedule,
        rank=rank,
        n=geometry.n,
        b=geometry.b,
        d=geometry.d,
        dtype=geometry.config.precision.params_dtype,
        num_ring=geometry.num_ring,
    )


def memory_plan(geometry: Geometry, rank: int) -> MemoryPlan:
    """The plan of a Ulysses rank's streamed layers."""
    memory, tokens = geometry.config.memory, geometry.n // geometry.num_token_parts
    sizes = LayerSizes(
        attention=attention_sizes(geometry, rank),
        residual=torch.Size((tokens, geometry.b, geometry.m)),
        tile_size=memory.sequence_tile_size,
        tile_rows=geometry.tile // geometry.num_token_parts // geometry.b,
    )
    return MemoryPlan(sizes, ActivationPolicy.of(memory, geometry.num_layers))


def by_cause(buffers: Iterable[Buffer]) -> Bytes:
    """Bytes of some buffers, those of one memory counted once."""
    largest: dict[str, Buffer] = {}
    for buffer in buffers:
        before = largest.get(buffer.memory)
        if before is None or before.num_bytes < buffer.num_bytes:
            largest[buffer.memory] = buffer
    total: Bytes = Bytes()
    for buffer in largest.values():
        total[buffer.category] += buffer.num_bytes
    return total


@dataclass(frozen=True)
class KernelBytes:
    """What the backward of one layer's attention allocates beside the workspace."""

    kernel: int
    """Most that a kernel allocates for itself, with dK and dV that came home before."""
    home: int
    """dK and dV of this rank's own tokens, all of them."""
    home_when_loading: int
    """Of those, what is there when the last chunk is loaded."""

    @classmethod
    def of(cls, sizes: Sizes) -> "KernelBytes":
        """For one rank."""
        home_dtype = BackwardBuffers.plan(sizes).kv_grads.home_dtype
        heads = 2 * sizes.schedule.num_kv_heads
        all_home = sizes.sequence_sharded("home", heads, home_dtype).num_bytes
        most, home, when_loading = 0, 0, 0
        for chunk in sizes.schedule.chunks:
            when_loading = home
            for call in chunk[sizes.rank].kernel_calls:
                most = max(most, _scratch(sizes, call) + home)
            if any(each.kv_finished for each in chunk):
                home = all_home
        return cls(most, home, when_loading)


def _scratch(sizes: Sizes, call: KernelCall) -> int:
    rows, columns = sizes.num_ulysses * sizes.n, call.query_columns
    shape = Shape(
        num_queries=rows,
        num_keys=rows,
        b=sizes.b,
        h=columns.stop - columns.start,
        g=len(call.kv_heads),
        d=sizes.d,
    )
    return TracedFlashAttention3().backward_bytes(shape)


@dataclass(frozen=True)
class PlainActivations:
    """The workspace of layers that are not streamed: given back before the loss only."""

    geometry: Geometry
    rank: int

    def uses(self) -> Iterator[tuple[Phase, tuple[Buffer, ...]]]:
        """The buffers that are in use in each phase."""
        sizes = self._sizes
        out, d_out = (head_major_slots(name, sizes) for name in ("out", "d_out"))
        forward, backward = ForwardBuffers.plan(sizes), BackwardBuffers.plan(sizes)
        ring = tuple(ring_buffers(sizes))
        yield Phase.ATTENTION_FORWARD, (*buffers_of(forward), *ring, out)
        yield Phase.ATTENTION_BACKWARD, (*buffers_of(backward), *ring, out, d_out)

    @cached_property
    def forward(self) -> Bytes:
        """While a layer attends."""
        return by_cause(dict(self.uses())[Phase.ATTENTION_FORWARD])

    @cached_property
    def backward(self) -> Bytes:
        """While a layer's attention goes backward, with dO before it is in slots."""
        allocated = KernelBytes.of(self._sizes)
        rest = {
            Cause.KERNEL: allocated.kernel + allocated.home,
            Cause.SLOTS: self.geometry.output_bytes,
        }
        return by_cause(dict(self.uses())[Phase.ATTENTION_BACKWARD]) + Bytes(rest)

    @property
    def _sizes(self) -> Sizes:
        return attention_sizes(self.geometry, self.rank)


@dataclass(frozen=True)
class StreamedActivations:
    """What streamed layers keep and what their workspace holds, phase by phase."""

    geometry: Geometry
    rank: int

    @cached_property
    def plan(self) -> MemoryPlan:
        """The plan that the run follows."""
        return memory_plan(self.geometry, self.rank)

    @property
    def policy(self) -> ActivationPolicy:
        """Which layer keeps what, where."""
        return self.plan.policy

    def workspace(self, phase: Phase, layer: int) -> Bytes:
        """What the workspace holds when ``layer`` leaves ``phase``; ``BACKWARD`` is after it."""
        return self._workspace[phase, layer]

    @cached_property
    def _workspace(self) -> dict[tuple[Phase, int], Bytes]:
        return {
            (phase, layer): by_cause(held.values()) for phase, layer, held in self.plan.workspace()
        }

    @cached_property
    def kernel(self) -> KernelBytes:
        """What the backward of attention allocates."""
        return KernelBytes.of(self.plan.sizes.attention)

    def kept_forward(self, layer: int) -> Bytes:
        """On the device when the forward of ``layer`` ends."""
        return self._on_device(
            inputs=[i for i in range(layer + 1) if self.policy.layers[i].saves_input],
            outputs=range(layer + 1) if self.policy.selective else (),
        )

    def kept_backward(self, layer: int) -> Bytes:
        """On the device when the backward of ``layer`` begins: its group is complete by then."""
        first = self.policy.layers[layer].group[0]
        own = range(first, layer + 1)
        earlier = [i for i in range(first) if self.policy.layers[i].saves_input]
        outputs = range(layer + 1) if self.policy.selective else own
        return self._on_device(inputs=[*earlier, *own], outputs=outputs)

    def _on_device(self, inputs: Sequence[int], outputs: Sequence[int]) -> Bytes:
        geo, policy = self.geometry, self.policy
        num_inputs = sum(not policy.layers[i].input_on_host for i in inputs)
        num_outputs = sum(
            policy.layers[i].saves_output and not policy.layers[i].output_on_host for i in outputs
        )
        num_lse = sum(not policy.layers[i].lse_on_host for i in outputs)
        kept = num_inputs * geo.residual_bytes + num_outputs * geo.output_bytes
        return Bytes({MemoryCategory.KEPT: kept + num_lse * geo.lse_bytes})


def host_bytes(geometry: Geometry, rank: int = 0) -> int:
    """What the host arena of one Ulysses rank has taken from the system after one step."""
    return memory_plan(geometry, rank).host_bytes()
