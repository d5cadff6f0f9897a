"""Memory of streamed layers through a step: the workspace on the device, and the host arena.

Integers only. The run takes the same buffers, from the same plans. Here they are put in the order
of a step, so that live buffers can be listed, printed and added up without running it.
"""

import math
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megatron_untied.config import MemoryConfig
from megatron_untied.context_parallel.buffer_plan import (
    BackwardBuffers,
    Buffer,
    ForwardBuffers,
    Sizes,
    Staging,
    buffers_of,
    head_chunks_buffer,
    kv_tile,
    ring_buffers,
    row_tiles,
    sum_rows,
)
from megatron_untied.context_parallel.exchange import HeadChunkLayout
from megatron_untied.dtypes import accumulation_dtype
from megatron_untied.phases import Phase
from megatron_untied.streaming.activation_policy import ActivationPolicy
from megatron_untied.streaming.host_arena import HostArena, HostSlot

Held = dict[str, Buffer]
"""By name of the memory, the largest buffer that was taken from it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """What the buffers of a streamed layer depend on."""

    attention: Sizes
    residual: torch.Size
    """[n, b, m], or with sequence parallelism [n/t, b, m]."""
    tile_size: int
    tile_rows: int
    """The most rows of the residual in one tile on this rank."""
    loss_tokens: int
    """The most tokens of the residual in one chunk of the loss on this rank."""

    def row_tiles(self, memory: str = "row_tiles") -> Buffer:
        """What a residual on the host passes through."""
        rows, *rest = self.residual
        numel, num_tiles = self.tile_rows * math.prod(rest), -(-rows // self.tile_rows)
        return row_tiles(numel, num_tiles, self.attention.dtype, memory)

    def loss_tiles(self) -> Buffer:
        """The same in the loss."""
        num_chunks = -(-self.residual[:-1].numel() // self.loss_tokens)
        numel = self.loss_tokens * self.residual[-1]
        return row_tiles(numel, num_chunks, self.attention.dtype)


@dataclass(frozen=True, slots=True)
class _LayerPhase:
    """All that the buffers of a layer depend on in one phase."""

    phase: Phase
    passes_rows: bool
    """Whether the layer's input is read from the host, or its output written there."""
    output_on_host: bool
    saves_output: bool
    park: bool


