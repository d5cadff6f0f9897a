"""What is alive in any step of any rank, and its parts around the layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_untied.phases import Phase
from megatron_untied.planner.causes import Bytes, Cause
from megatron_untied.planner.geometry import Geometry
from megatron_untied.planner.loss import loss_bytes
from megatron_untied.planner.parameters import Unit
from megatron_untied.planner.sharding import ShardedWeights


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
