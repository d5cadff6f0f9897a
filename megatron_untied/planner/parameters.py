"""The parameters of a model, by the unit that full sharding gathers together: shapes only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_untied.config import ModelConfig

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
