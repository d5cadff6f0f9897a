"""Memory of attention and of what layers keep, on the device and on the host, by category.

The buffers are those of the plans that the run itself allocates from
(:mod:`.context_parallel.buffer_plan`, :mod:`.streaming.memory_plan`); here they are only added up.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_untied.config.parameters import first_layer_with_backward
from megatron_untied.context_parallel.buffer_plan import (
    BackwardBuffers,
    Buffer,
    ForwardBuffers,
    Sizes,
    buffers_of,
    head_chunks_buffer,
    ring_buffers,
)
from megatron_untied.context_parallel.kernels import TracedKernel
from megatron_untied.context_parallel.kernels.split_calls import Shape
from megatron_untied.phases import MemoryCategory, Phase
from megatron_untied.planner.geometry import Bytes, Geometry
from megatron_untied.streaming.activation_policy import ActivationPolicy
from megatron_untied.streaming.memory_plan import Held, LayerSizes, MemoryPlan


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
        ring_overlap=geometry.config.parallel.cp_overlap,
    )


# A search plans thousands of settings, which share the buffers of few.
_taken: dict[tuple, dict] = {}


def memory_plan(geometry: Geometry, rank: int, *, evaluates: bool = False) -> MemoryPlan:
    """The plan of a Ulysses rank's streamed layers; ``host_arena()`` counts host and disk.

    ``evaluates``: there is no backward.
    """
    memory, config = geometry.config.memory, geometry.config
    # An evaluation saves as little as layers of which nothing is trained.
    first = first_layer_with_backward(config.model, config.adaptation)
    first = geometry.num_layers if evaluates else first
    own_rows = geometry.residual_tokens // geometry.b
    sizes = LayerSizes(
        attention=attention_sizes(geometry, rank),
        residual=torch.Size((own_rows, geometry.b, geometry.m)),
        tile_size=memory.sequence_tile_size,
        tile_rows=geometry.tile_tokens // geometry.num_token_parts // geometry.b,
        loss_tokens=geometry.loss_tokens,
    )
    known = (id(geometry.schedule), rank, geometry.n, geometry.b, geometry.d, geometry.num_ring)
    known += (
        sizes.attention.ring_overlap,
        sizes.attention.dtype,
        *sizes.residual,
        sizes.tile_size,
        sizes.tile_rows,
    )
    taken = _taken.setdefault((*known, sizes.loss_tokens), {})
    policy = ActivationPolicy.of(memory, geometry.num_layers, first)
    return MemoryPlan(sizes, policy, memory, taken)


def plain_buffers(geometry: Geometry, rank: int) -> dict[Phase, tuple[Buffer, ...]]:
    """The workspace of layers that are not streamed, by phase.

    They free it before the loss only, and their output and its gradient are slots of all heads.
    """
    sizes = attention_sizes(geometry, rank)
    ring, ring_backward = (tuple(ring_buffers(sizes, backward=x)) for x in (False, True))
    out, d_out = (head_chunks_buffer(name, sizes) for name in ("out", "d_out"))
    forward, backward = ForwardBuffers.plan(sizes), BackwardBuffers.plan(sizes)
    return {
        Phase.ATTENTION_FORWARD: (*buffers_of(forward), *ring, out),
        Phase.ATTENTION_BACKWARD: (*buffers_of(backward), *ring_backward, out, d_out),
    }


def bytes_by_category(buffers: Iterable[Buffer]) -> Bytes:
    """Bytes of ``buffers``; those that share a memory count once, at the size of the largest."""
    largest: dict[str, Buffer] = {}
    for buffer in buffers:
        known = largest.get(buffer.memory)
        if known is None or known.num_bytes < buffer.num_bytes:
            largest[buffer.memory] = buffer
    total: Bytes = Bytes()
    for buffer in largest.values():
        total[buffer.category] += buffer.num_bytes
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelBuffers:
    """What one layer's attention allocates beside the workspace."""

    in_forward: tuple[Buffer, ...]
    """In the call of a forward with most alive: its own scratch without the log-sum-exp, and keys
    and values that are there for it alone."""
    at_peak: tuple[Buffer, ...]
    """The same of a backward, and dK and dV so far."""
    home: Buffer
    """dK and dV of this rank's own tokens, all of them."""
    home_while_loading: Buffer
    """What is there of them when the last chunk is loaded."""

    @classmethod
    def of(
        cls, sizes: Sizes, kernel: TracedKernel, *, home_on_host: bool = False
    ) -> "KernelBuffers":
        """Of one rank. ``home_on_host``: dK and dV of its own tokens are there.

        Raises:
            ValueError: a sequence that the kernel cannot index.
        """
        heads = 0 if home_on_host else 2 * sizes.schedule.num_kv_heads
        all_home = sizes.buffer("dk_dv", sizes.n, heads, sizes.home_dtype)
        all_home = replace(all_home, category=MemoryCategory.KERNEL)
        none_home = replace(all_home, numel=0)
        scratch = Buffer(
            name="kernel_fp32_dq", numel=0, dtype=torch.uint8, category=MemoryCategory.KERNEL
        )
        kernel_out, borrowed = (
            replace(scratch, name=name, memory=name) for name in ("kernel_out", "borrowed_kv")
        )
        in_forward, at_peak = (kernel_out,), (scratch, none_home)
        home = while_loading = none_home
        for chunk in sizes.schedule.chunks:
            while_loading = home
            mine = chunk[sizes.rank]
            for call, (queries, keys) in itertools.product(mine.kernel_calls, _ring_calls(sizes)):
                shape = Shape(
                    num_queries=queries,
                    num_keys=keys or sizes.tokens,
                    b=sizes.b,
                    h=call.query_columns.stop - call.query_columns.start,
                    g=len(call.kv_heads),
                    d=sizes.d,
                )
                forward, backward = kernel.most_bytes(
                    shape, sizes.dtype.itemsize, num_heads=len(mine.query_heads), causal=not keys
                )
                pair = 2 * keys * sizes.b * shape.g * sizes.d * sizes.dtype.itemsize
                kv = replace(borrowed, numel=pair)
                calls = (replace(kernel_out, numel=forward), kv), in_forward
                in_forward = max(calls, key=_num_bytes)
                calls = (replace(scratch, numel=backward), kv, home), at_peak
                at_peak = max(calls, key=_num_bytes)
            # One tensor takes the gradients of all heads: the first that arrives allocates it.
            if any(assignment.kv_finished for assignment in chunk):
                home = all_home
        return cls(
            in_forward=in_forward, at_peak=at_peak, home=home, home_while_loading=while_loading
        )


