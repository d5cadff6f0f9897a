"""What is alive in any step of any rank, and its parts around the layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from typing_extensions import override

from megatron_untied.phases import Phase
from megatron_untied.planner.activations import PlainActivations, StreamedActivations
from megatron_untied.planner.causes import Bytes, Cause
from megatron_untied.planner.geometry import Geometry
from megatron_untied.planner.tiles import Tiles, loss_bytes
from megatron_untied.planner.weights import (
    ShardedWeights,
    Unit,
    after_attention_shapes,
    before_attention_shapes,
)
from megatron_untied.streaming.activation_policy import ActivationPolicy


@dataclass(frozen=True, slots=True)
class Moment:
    """Device memory at one moment of a step."""

    phase: Phase
    by_cause: Bytes
    layer: int | None = None

    @property
    def num_bytes(self) -> int:
        """All that is alive."""
        return self.by_cause.total()


@dataclass(frozen=True)
class Step:
    """A step of one rank, after the first; layers are a subclass's.

    ``rank`` counts those that trade sequence for heads, whose buffers may differ.
    """

    geometry: Geometry
    rank: int = 0
    every_layer: bool = True
    """Otherwise only those layers where something changes: as high, and sooner known."""

    def moments(self) -> Iterator[Moment]:
        """The highest moments of each phase, in the order of a step."""
        yield Moment(Phase.FORWARD, self._embedding_forward())
        layers = self._layers()
        for layer in layers:
            yield from _of(layer, self.forward(layer))
        yield Moment(Phase.FORWARD, self._before_loss())
        yield Moment(Phase.LOSS, self._loss())
        yield Moment(Phase.BACKWARD, self._after_loss())
        for layer in reversed(layers):
            yield from _of(layer, self.backward(layer))
        yield Moment(Phase.BACKWARD, self._embedding_backward())
        yield Moment(Phase.OPTIMIZER, self._optimizer_step())

    def forward(self, layer: int) -> Iterator[Moment]:
        """Those of one layer's forward."""
        raise NotImplementedError

    def backward(self, layer: int) -> Iterator[Moment]:
        """Those of one layer's backward."""
        raise NotImplementedError

    def kept(self) -> Bytes:
        """What all layers keep on the device between forward and backward."""
        raise NotImplementedError

    def _layers(self) -> list[int]:
        num_layers, memory = self.geometry.num_layers, self.geometry.config.memory
        if self.every_layer:
            return list(range(num_layers))
        size, on_host = memory.recompute_num_layers, memory.cpu_offloading_num_layers
        last_group = (num_layers - 1) // size * size
        some = {0, 1, on_host - 1, on_host, last_group - 1, last_group, num_layers - 2}
        some |= {group + size - 1 for group in (0, on_host // size * size)}
        return sorted(i for i in {*some, num_layers - 1} if 0 <= i < num_layers)

    @cached_property
    def weights(self) -> ShardedWeights:
        """The weights of this rank."""
        return ShardedWeights(self.geometry)

    @cached_property
    def states(self) -> Bytes:
        """All along a step: weights, moments, what every layer is given."""
        rest = Bytes() if self.weights.is_on_host else self.weights.at_rest()
        return rest + self._inputs() + self._gathered_tile()

    @cached_property
    def in_forward(self) -> Bytes:
        """All along a forward: also gradients of the micro-batches before."""
        more = self.geometry.num_micro_batches > 1
        return self.states + (self.weights.gradients(None) if more else Bytes())

    def in_backward(self, num_layers_done: int) -> Bytes:
        """All along a backward: also the gradients that are done, and a tied one on its way."""
        if self.geometry.num_micro_batches > 1:
            return self.in_forward + self._tied_gradient()
        done = self.weights.gradients(num_layers_done)
        return self.states + done + self._tied_gradient()

    @property
    def residual(self) -> Bytes:
        """The residual, in backward its gradient."""
        return Bytes({Cause.RESIDUAL: self.geometry.residual_bytes})

    def _inputs(self) -> Bytes:
        """Tokens, labels and masks of the step, token weights, positions, cosines and sines."""
        geo = self.geometry
        batch = 20 * geo.n * geo.b * geo.num_micro_batches + 4 * geo.n * geo.b
        samples = geo.b if geo.config.data.reset_position_ids else 1
        rotated = int(geo.d * geo.config.model.rotary.percent)
        return Bytes({Cause.INPUTS: batch + 4 * rotated * geo.n * samples + 8 * geo.n})

    def _gathered_tile(self) -> Bytes:
        """Megatron-core's buffer for what sequence parallelism gathers."""
        geo = self.geometry
        streamed = geo.config.memory.recompute_granularity is not None
        tokens = geo.tile if streamed else geo.n * geo.b
        gathered = tokens * geo.m * geo.itemsize if geo.num_token_parts > 1 else 0
        return Bytes({Cause.TILES: gathered})

    def _embedding_forward(self) -> Bytes:
        return self.in_forward + self.weights.gathered_embedding() + self.residual

    def _before_loss(self) -> Bytes:
        gathered = self.weights.gathered_before_loss()
        return self.in_forward + gathered + self.kept() + self.residual

    def _loss(self) -> Bytes:
        return (
            self.in_forward + self.weights.gathered_loss() + self.kept() + self.residual
            + loss_bytes(self.geometry)
        )  # fmt: skip

    def _after_loss(self) -> Bytes:
        """The output matrix' gradient starts to be reduced, and the last layer arrives."""
        output, num_layers = self.weights.units.output, self.geometry.num_layers
        return (
            self.in_backward(0) + self.weights.gathered_arriving(num_layers) + self.kept()
            + self.residual + self.weights.reducing(output) + self.weights.summed(output)
        )  # fmt: skip

    def _tied_gradient(self) -> Bytes:
        """Of an output matrix that is the embedding: whole until the end of backward."""
        units = self.weights.units
        return Bytes() if units.output.shapes else self.weights.summed(units.embedding)

    def _embedding_backward(self) -> Bytes:
        rest = self.in_backward(self.geometry.num_layers) + self.residual
        embedding = self.weights.gradients(None) - self.weights.gradients(self.geometry.num_layers)
        return rest + embedding + self.weights.looked_up()

    def _optimizer_step(self) -> Bytes:
        return self.states + self.weights.gradients(None)


def _of(layer: int, moments: Iterator[Moment]) -> Iterator[Moment]:
    return (Moment(each.phase, each.by_cause, layer) for each in moments)


def fp32_sums(*units: Unit) -> Bytes:
    """Sums of weight gradients over tiles, fp32."""
    return Bytes({Cause.WEIGHT_GRADIENTS: sum(4 * unit.numel for unit in units)})


@dataclass(frozen=True)
class StreamedStep(Step):
    """A step whose layers recompute."""

    @override
    def forward(self, layer: int) -> Iterator[Moment]:
        kept, lse = self.activations, Bytes({Cause.KEPT: self.geometry.lse_bytes})
        rest = self.in_forward + self.weights.gathered_forward(layer) + kept.kept_forward(layer)
        counted = (
            self.policy.selective and not self.policy.layers[layer].lse_on_host
        )  # with what is kept
        attending = rest + self._residual_in_attention + self.tiles.projecting()
        attending += kept.workspace(Phase.ATTENTION_FORWARD, layer)
        yield Moment(Phase.ATTENTION_FORWARD, attending + (Bytes() if counted else lse))
        after = rest + self.residual + self.tiles.after_forward()
        after += kept.workspace(Phase.MLP_FORWARD, layer)
        yield Moment(Phase.MLP_FORWARD, after + (Bytes() if self.policy.selective else lse))

    @override
    def backward(self, layer: int) -> Iterator[Moment]:
        rest, workspace = self._in_layer_backward(layer), self.activations.workspace
        if layer == self.policy.layers[layer].group[-1]:
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
        on_host = self.policy.layers[layer].lse_on_host
        return Bytes({Cause.KEPT: self.geometry.lse_bytes if on_host else 0})

    def _recompute(self, layer: int, rest: Bytes) -> Iterator[Moment]:
        """The group of ``layer`` is completed when its backward begins."""
        policy, workspace = self.policy, self.activations.workspace
        if not policy.selective:
            held = workspace(Phase.RECOMPUTE_ATTENTION, layer)
            yield Moment(Phase.RECOMPUTE_ATTENTION, rest + held + self.tiles.projecting())
        members = layer - policy.layers[layer].group[0] + 1
        if members > 1:
            rest += workspace(Phase.RECOMPUTE_MLP, layer - 1)
            yield from self._inputs_again(rest)
        if members > 2:  # the layer before last arrives meanwhile; the last has no input yet
            last = 0 if policy.layers[layer].input_on_host else self.geometry.residual_bytes
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


@dataclass(frozen=True)
class PlainStep(Step):
    """A step whose layers keep all that autograd saves."""

    def forward(self, layer: int) -> Iterator[Moment]:
        """See :class:`Step`."""
        rest = self.in_forward + self.weights.gathered_forward(layer) + self._saved(layer + 1)
        yield Moment(Phase.ATTENTION_FORWARD, rest + self.residual + self._activations.forward)

    def backward(self, layer: int) -> Iterator[Moment]:
        """See :class:`Step`."""
        geo = self.geometry
        done = geo.num_layers - 1 - layer
        rest = (
            self.in_backward(done) + self.weights.gathered_backward(layer)
            + self.weights.reducing_backward(layer) + self._saved(layer + 1) + self.residual
        )  # fmt: skip
        geo = self.geometry
        yield Moment(Phase.BACKWARD, rest + self._mlp_backward())
        attending = rest - self._saved_by_mlp() + self._activations.backward
        yield Moment(Phase.ATTENTION_BACKWARD, attending)

    def kept(self) -> Bytes:
        """See :class:`Step`."""
        return self._saved(self.geometry.num_layers)

    def _saved(self, num_layers: int) -> Bytes:
        geo = self.geometry
        own = geo.n // geo.num_token_parts * geo.b * geo.m
        heads = geo.h + 2 * geo.g + geo.h + (geo.h if 1 < geo.g < geo.h else 0)
        heads += geo.h + geo.g if geo.config.model.qk_layernorm else 0
        inner = (5 if geo.config.model.swiglu else 2) * geo.f
        numel = self._saved_by_norms * own + geo.n * geo.b * (heads * geo.d + inner)
        return Bytes({Cause.KEPT: num_layers * (numel * geo.itemsize + geo.lse_bytes)})

    def _mlp_backward(self) -> Bytes:
        geo = self.geometry
        inner = geo.n * geo.b * geo.f * (2 if geo.config.model.swiglu else 1)
        return Bytes({Cause.TILES: (inner + geo.m * geo.f) * geo.itemsize})

    def _saved_by_mlp(self) -> Bytes:
        """Gone when a layer's attention goes backward."""
        geo = self.geometry
        inner = geo.n * geo.b * geo.f * (5 if geo.config.model.swiglu else 2)
        own = geo.n // geo.num_token_parts * geo.b * geo.m
        return Bytes({Cause.KEPT: (inner + 2 * own) * geo.itemsize})

    @property
    def _saved_by_norms(self) -> int:
        """In residuals, of both norms: RMSNorm's input and output; LayerNorm's input in fp32."""
        wide = 4 // self.geometry.itemsize
        return 2 * (1 + (wide if self.geometry.config.model.normalization == "LayerNorm" else 1))

    @cached_property
    def _activations(self) -> PlainActivations:
        return PlainActivations(self.geometry, self.rank)
