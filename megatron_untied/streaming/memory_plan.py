"""Memory of streamed layers through a step: the workspace on the device, and the host arena.

Integers only. The run takes the same buffers, from the same plans; here they are put in the order
of a step, so that what is alive when can be read, printed and added up without running it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from megatron_untied.context_parallel.buffer_plan import (
    BackwardBuffers,
    Buffer,
    ForwardBuffers,
    Sizes,
    Staging,
    buffers_of,
    head_major_slots,
    ring_buffers,
    row_tiles,
    sum_rows,
)
from megatron_untied.context_parallel.exchange import HeadMajorLayout
from megatron_untied.dtypes import accumulation_dtype
from megatron_untied.phases import Phase
from megatron_untied.streaming.activation_policy import ActivationPolicy
from megatron_untied.streaming.host_arena import HostArena, HostSlot

Held = dict[str, Buffer]
"""By memory, the largest buffer that was taken of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """What the buffers of a streamed layer depend on."""

    attention: Sizes
    residual: torch.Size
    """[n, b, m], or with sequence parallelism [n/t, b, m]."""
    tile_size: int
    tile_rows: int
    """The most rows of the residual in one tile on this rank."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """All that the buffers of a layer depend on in one phase."""

    phase: Phase
    reads_input_from_host: bool
    output_on_host: bool
    keeps_output: bool
    park: bool


@dataclass(frozen=True)
class MemoryPlan:
    """What one rank's streamed layers take."""

    sizes: LayerSizes
    policy: ActivationPolicy
    _taken: dict[_Kind, tuple[Buffer, ...]] = field(default_factory=dict, repr=False, compare=False)

    def workspace(self, *, first_step: bool = False) -> Iterator[tuple[Phase, int, Held]]:
        """Phase by phase with its layer: what the workspace holds when the phase ends.

        It gives its memory back before the loss, and in backward after the attention of every
        layer. What the backward of the first layer takes after that is still there in the forward
        of the next step.
        """
        held: Held = {}
        if not first_step:
            self._enter(Phase.QKV_BACKWARD, 0, held)
        yield from self._step(held)

    def taken(self, phase: Phase, layer: int) -> tuple[Buffer, ...]:
        """The buffers that ``layer`` takes in ``phase``."""
        policy, parks = self.policy, self.policy.park
        is_forward = phase in (Phase.ATTENTION_FORWARD, Phase.MLP_FORWARD)
        # In forward the input is on the device, but while it is parked.
        parked_input = phase == Phase.ATTENTION_FORWARD and parks
        kind = _Kind(
            phase,
            parked_input if is_forward else policy.input_on_host(layer),
            policy.output_on_host(layer),
            policy.selective if is_forward else policy.keeps_output(layer),
            parks,
        )
        if kind not in self._taken:
            self._taken[kind] = _taken(self.sizes, kind)
        return self._taken[kind]

    def uses(self) -> Iterator[tuple[Phase, tuple[Buffer, ...]]]:
        """The buffers that are in use in each phase, through a step."""
        for phase, layer, _ in self.workspace():
            if phase != Phase.BACKWARD:  # between layers nothing is taken
                yield phase, self.taken(phase, layer)

    def host_bytes(self) -> int:
        """What the host arena has taken from the system after one step."""
        replay = _HostReplay(self.sizes, self.policy)
        for layer in range(self.policy.num_layers):
            replay.forward(layer)
        for layer in reversed(range(self.policy.num_layers)):
            replay.backward(layer)
        return replay.arena.reserved_bytes

    def _step(self, held: Held) -> Iterator[tuple[Phase, int, Held]]:
        policy = self.policy
        for layer in range(policy.num_layers):
            for phase in (Phase.ATTENTION_FORWARD, Phase.MLP_FORWARD):
                yield self._enter(phase, layer, held)
        held.clear()  # before the loss
        for layer in reversed(range(policy.num_layers)):
            if layer == policy.last_of_group(layer):
                for each in range(policy.first_of_group(layer), layer + 1):
                    if not policy.selective:
                        yield self._enter(Phase.RECOMPUTE_ATTENTION, each, held)
                    if each < layer:
                        yield self._enter(Phase.RECOMPUTE_MLP, each, held)
            yield self._enter(Phase.MLP_BACKWARD, layer, held)
            yield self._enter(Phase.ATTENTION_BACKWARD, layer, held)
            slots = {name: held[name] for name in self._slots_of_layer() if name in held}
            held.clear()
            yield self._enter(Phase.QKV_BACKWARD, layer, held, slots)
            yield Phase.BACKWARD, layer, dict(held)

    def _enter(
        self, phase: Phase, layer: int, held: Held, still_read: Held | None = None
    ) -> tuple[Phase, int, Held]:
        for buffer in self.taken(phase, layer):
            before = held.get(buffer.memory)
            if before is None or before.num_bytes < buffer.num_bytes:
                held[buffer.memory] = buffer
        return phase, layer, held | (still_read or {})

    def _slots_of_layer(self) -> list[str]:
        return [head_major_slots(name, self.sizes.attention).memory for name in ("out", "d_out")]


