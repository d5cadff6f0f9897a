"""The layers of a step without recomputation: megatron-core's own, under autograd."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_untied.phases import Phase
from megatron_untied.planner.activations import PlainActivations
from megatron_untied.planner.causes import Bytes, Cause
from megatron_untied.planner.step import Moment, Step


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
