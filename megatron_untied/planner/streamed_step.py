"""The layers of a step that are streamed; see ``streaming/layer.py``."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from typing_extensions import override

from megatron_untied.phases import Phase
from megatron_untied.planner.activations import StreamedActivations
from megatron_untied.planner.causes import Bytes, Cause
from megatron_untied.planner.parameters import (
    Unit,
    after_attention_shapes,
    before_attention_shapes,
)
from megatron_untied.planner.step import Moment, Step, fp32_sums
from megatron_untied.planner.tiles import Tiles
from megatron_untied.streaming.activation_policy import ActivationPolicy


@dataclass(frozen=True)
class StreamedStep(Step):
    """A step whose layers recompute."""

    @override
    def forward(self, layer: int) -> Iterator[Moment]:
        kept, lse = self.activations, Bytes({Cause.KEPT: self.geometry.lse_bytes})
        rest = self.in_forward + self.weights.gathered_forward(layer) + kept.kept_forward(layer)
        counted = self.policy.selective and not self.policy.lse_on_host(layer)  # with what is kept
        attending = rest + self._residual_in_attention + self.tiles.projecting()
        attending += kept.workspace(Phase.ATTENTION_FORWARD, layer)
        yield Moment(Phase.ATTENTION_FORWARD, attending + (Bytes() if counted else lse))
        after = rest + self.residual + self.tiles.after_forward()
        after += kept.workspace(Phase.MLP_FORWARD, layer)
        yield Moment(Phase.MLP_FORWARD, after + (Bytes() if self.policy.selective else lse))

    @override
    def backward(self, layer: int) -> Iterator[Moment]:
        rest, workspace = self._in_layer_backward(layer), self.activations.workspace
        if layer == self.policy.last_of_group(layer):
            yield from self._recompute(layer, rest + self.residual)
        yield from self._mlp_backward(rest + self.residual + workspace(Phase.MLP_BACKWARD, layer))
        yield from self._attention_backward(layer, rest + self._residual_in_attention)
        yield self._qkv_backward(rest + self.residual + workspace(Phase.QKV_BACKWARD, layer))
        yield Moment(Phase.BACKWARD, self._after(layer))

    @override
    def kept(self) -> Bytes:
        return self.activations.kept_forward(self.geometry.num_layers - 1)

    @cached_property
    def activations(self) -> StreamedActivations:
        """What layers keep, and the workspace."""
        return StreamedActivations(self.geometry, self.rank)

    @property
    def policy(self) -> ActivationPolicy:
        """Which layer keeps what, where."""
        return self.activations.policy

    @cached_property
    def tiles(self) -> Tiles:
        """Temporaries of tiles."""
        return Tiles(self.geometry)

    @property
    def _residual_in_attention(self) -> Bytes:
        return Bytes() if self.policy.park else self.residual

    def _in_layer_backward(self, layer: int) -> Bytes:
        done = self.geometry.num_layers - 1 - layer
        return (
            self.in_backward(done) + self.weights.gathered_backward(layer)
            + self.weights.reducing_backward(layer) + self.activations.kept_backward(layer)
            + self._fetched_lse(layer)
        )  # fmt: skip

    def _fetched_lse(self, layer: int) -> Bytes:
        on_host = self.policy.lse_on_host(layer)
        return Bytes({Cause.KEPT: self.geometry.lse_bytes if on_host else 0})

    def _recompute(self, layer: int, rest: Bytes) -> Iterator[Moment]:
        """The group of ``layer`` is completed when its backward begins."""
        policy, workspace = self.policy, self.activations.workspace
        if not policy.selective:
            held = workspace(Phase.RECOMPUTE_ATTENTION, layer)
            yield Moment(Phase.RECOMPUTE_ATTENTION, rest + held + self.tiles.projecting())
        members = layer - policy.first_of_group(layer) + 1
        if members > 1:
            rest += workspace(Phase.RECOMPUTE_MLP, layer - 1)
            yield from self._inputs_again(rest)
        if members > 2:  # the layer before last arrives meanwhile; the last has no input yet
            last = 0 if policy.input_on_host(layer) else self.geometry.residual_bytes
            earlier = rest + self.weights.one_more_layer() - Bytes({Cause.KEPT: last})
            yield from self._inputs_again(earlier)

    def _inputs_again(self, rest: Bytes) -> Iterator[Moment]:
        """An input is made again, and copied to where it is kept."""
        yield Moment(Phase.RECOMPUTE_MLP, rest + self.tiles.after_forward())
        yield Moment(Phase.BACKWARD, rest + self.residual)

    def _mlp_backward(self, rest: Bytes) -> Iterator[Moment]:
        after = self._after_attention
        earlier_tiles = fp32_sums(after) if self.geometry.num_tiles > 1 else Bytes()
        yield Moment(Phase.MLP_BACKWARD, rest + self.tiles.after_backward() + earlier_tiles)
        yield Moment(
            Phase.MLP_BACKWARD, rest + self.tiles.after_backward_end(after) + fp32_sums(after)
        )

    def _attention_backward(self, layer: int, rest: Bytes) -> Iterator[Moment]:
        workspace = self.activations.workspace(Phase.ATTENTION_BACKWARD, layer)
        rest += workspace + fp32_sums(self._after_attention)
        allocated = self.activations.kernel
        loading = Bytes({Cause.KERNEL: allocated.home_when_loading}) + self.tiles.projecting()
        yield Moment(Phase.ATTENTION_BACKWARD, rest + loading)
        most = Bytes({Cause.KERNEL: max(allocated.kernel, allocated.home)})
        yield Moment(Phase.ATTENTION_BACKWARD, rest + most)

    def _qkv_backward(self, rest: Bytes) -> Moment:
        after, before = self._after_attention, self._before_attention
        weights = fp32_sums(after, before) if self.geometry.num_tiles > 1 else fp32_sums(after)
        home = Bytes({Cause.SLOTS: self.activations.kernel.home})  # dK and dV
        tile = self.tiles.before_backward(before)
        return Moment(Phase.QKV_BACKWARD, rest + home + tile + weights)

    def _after(self, layer: int) -> Bytes:
        """The layer's gradients start to be reduced."""
        done, unit = self.geometry.num_layers - layer, self.weights.units.layer
        kept = self.activations.kept_backward(layer - 1) if layer else Bytes()
        return (
            self.in_backward(done) + self.weights.gathered_arriving(layer) + kept + self.residual
            + self.weights.reducing(unit) + self.weights.summed(unit)
            + self.activations.workspace(Phase.BACKWARD, layer)
        )  # fmt: skip

    @cached_property
    def _after_attention(self) -> Unit:
        shapes = after_attention_shapes(self.geometry.config.model, self.geometry.t)
        return Unit(shapes=tuple(shapes))

    @cached_property
    def _before_attention(self) -> Unit:
        shapes = before_attention_shapes(self.geometry.config.model, self.geometry.t)
        return Unit(shapes=tuple(shapes))
