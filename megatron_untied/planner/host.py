"""What a rank's layers take on the host: a replay of what they reserve and release in a step."""

import torch

from megatron_untied.context_parallel.exchange import HeadMajorLayout
from megatron_untied.planner.attention import sums_on_host
from megatron_untied.planner.geometry import Geometry
from megatron_untied.planner.stash import Placement
from megatron_untied.streaming.host_arena import HostArena, HostSlot


def stash_host_bytes(geometry: Geometry, rank: int = 0) -> int:
    """What the host arena of one Ulysses rank has taken from the system after one step."""
    replay = _Replay(geometry, rank)
    for layer in range(geometry.num_layers):
        replay.forward(layer)
    for layer in reversed(range(geometry.num_layers)):
        replay.backward(layer)
    return replay.arena.reserved_bytes


class _Replay:
    """Reserves from a real arena without memory, in the order of the layers' code."""

    def __init__(self, geometry: Geometry, rank: int):
        self.geometry, self.rank, self.placement = geometry, rank, Placement(geometry)
        geo, self.arena = geometry, HostArena.for_tracing()
        self.dtype = geo.config.precision.params_dtype
        self.slots = HeadMajorLayout(geo.schedule, geo.n, geo.b, geo.d)
        self.inputs: dict[int, HostSlot] = {}
        self.outputs: dict[int, list[HostSlot]] = {}
        self.lse: dict[int, list[HostSlot]] = {}

    def forward(self, layer: int) -> None:
        if self.placement.keeps_input(layer):
            self._keep_input(layer)
        already = self.inputs.get(layer)
        parked = self._rows() if self.placement.park and already is None else None
        output = self._attend(layer, is_kept=self.placement.selective)
        if parked is not None:
            parked.release()
        if self.placement.selective:
            self.outputs[layer] = output
        else:
            _release(output)

    def backward(self, layer: int) -> None:
        place = self.placement
        if layer == place.last_of_group(layer):
            for each in range(place.first_of_group(layer), layer + 1):
                if each not in self.outputs:
                    self.outputs[each] = self._attend(each, is_kept=each < layer)
                if each < layer:
                    self._keep_input(each + 1)
        _release(self.lse.pop(layer, []))
        d_output = self._reserve_output() if place.park else []
        if place.park:
            gradient = self._rows()
            self._sum_over_chunks()
            gradient.release()
        _release(d_output)
        if layer in self.inputs:
            self.inputs.pop(layer).release()
        _release(self.outputs.pop(layer))

    def _sum_over_chunks(self) -> None:
        """Sums of dk and dv of the heads in use, if they wait on the host."""
        geo, held = self.geometry, {}
        if not sums_on_host(geo, self.rank):
            return
        for chunk in geo.schedule.chunks:
            turn = chunk[self.rank]
            if turn.kv_to_load:
                shape = 2, len(turn.kv_to_load), geo.n * geo.num_ulysses, geo.b, geo.d
                held[turn.kv_to_load] = self.arena.reserve(shape, torch.float32)
            for heads in [heads for heads in held if heads[-1] in turn.kv_finished]:
                held.pop(heads).release()

    def _keep_input(self, layer: int) -> None:
        if self.placement.input_on_host(layer):
            self.inputs[layer] = self._rows()

    def _attend(self, layer: int, *, is_kept: bool) -> list[HostSlot]:
        output = self._reserve_output() if self.placement.output_on_host(layer) else []
        if is_kept and self.placement.input_on_host(layer):
            self.lse[layer] = [
                self._reserve_lse(piece.query_columns.stop - piece.query_columns.start)
                for chunk in self.geometry.schedule.chunks
                for piece in chunk[self.rank].kernel_calls
            ]
        return output

    def _reserve_lse(self, heads: int) -> HostSlot:
        geo = self.geometry
        return self.arena.reserve((geo.b, heads, geo.n * geo.num_ulysses), torch.float32)

    def _rows(self) -> HostSlot:
        geo = self.geometry
        shape = geo.n // geo.num_token_parts, geo.b, geo.m
        return self.arena.reserve(shape, self.dtype)

    def _reserve_output(self) -> list[HostSlot]:
        chunks = range(len(self.slots.counts))
        blocks = (block for index in chunks for block in self.slots.even_blocks(index))
        return [self.arena.reserve(torch.Size(block), self.dtype) for block in blocks]


def _release(slots: list[HostSlot]) -> None:
    for slot in slots:
        slot.release()