@dataclass(frozen=True)
class MemoryPlan:
    """What one rank's streamed layers take."""

    sizes: LayerSizes
    policy: ActivationPolicy
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """Names the disks, if there are any."""
    _taken: dict[_LayerPhase, tuple[Buffer, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def workspace(self, layers: Collection[int] | None = None) -> Iterator[tuple[Phase, int, Held]]:
        """Each phase with its layer: what the workspace holds when the phase ends.

        It frees its memory before the loss, and in backward after the attention of every layer and
        at its end; if the policy parks, also before attention.

        ``layers``: the only ones to look at, ascending, with the first of each kind among them.
        """
        policy, held = self.policy, {}
        layers = range(len(policy.layers)) if layers is None else layers
        for layer in layers:
            for phase in (Phase.ATTENTION_FORWARD, Phase.MLP_FORWARD):
                yield phase, layer, self._take(phase, layer, held)
        held.clear()  # before the loss
        if policy.park:
            loss_tiles = self.sizes.loss_tiles()
            held[loss_tiles.memory] = loss_tiles
        for layer in reversed([layer for layer in layers if layer in policy.with_backward]):
            group = policy.layers[layer].group
            for member in group if layer == group[-1] else ():
                if not policy.layers[member].keeps_output:
                    phase = Phase.RECOMPUTE_ATTENTION
                    yield phase, member, self._take(phase, member, held)
                if member < layer:
                    phase = Phase.RECOMPUTE_MLP
                    yield phase, member, self._take(phase, member, held)
            yield Phase.MLP_BACKWARD, layer, self._take(Phase.MLP_BACKWARD, layer, held)
            if policy.park:
                held.clear()
            phase = Phase.ATTENTION_BACKWARD
            yield phase, layer, self._take(phase, layer, held)
            # The workspace drops O and dO here, but the layer still references their slots.
            names = [head_chunks_buffer(x, self.sizes.attention).memory for x in ("out", "d_out")]
            slots = {name: held[name] for name in names if name in held}
            held.clear()
            yield Phase.QKV_BACKWARD, layer, self._take(Phase.QKV_BACKWARD, layer, held) | slots
            held.clear()

    def taken(self, phase: Phase, layer: int) -> tuple[Buffer, ...]:
        """The buffers that ``layer`` takes in ``phase``."""
        policy, parks = self.policy.layers[layer], self.policy.park
        is_forward = phase in (Phase.ATTENTION_FORWARD, Phase.MLP_FORWARD)
        passes_rows = parks if is_forward else policy.input_on_host
        if phase is Phase.RECOMPUTE_MLP:  # it makes the next layer's input
            passes_rows = passes_rows or self.policy.layers[layer + 1].input_on_host
        kind = _LayerPhase(
            phase,
            passes_rows,
            policy.output_on_host,
            policy.keeps_output if is_forward else policy.saves_output,
            parks,
        )
        if kind not in self._taken:
            self._taken[kind] = _taken(self.sizes, kind)
        return self._taken[kind]

    def host_arena(self) -> HostArena:
        """The host arena after one step, with its disk: it has counted bytes, and has none."""
        replay = _HostReplay(self)
        for layer in range(len(self.policy.layers)):
            replay.forward(layer)
        for layer in reversed(self.policy.with_backward):
            replay.backward(layer)
        return replay.arena

    def _take(self, phase: Phase, layer: int, held: Held) -> Held:
        """Take the buffers of a phase; returns what is held then."""
        for buffer in self.taken(phase, layer):
            before = held.get(buffer.memory)
            if before is None or before.num_bytes < buffer.num_bytes:
                held[buffer.memory] = buffer
        return dict(held)


def _taken(sizes: LayerSizes, kind: _LayerPhase) -> tuple[Buffer, ...]:
    attention, rows = sizes.attention, sizes.tile_rows
    taken: list[Buffer] = []
    if kind.passes_rows:
        taken.append(sizes.row_tiles())
    if kind.park and kind.phase in (Phase.MLP_BACKWARD, Phase.QKV_BACKWARD):
        taken.append(sizes.row_tiles("gradient_tiles"))
    out, d_out = (Staging.plan(name, attention, rows) for name in ("out", "d_out"))
    match kind.phase:
        case Phase.ATTENTION_FORWARD | Phase.RECOMPUTE_ATTENTION:
            taken += [*buffers_of(ForwardBuffers.plan(attention)), *ring_buffers(attention)]
            if kind.output_on_host:
                taken += out.recv
            elif not kind.saves_output:
                taken.append(head_chunks_buffer("out", attention))  # until the MLP has read it
        case Phase.MLP_FORWARD | Phase.RECOMPUTE_MLP:
            taken += [out.tile] if kind.output_on_host else []
        case Phase.MLP_BACKWARD:
            taken += [out.tile] if kind.output_on_host else []
            taken.append(d_out.tile if kind.park else head_chunks_buffer("d_out", attention))
        case Phase.ATTENTION_BACKWARD:
            plan = BackwardBuffers.plan(attention, sums_on_host=kind.park)
            taken += [*buffers_of(plan), *ring_buffers(attention, backward=True)]
            taken += out.send if kind.output_on_host else ()  # O is sent once more
            if kind.park:
                taken += [*d_out.send, *d_out.recv]  # dO is sent, dQ received
                taken += [sum_rows(attention, sizes.tile_size)] if attention.sums_kv else []
        case Phase.QKV_BACKWARD:
            taken += [d_out.tile, kv_tile(attention, rows)] if kind.park else []
    return tuple(taken)


class _ChunkGradients(NamedTuple):
    """What a chunk of a parked backward does to dK and dV on the host."""

    kv_to_load: range
    kv_finished: Container[int]
    sums_shape: Sequence[int] | None
    """Of fp32 sums that begin with these heads; None: no sums."""
    home_shape: Sequence[int] | None
    """Of what arrives complete for this rank's tokens, dK and as much dV."""

    @classmethod
    def of(cls, sizes: Sizes, number: int) -> "_ChunkGradients":
        mine, loaded = sizes.mine[number], sizes.mine[number].kv_to_load
        finished = sum(len(each.kv_finished) for each in sizes.schedule.chunks[number])
        return cls(
            loaded,
            mine.kv_finished,
            sizes.kv_sum_shape(len(loaded)) if sizes.sums_kv and loaded else None,
            (sizes.n, sizes.b, finished, sizes.d) if finished else None,
        )


class _HostReplay:
    """Reserves from an arena without memory, in the order of ``layer.py``.

    The order matters: a reservation reuses released memory only of its own size.
    """

    def __init__(self, plan: MemoryPlan):
        self.sizes, self.policy = plan.sizes, plan.policy
        self.arena = HostArena.for_tracing(plan.memory)
        self.residual = plan.sizes.residual, plan.sizes.attention.dtype
        attention = plan.sizes.attention
        layout = HeadChunkLayout(attention.schedule, attention.n, attention.b, attention.d)
        self.head_chunks = [x for j in range(len(layout.counts)) for x in layout.even_blocks(j)]
        self.gradients = [_ChunkGradients.of(attention, j) for j in range(len(attention.mine))]
        self.inputs: dict[int, HostSlot] = {}
        self.outputs: dict[int, list[HostSlot]] = {}
        self.lse: dict[int, list[list[HostSlot]]] = {}  # by chunk
        self.last: list[HostSlot] = []  # of x and O of the last layer
        # Between layers, then its gradient.
        self.current = self.arena.reserve(*self.residual) if self.policy.park else None

    def forward(self, layer: int) -> None:
        policy = self.policy.layers[layer]
        if policy.saves_input and policy.input_on_host:
            free = self.arena.reserve(*self.residual)
            # A residual that is on the host is saved as it is, and the output goes elsewhere.
            if self.current is not None:
                free, self.current = self.current, free
            self.inputs[layer] = free
        output = self._attend(layer, is_saved=policy.keeps_output)
        if policy.keeps_output:
            self.outputs[layer] = output
        else:
            _release(output)
        for slot in self.last:
            slot.leave()
        self.last = self._saved(layer)
        for slot in self.last if policy.goes_to_disk else ():
            slot.to_disk()

    def backward(self, layer: int) -> None:
        group = self.policy.layers[layer].group
        for member in group if layer == group[-1] else ():
            if member not in self.outputs:
                self._fetch(member)
                self.outputs[member] = self._attend(member, is_saved=member < layer)
            if member < layer:
                self._fetch(member, member + 1)
                if self.policy.layers[member + 1].input_on_host:
                    self.inputs[member + 1] = self.arena.reserve(*self.residual)
                for slot in self.outputs[member]:
                    slot.leave()
        # Then the layer before it in its group, or the first one of the group before.
        before = layer - 1 if layer > group[0] else self.policy.layers[layer - 1].group[0]
        self._fetch(layer, *([before] if layer else []))
        lse, dtype = self.lse.pop(layer, []), self.sizes.attention.dtype
        if self.policy.park:
            d_output, home = self._head_chunks(), []
            sums: dict[range, HostSlot] = {}  # of dK and dV, by the heads that arrived together
            for chunk in self.gradients:
                _release(lse.pop(0) if lse else [])
                if chunk.sums_shape is not None:
                    sum_dtype = self.sizes.attention.sum_dtype
                    sums[chunk.kv_to_load] = self.arena.reserve(chunk.sums_shape, sum_dtype)
                if chunk.home_shape is not None:
                    home += [self.arena.reserve(chunk.home_shape, dtype) for _ in ("dk", "dv")]
                for heads in [heads for heads in sums if heads[-1] in chunk.kv_finished]:
                    sums.pop(heads).release()
            _release(d_output + home)
        _release([slot for chunk in lse for slot in chunk])
        if layer in self.inputs:
            self.inputs.pop(layer).release()
        _release(self.outputs.pop(layer))

    def _saved(self, layer: int) -> list[HostSlot]:
        """The slots of x and O of a layer."""
        x = [self.inputs[layer]] if layer in self.inputs else []
        return [*x, *self.outputs.get(layer, ())]

    def _fetch(self, *layers: int) -> None:
        for layer in layers:
            for slot in self._saved(layer):
                slot.fetch()

    def _attend(self, layer: int, *, is_saved: bool) -> list[HostSlot]:
        """The slots of the layer's attention output; those of its log-sum-exps are saved."""
        policy, attention = self.policy.layers[layer], self.sizes.attention
        output = self._head_chunks() if policy.output_on_host else []
        if is_saved and policy.input_on_host:
            self.lse[layer] = [
                [
                    self.arena.reserve(
                        (attention.b, columns.stop - columns.start, attention.tokens),
                        accumulation_dtype(attention.dtype),
                    )
                    for columns in (call.query_columns for call in assignment.kernel_calls)
                ]
                for assignment in attention.mine
            ]
        return output

    def _head_chunks(self) -> list[HostSlot]:
        return [self.arena.reserve(x, self.sizes.attention.dtype) for x in self.head_chunks]


def _release(slots: list[HostSlot]) -> None:
    for slot in slots:
        slot.release()