def _ring_calls(sizes: Sizes) -> list[tuple[int, int]]:
    """Queries of a kernel call, and keys that it borrows for itself; of 0 it sees its own."""
    calls = [(sizes.tokens, 0)]
    if sizes.num_ring > 1 and not sizes.ring_overlap:
        half = sizes.tokens // 2
        calls += [(sizes.tokens, half), (half, sizes.tokens)]
    return calls


def _num_bytes(buffers: Iterable[Buffer]) -> int:
    return sum(buffer.num_bytes for buffer in buffers)


@dataclass(frozen=True, kw_only=True)
class StreamedActivations:
    """What streamed layers keep, and what their workspace holds, phase by phase."""

    geometry: Geometry
    policy: ActivationPolicy
    """Which layer keeps what, and where."""
    plan: MemoryPlan
    held: dict[tuple[Phase, int], Held]
    """The workspace by phase and layer, when the layer leaves the phase."""
    kernel: KernelBuffers
    _left: dict[int, Buffer] = field(default_factory=dict)
    """What earlier phases left, under the name of its memory; by id of what was taken."""

    @classmethod
    def of(
        cls, geometry: Geometry, rank: int, layers: Collection[int], *, evaluates: bool = False
    ) -> "StreamedActivations":
        """Of one Ulysses rank, for these of its layers; see :func:`memory_plan`."""
        plan = memory_plan(geometry, rank, evaluates=evaluates)
        return cls(
            geometry=geometry,
            policy=plan.policy,
            plan=plan,
            held={(phase, layer): held for phase, layer, held in plan.workspace(layers)},
            kernel=KernelBuffers.of(
                plan.sizes.attention, geometry.kernel, home_on_host=plan.policy.park
            ),
        )

    def workspace(self, phase: Phase, layer: int) -> tuple[Buffer, ...]:
        """What is alive of it when ``layer`` leaves ``phase``.

        Buffers that the phase takes, and memory that phases before it left there.
        """
        # Made on demand: a search looks at few layers, and at thousands of plans.
        taken = self.plan.taken(phase, layer)
        known = {id(buffer) for buffer in taken}
        left = [x for x in self.held[phase, layer].values() if id(x) not in known]
        for buffer in left:
            if id(buffer) not in self._left:
                self._left[id(buffer)] = replace(buffer, name=buffer.memory, because="")
        return (*taken, *(self._left[id(buffer)] for buffer in left))

    def kept_forward(self, layer: int) -> Bytes:
        """On the device when the forward of ``layer`` ends."""
        return self._on_device(
            inputs=[i for i in range(layer + 1) if self.policy.layers[i].saves_input],
            outputs=[i for i in range(layer + 1) if self.policy.layers[i].keeps_output],
        )

    def kept_backward(self, layer: int) -> Bytes:
        """On the device when the backward of ``layer`` begins, with its group recomputed."""
        first = self.policy.layers[layer].group[0]
        earlier, group = self.policy.layers[:first], range(first, layer + 1)
        return self._on_device(
            inputs=[*(i for i, each in enumerate(earlier) if each.saves_input), *group],
            outputs=[*(i for i, each in enumerate(earlier) if each.keeps_output), *group],
        )

    def _on_device(self, inputs: Sequence[int], outputs: Sequence[int]) -> Bytes:
        """Bytes of the inputs and of the outputs of these layers that are not on the host."""
        geo, policy = self.geometry, self.policy
        num_inputs = sum(not policy.layers[i].input_on_host for i in inputs)
        layers = [policy.layers[i] for i in outputs]
        num_outputs = sum(layer.saves_output and not layer.output_on_host for layer in layers)
        num_lse = sum(not layer.lse_on_host for layer in layers)
        kept = num_inputs * geo.residual_bytes + num_outputs * geo.output_bytes
        return Bytes({MemoryCategory.KEPT: kept + num_lse * geo.lse_bytes})
