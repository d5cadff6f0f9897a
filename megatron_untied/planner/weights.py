"""The parameters of a model, by the unit that full sharding gathers together: shapes only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_untied.config import ModelConfig
from megatron_untied.planner.causes import Bytes, Cause
from megatron_untied.planner.geometry import Geometry

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Some parameters of one tensor-parallel rank."""

    shapes: tuple[Shape, ...]

    @property
    def numel(self) -> int:
        """Elements of all of them."""
        return sum(math.prod(shape) for shape in self.shapes)

    def rows_numel(self, num_ranks: int) -> int:
        """Elements that the first of ``num_ranks`` holds, each parameter cut by rows."""
        return sum(-(-rows // num_ranks) * math.prod(rest) for rows, *rest in self.shapes)

    def gathered_numel(self, num_ranks: int) -> int:
        """Elements that travel to gather them: every rank sends as many."""
        return num_ranks * self.rows_numel(num_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterUnits:
    """A tensor-parallel rank's share of a model."""

    layer: Unit
    embedding: Unit
    output: Unit
    """Without parameters if the embedding is the output matrix too."""
    rest: Unit
    num_layers: int

    @property
    def all(self) -> tuple[Unit, ...]:
        """In the order of a forward."""
        return (self.embedding, *[self.layer] * self.num_layers, self.output, self.rest)

    @property
    def numel(self) -> int:
        """Parameters of this rank."""
        return sum(unit.numel for unit in self.all)


def parameter_units(model: ModelConfig, t: int = 1) -> ParameterUnits:
    """What one of ``t`` tensor-parallel ranks holds; its vocabulary is padded if t is given."""
    m = model.hidden_size
    rows = model.padded_vocab_size(t) // t
    matrix, tied = (rows, m), not model.untie_embeddings_and_output_weights
    return ParameterUnits(
        layer=Unit(shapes=(*before_attention_shapes(model, t), *after_attention_shapes(model, t))),
        embedding=Unit(shapes=(matrix,)),
        output=Unit(shapes=() if tied else (matrix,)),
        rest=Unit(shapes=_norm(model, m)),
        num_layers=model.num_layers,
    )


def num_parameters(model: ModelConfig) -> int:
    """Of the whole model, without padding of the vocabulary."""
    units, matrices = parameter_units(model), 1 + model.untie_embeddings_and_output_weights
    padding = model.padded_vocab_size(1) - model.vocab_size
    return units.numel - matrices * padding * model.hidden_size


def before_attention_shapes(model: ModelConfig, t: int) -> Sequence[Shape]:
    """Input norm, QKV projection, head norms."""
    m, d = model.hidden_size, model.kv_channels
    rows = (model.num_attention_heads + 2 * model.num_query_groups) * d // t
    has_bias = model.add_bias_linear or model.add_qkv_bias
    head_norms = 2 * _norm(model, d) if model.qk_layernorm else ()
    return (*_norm(model, m), *_linear(rows, m, rows if has_bias else 0), *head_norms)


def after_attention_shapes(model: ModelConfig, t: int) -> Sequence[Shape]:
    """Output projection, norm, MLP."""
    m, has_bias = model.hidden_size, model.add_bias_linear
    width = model.num_attention_heads * model.kv_channels // t
    return (*_linear(m, width, m if has_bias else 0), *_mlp_shapes(model, t))


def _mlp_shapes(model: ModelConfig, t: int) -> Sequence[Shape]:
    """The norm before it and its matrices."""
    m, f, has_bias = model.hidden_size, model.ffn_hidden_size // t, model.add_bias_linear
    up = 2 * f if model.swiglu else f
    first = _linear(up, m, up if has_bias else 0)
    return (*_norm(model, m), *first, *_linear(m, f, m if has_bias else 0))


def _linear(rows: int, columns: int, bias: int) -> tuple[Shape, ...]:
    return ((rows, columns), (bias,)) if bias else ((rows, columns),)


def _norm(model: ModelConfig, width: int) -> tuple[Shape, ...]:
    return ((width,),) * (2 if model.normalization == "LayerNorm" else 1)


_WIDE = 4
"""Bytes of an fp32 value."""


@dataclass(frozen=True)
class ShardedWeights:
    """The weights of one rank at any moment of a step."""

    geometry: Geometry

    @cached_property
    def units(self) -> ParameterUnits:
        """This rank's parameters, before they are shared."""
        return parameter_units(self.geometry.config.model, self.geometry.t)

    @property
    def is_full(self) -> bool:
        """Whether ranks share weights and gradients too."""
        return self.geometry.config.optimization.use_torch_fsdp2

    @property
    def is_on_host(self) -> bool:
        """Whether what is shared lies on the host."""
        return self.geometry.config.optimization.optimizer_cpu_offload

    def at_rest(self) -> Bytes:
        """Between steps, wherever it lies."""
        if self.is_full:
            return Bytes({Cause.STATES: 3 * _WIDE * self._rows(*self.units.all)})
        optimization, size = self.geometry.config.optimization, self.geometry.itemsize
        main = 0 if size == _WIDE else _WIDE  # fp32 weights are their own
        states = (main + 2 * _WIDE) * self.units.numel
        if optimization.use_distributed_optimizer:
            states = -(-states // self.geometry.num_sharding)
        weights, gradients = size * self.units.numel, _WIDE * self.units.numel
        return Bytes({Cause.STATES: weights + states, Cause.GRADIENTS: gradients})

    def on_host(self) -> Bytes:
        """What the optimizer keeps there: rows of weights, moments and gradients."""
        if not self.is_on_host:
            return Bytes()
        rows = _WIDE * self._rows(*self.units.all)
        return self.at_rest() + Bytes({Cause.GRADIENTS: rows})

    def gradients(self, num_layers_done: int | None) -> Bytes:
        """Gradients of full sharding at rest: of the output and so many layers; None is all."""
        if not self.is_full or self.is_on_host:
            return Bytes()
        units = self.units
        done = [units.output, *[units.layer] * (num_layers_done or 0)]
        if num_layers_done is None:
            done = units.all
        return Bytes({Cause.GRADIENTS: _WIDE * self._rows(*done)})

    def gathered_forward(self, layer: int) -> Bytes:
        """While ``layer`` runs: it, what it was gathered in, and the next one on its way."""
        units, is_last = self.units, layer + 1 == self.geometry.num_layers
        arriving = [units.layer] * (1 if is_last else 2)
        return self._gathered([units.layer, *self._tied()], arriving)

    def gathered_embedding(self) -> Bytes:
        """While tokens are looked up: the embedding, and the first layer on its way."""
        units = self.units
        first = [] if units.output.shapes else [units.layer]  # else it is used after the lookup
        return self._gathered([units.embedding, *first], [units.embedding, units.layer])

    def gathered_before_loss(self) -> Bytes:
        """When the last layer is done and the output matrix arrives."""
        units = self.units
        return self._gathered([units.output, *self._tied()], [units.layer, units.output])

    def gathered_loss(self) -> Bytes:
        """During the loss: the output matrix, and what was gathered last."""
        units = self.units
        last = units.output if units.output.shapes else units.layer
        return self._gathered([units.output, units.rest, *self._tied()], [last])

    def gathered_backward(self, layer: int) -> Bytes:
        """While ``layer`` runs backward: it, and the one before on its way."""
        units = self.units
        return self._gathered([units.layer, units.rest], [units.layer] * (layer > 0))

    def one_more_layer(self) -> Bytes:
        """Another layer that is gathered while a group is rebuilt."""
        return self._gathered([], [self.units.layer])

    def gathered_arriving(self, layer: int) -> Bytes:
        """When ``layer`` is done with its backward: only the one before is there."""
        return self._gathered([self.units.rest], [self.units.layer] * (layer > 0))

    def reducing_backward(self, layer: int) -> Bytes:
        """While ``layer`` runs backward: what is being reduced is the gradient after it, whole."""
        units, is_last = self.units, layer + 1 == self.geometry.num_layers
        return self._whole(units.output if is_last else units.layer)

    def reducing(self, unit: Unit) -> Bytes:
        """What a unit's gradient is copied into to be reduced; what comes of it is at rest."""
        # To be added to the micro-batch's before, or to leave for the host.
        again = self.is_full and (self.geometry.num_micro_batches > 1 or self.is_on_host)
        return self._whole(unit) + Bytes({Cause.GRADIENTS: again * _WIDE * self._rows(unit)})

    def looked_up(self) -> Bytes:
        """The gradient of a lookup, whole, when it is converted, summed or reduced."""
        unit, size = self.units.embedding, self.geometry.itemsize
        if not self.units.output.shapes:
            return self.summed(unit) + self.summed(unit)  # beside the output matrix': their sum
        wide = size if self.geometry.num_sharding > 1 else _WIDE
        return Bytes({Cause.WEIGHT_GRADIENTS: wide * unit.numel}) + self.reducing(unit)

    def summed(self, unit: Unit) -> Bytes:
        """A whole gradient of a unit, fp32, as it is summed."""
        return Bytes({Cause.WEIGHT_GRADIENTS: _WIDE * unit.numel})

    def _tied(self) -> list[Unit]:
        """A tied embedding stays gathered through forward."""
        return [] if self.units.output.shapes else [self.units.embedding]

    def _whole(self, unit: Unit) -> Bytes:
        if not self.is_full:
            return Bytes()
        ranks = self.geometry.num_sharding
        return Bytes({Cause.WEIGHT_GRADIENTS: _WIDE * unit.gathered_numel(ranks)})

    def _gathered(self, used: list[Unit], arriving: list[Unit]) -> Bytes:
        if not self.is_full:
            return Bytes()
        size, ranks = self.geometry.itemsize, self.geometry.num_sharding
        numel = sum(unit.numel for unit in used)
        if ranks > 1:  # one rank has nothing to gather: it converts straight to the weights
            numel += sum(unit.gathered_numel(ranks) for unit in arriving)
        return Bytes({Cause.GATHERED: size * numel})

    def _rows(self, *units: Unit) -> int:
        return sum(unit.rows_numel(self.geometry.num_sharding) for unit in units)
