"""The layers of a step that are streamed; see ``streaming/layer.py``."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_untied.phases import Phase
from megatron_untied.planner.buffers import StreamedBuffers
from megatron_untied.planner.causes import Bytes, Cause
from megatron_untied.planner.parameters import (
    Unit,
    after_attention_shapes,
    before_attention_shapes,
)
from megatron_untied.planner.stash import Placement
from megatron_untied.planner.step import Moment, Step, fp32_sums
from megatron_untied.planner.tiles import Tiles


@dataclass(frozen=True)
class StreamedStep(Step):
    """A step whose layers recompute."""

    def forward(self, layer: int) -> Iterator[Moment]:
        """See :class:`Step`."""
        place, lse = self.placement, Bytes({Cause.KEPT: self.geometry.lse_bytes})
        rest = (
            self.in_forward + self.weights.gathered_forward(layer) + place.kept_forward(layer)
            + self.buffers.forward(layer)
        )  # fmt: skip
        counted = place.selective and place.lse_on_device(layer)  # with what is kept
        attending = rest + self._residual_in_attention + self.tiles.projecting()
        yield Moment(Phase.ATTENTION_FORWARD, attending + (Bytes() if counted else lse))
        after = rest + self.residual + self.tiles.after_forward()
        yield Moment(Phase.MLP_FORWARD, after + (Bytes() if place.selective else lse))

    def backward(self, layer: int) -> Iterator[Moment]:
        """See :class:`Step`."""
        rest = self._in_layer_backward(layer)
        if layer == self.placement.last_of_group(layer):
            yield from self._again(layer, rest + self.residual + self.buffers.again(layer))
        yield from self._to_attention(rest + self.residual + self.buffers.to_attention(layer))
        yield from self._attention_backward(layer, rest + self._residual_in_attention)
        yield self._from_attention(rest + self.residual + self.buffers.from_attention(layer))
        yield Moment(Phase.BACKWARD, self._after(layer))

    def kept(self) -> Bytes:
        """See :class:`Step`."""
        return self.placement.kept_forward(self.geometry.num_layers - 1)

    @cached_property
    def placement(self) -> Placement:
        """Who keeps what, where."""
        return Placement(self.geometry)

    @cached_property
    def buffers(self) -> StreamedBuffers:
        """The workspace."""
        return StreamedBuffers(self.geometry, self.rank)

    @cached_property
    def tiles(self) -> Tiles:
        """Temporaries of tiles."""
        return Tiles(self.geometry)

    @property
    def _residual_in_attention(self) -> Bytes:
        return Bytes() if self.placement.park else self.residual

    def _in_layer_backward(self, layer: int) -> Bytes:
        done = self.geometry.num_layers - 1 - layer
        return (
            self.in_backward(done) + self.weights.gathered_backward(layer)
            + self.weights.reducing_backward(layer) + self.placement.kept_backward(layer)
            + self._fetched_lse(layer)
        )  # fmt: skip

    def _fetched_lse(self, layer: int) -> Bytes:
        there = self.placement.lse_on_device(layer)
        return Bytes({Cause.KEPT: 0 if there else self.geometry.lse_bytes})

    def _again(self, layer: int, rest: Bytes) -> Iterator[Moment]:
        """The group of ``layer`` is rebuilt when its backward begins."""
        place = self.placement
        if not place.selective:
            yield Moment(Phase.RECOMPUTE_ATTENTION, rest + self.tiles.projecting())
        members = layer - place.first_of_group(layer) + 1
        if members > 1:
            yield from self._inputs_again(rest)
        if members > 2:  # the layer before last arrives meanwhile; the last has no input yet
            last = 0 if place.input_on_host(layer) else self.geometry.residual_bytes
            earlier = rest + self.weights.one_more_layer() - Bytes({Cause.KEPT: last})
            yield from self._inputs_again(earlier)

    def _inputs_again(self, rest: Bytes) -> Iterator[Moment]:
        """An input is made again, and copied to where it is kept."""
        yield Moment(Phase.RECOMPUTE_MLP, rest + self.tiles.after_forward())
        yield Moment(Phase.BACKWARD, rest + self.residual)

    def _to_attention(self, rest: Bytes) -> Iterator[Moment]:
        after = self._after_attention
        earlier_tiles = fp32_sums(after) if self.geometry.num_tiles > 1 else Bytes()
        yield Moment(Phase.MLP_BACKWARD, rest + self.tiles.after_backward() + earlier_tiles)
        yield Moment(
            Phase.MLP_BACKWARD, rest + self.tiles.after_backward_end(after) + fp32_sums(after)
        )

    def _attention_backward(self, layer: int, rest: Bytes) -> Iterator[Moment]:
        rest += self.buffers.attention_backward(layer) + fp32_sums(self._after_attention)
        loading = self.buffers.home_when_loading(layer) + self.tiles.projecting()
        yield Moment(Phase.ATTENTION_BACKWARD, rest + loading)
        yield Moment(Phase.ATTENTION_BACKWARD, rest + self.buffers.kernel(layer))

    def _from_attention(self, rest: Bytes) -> Moment:
        after, before = self._after_attention, self._before_attention
        weights = fp32_sums(after, before) if self.geometry.num_tiles > 1 else fp32_sums(after)
        tile = self.tiles.before_backward(before)
        return Moment(Phase.QKV_BACKWARD, rest + tile + weights)

    def _after(self, layer: int) -> Bytes:
        """The layer's gradients start to be reduced."""
        done, unit = self.geometry.num_layers - layer, self.weights.units.layer
        kept = self.placement.kept_backward(layer - 1) if layer else Bytes()
        return (
            self.in_backward(done) + self.weights.gathered_arriving(layer) + kept + self.residual
            + self.weights.reducing(unit) + self.weights.summed(unit) + self.buffers.after(layer)
        )  # fmt: skip

    @cached_property
    def _after_attention(self) -> Unit:
        shapes = after_attention_shapes(self.geometry.config.model, self.geometry.t)
        return Unit(shapes=tuple(shapes))

    @cached_property
    def _before_attention(self) -> Unit:
        shapes = before_attention_shapes(self.geometry.config.model, self.geometry.t)
        return Unit(shapes=tuple(shapes))