def _taken(sizes: LayerSizes, kind: _Kind) -> tuple[Buffer, ...]:
    attention, rows = sizes.attention, sizes.tile_rows
    taken: list[Buffer] = []
    if kind.reads_input_from_host:
        taken.append(row_tiles(rows * sizes.residual[1:].numel(), attention.dtype))
    out, d_out = Staging.of_out(attention, rows), Staging.of_d_out(attention, rows)
    match kind.phase:
        case Phase.ATTENTION_FORWARD | Phase.RECOMPUTE_ATTENTION:
            taken += [*buffers_of(ForwardBuffers.plan(attention)), *ring_buffers(attention)]
            if kind.output_on_host:
                taken += out.recv
            elif not kind.keeps_output:
                taken.append(head_major_slots("out", attention))
        case Phase.MLP_FORWARD | Phase.RECOMPUTE_MLP:
            taken += [out.tile] if kind.output_on_host else []
        case Phase.MLP_BACKWARD:
            taken += [out.tile] if kind.output_on_host else []
            taken.append(d_out.tile if kind.park else head_major_slots("d_out", attention))
        case Phase.ATTENTION_BACKWARD:
            plan = BackwardBuffers.plan(attention, sums_on_host=kind.park)
            taken += [*buffers_of(plan), *ring_buffers(attention)]
            taken += out.send if kind.output_on_host else ()
            if kind.park:
                taken += [*d_out.send, *d_out.recv]
                if attention.sums_kv:
                    taken.append(
                        sum_rows(attention, sizes.tile_size * attention.schedule.num_heads)
                    )
        case Phase.QKV_BACKWARD:
            taken += [d_out.tile] if kind.park else []
    return tuple(taken)


class _HostReplay:
    """Reserves from an arena without memory, in the order of ``layer.py`` and ``recompute.py``."""

    def __init__(self, sizes: LayerSizes, policy: ActivationPolicy):
        self.sizes, self.policy, self.arena = sizes, policy, HostArena.for_tracing()
        attention = sizes.attention
        self.layout = HeadMajorLayout(attention.schedule, attention.n, attention.b, attention.d)
        self.inputs: dict[int, HostSlot] = {}
        self.outputs: dict[int, list[HostSlot]] = {}
        self.lse: dict[int, list[HostSlot]] = {}

    def forward(self, layer: int) -> None:
        if self.policy.keeps_input(layer):
            self._keep_input(layer)
        parked = self._rows() if self.policy.park and layer not in self.inputs else None
        output = self._attend(layer, is_kept=self.policy.selective)
        if parked is not None:
            parked.release()
        if self.policy.selective:
            self.outputs[layer] = output
        else:
            _release(output)

    def backward(self, layer: int) -> None:
        policy = self.policy
        if layer == policy.last_of_group(layer):
            for each in range(policy.first_of_group(layer), layer + 1):
                if each not in self.outputs:
                    self.outputs[each] = self._attend(each, is_kept=each < layer)
                if each < layer:
                    self._keep_input(each + 1)
        _release(self.lse.pop(layer, []))
        d_output = self._head_major() if policy.park else []
        if policy.park:
            gradient = self._rows()
            self._sum_over_chunks()
            gradient.release()
        _release(d_output)
        if layer in self.inputs:
            self.inputs.pop(layer).release()
        _release(self.outputs.pop(layer))

    def _sum_over_chunks(self) -> None:
        """Sums of dK and dV of the heads in use."""
        attention, held = self.sizes.attention, {}
        for mine in attention.mine if attention.sums_kv else ():
            if mine.kv_to_load:
                shape = attention.kv_sum_shape(len(mine.kv_to_load))
                held[mine.kv_to_load] = self.arena.reserve(shape, attention.sum_dtype)
            for heads in [heads for heads in held if heads[-1] in mine.kv_finished]:
                held.pop(heads).release()

    def _keep_input(self, layer: int) -> None:
        if self.policy.input_on_host(layer):
            self.inputs[layer] = self._rows()

    def _attend(self, layer: int, *, is_kept: bool) -> list[HostSlot]:
        output = self._head_major() if self.policy.output_on_host(layer) else []
        if is_kept and self.policy.input_on_host(layer):
            attention = self.sizes.attention
            self.lse[layer] = [
                self.arena.reserve(attention.lse_shape(call), accumulation_dtype(attention.dtype))
                for mine in attention.mine
                for call in mine.kernel_calls
            ]
        return output

    def _rows(self) -> HostSlot:
        return self.arena.reserve(self.sizes.residual, self.sizes.attention.dtype)

    def _head_major(self) -> list[HostSlot]:
        chunks = range(len(self.layout.counts))
        shapes = (shape for j in chunks for shape in self.layout.even_blocks(j))
        return [self.arena.reserve(shape, self.sizes.attention.dtype) for shape in shapes]


def _release(slots: list[HostSlot]) -> None:
    for slot in slots:
        slot.release()
