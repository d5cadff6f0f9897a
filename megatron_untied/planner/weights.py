"""The parameters of a model, and what their weights and gradients take at every point of a step.

Parameters are shapes, in the units that full sharding (FSDP2) gathers together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from megatron_untied.config import ModelConfig
from megatron_untied.phases import MemoryCategory
from megatron_untied.planner.geometry import Bytes, Geometry

Shape = tuple[int, ...]

_FP32 = 4
"""Bytes of an element of weights, gradients and moments at rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Some parameters of one tensor-parallel rank."""

    shapes: tuple[Shape, ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    def rows_numel(self, num_ranks: int) -> int:
        """Elements that the first of ``num_ranks`` holds, each parameter cut by rows.

        Rows are padded to a multiple of the ranks, so ``num_ranks`` times as many are gathered.
        """
        return sum(-(-rows // num_ranks) * math.prod(rest) for rows, *rest in self.shapes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterUnits:
    """A tensor-parallel rank's share of a model."""

    qkv: Unit
    """A layer's part before attention: input norm, QKV projection, norms of queries and keys."""
    output_and_mlp: Unit
    """A layer's part after attention: output projection, norm, MLP."""
    layer: Unit
    """Both: FSDP2 gathers them together."""
    embedding: Unit
    output: Unit
    """Without parameters if the embedding is the output matrix too."""
    rest: Unit
    all: tuple[Unit, ...]
    """In the order of a forward, every layer by itself."""
    is_tied: bool
    """Whether the embedding is the output matrix too."""
    numel: int
    """Parameters of this rank."""


def parameter_units(model: ModelConfig, num_tensor: int = 1) -> ParameterUnits:
    """What one of ``num_tensor`` tensor-parallel ranks holds, its vocabulary padded."""
    m, d, f = model.hidden_size, model.kv_channels, model.ffn_hidden_size // num_tensor
    per_norm = 2 if model.normalization == "LayerNorm" else 1  # RMSNorm has no bias
    norm = per_norm * [(m,)]

    qkv_rows = (model.num_attention_heads + 2 * model.num_query_groups) * d // num_tensor
    has_qkv_bias = model.add_bias_linear or model.add_qkv_bias
    before_attention = [*norm, (qkv_rows, m), *[(qkv_rows,)] * has_qkv_bias]
    # Norms of queries and keys run over one head, so tensor-parallel ranks hold them whole.
    before_attention += 2 * per_norm * [(d,)] * model.qk_layernorm

    width = model.num_attention_heads * d // num_tensor
    up = 2 * f if model.swiglu else f  # the gate and what it multiplies are one matrix
    after_attention: list[Shape] = []
    for linear, its_norm in (((m, width), []), ((up, m), norm), ((m, f), [])):
        after_attention += [*its_norm, linear, *[linear[:1]] * model.add_bias_linear]

    matrix = Unit(shapes=((model.padded_vocab_size(num_tensor) // num_tensor, m),))
    is_tied = not model.untie_embeddings_and_output_weights
    layer = Unit(shapes=(*before_attention, *after_attention))
    output, rest = Unit(shapes=()) if is_tied else matrix, Unit(shapes=tuple(norm))
    units = (matrix, *[layer] * model.num_layers, output, rest)
    return ParameterUnits(
        qkv=Unit(shapes=tuple(before_attention)),
        output_and_mlp=Unit(shapes=tuple(after_attention)),
        layer=layer,
        embedding=matrix,
        output=output,
        rest=rest,
        all=units,
        is_tied=is_tied,
        numel=sum(unit.numel for unit in units),
    )


def num_parameters(model: ModelConfig) -> int:
    """Of the whole model, without padding of the vocabulary."""
    matrices = 1 + model.untie_embeddings_and_output_weights
    padding = model.padded_vocab_size(1) - model.vocab_size
    return parameter_units(model).numel - matrices * padding * model.hidden_size


class Stage(Enum):
    """Points of a step at which FSDP2 has different units gathered."""

    EMBEDDING = auto()
    LAYER_FORWARD = auto()
    BEFORE_LOSS = auto()
    LOSS = auto()
    LAYER_BACKWARD = auto()
    AFTER_LAYER_BACKWARD = auto()
    RECOMPUTE_AHEAD = auto()
    """Another layer is gathered while a group is recomputed."""


@dataclass(frozen=True, slots=True)
class ShardedWeights:
    """Weights, gradients and moments of one rank through a step."""

    geometry: Geometry
    units: ParameterUnits
    """This rank's parameters, before they are sharded."""
    is_full: bool
    """Whether weights and gradients are sharded too (FSDP2)."""
    is_on_host: bool
    """Whether the optimizer and what is sharded are on the host."""

    @classmethod
    def of(cls, geometry: Geometry) -> "ShardedWeights":
        """By the configuration's optimization flags."""
        model, optimization = geometry.config.model, geometry.config.optimization
        return cls(
            geometry=geometry,
            units=parameter_units(model, geometry.num_tensor),
            is_full=optimization.use_torch_fsdp2,
            is_on_host=optimization.optimizer_cpu_offload,
        )

    def at_rest(self) -> Bytes:
        """Between steps, on the device or on the host."""
        if self.is_full:  # fp32 rows of the weights and of both moments
            return Bytes({MemoryCategory.STATES: 3 * self._row_bytes(*self.units.all)})
        itemsize, numel = self.geometry.itemsize, self.units.numel
        main = 0 if itemsize == _FP32 else _FP32  # fp32 weights are their own main weights
        states = (main + 2 * _FP32) * numel
        if self.geometry.config.optimization.use_distributed_optimizer:
            states = -(-states // self.geometry.num_sharding)
        return Bytes(
            {
                MemoryCategory.STATES: itemsize * numel + states,
                MemoryCategory.GRADIENTS: _FP32 * numel,
            }
        )

    def on_host(self) -> Bytes:
        """What the optimizer keeps there: rows of weights, moments and gradients."""
        if not self.is_on_host:
            return Bytes()
        gradients = self._row_bytes(*self.units.all)
        return self.at_rest() + Bytes({MemoryCategory.GRADIENTS: gradients})

    def staged_for_checkpoint(self) -> Bytes:
        """The copy of weights and moments that ``--async-save`` writes, on the host.

        Each element is written once, in fp32, by one of the ranks that hold it.
        """
        checkpoint = self.geometry.config.checkpoint
        if not (checkpoint.async_save and checkpoint.save):
            return Bytes()
        if self.is_full:
            num_bytes = 3 * self._row_bytes(*self.units.all)
        else:
            num_bytes = -(-3 * _FP32 * self.units.numel // self.geometry.num_sharding)
        return Bytes({MemoryCategory.CHECKPOINT: num_bytes})

    def gradients(self, num_layers_done: int | None) -> Bytes:
        """Sharded gradients: of the output and of so many layers; None is all."""
        if not self.is_full or self.is_on_host:
            return Bytes()
        units = self.units
        done: Sequence[Unit] = units.all
        if num_layers_done is not None:
            done = [units.output, *[units.layer] * num_layers_done]
        return Bytes({MemoryCategory.GRADIENTS: self._row_bytes(*done)})

    def gathered(self, stage: Stage, layer: int = 0) -> Bytes:
        """Gathered weights at ``stage`` of ``layer``.

        Two things add up: the units in use, as weights, and flat all-gather buffers, of a unit
        that arrives and in forward also of the unit that arrived last.
        """
        if not self.is_full:
            return Bytes()
        units = self.units
        block = units.layer
        # A tied embedding is in the root unit, so it stays gathered through forward.
        tied = [units.embedding] if units.is_tied else []
        has_previous, has_next = layer > 0, layer + 1 < self.geometry.num_layers
        used, arriving = {
            # A tied embedding is still there when the first layer is used.
            Stage.EMBEDDING: (
                [units.embedding] + [block] * units.is_tied,
                [units.embedding, block],
            ),
            Stage.LAYER_FORWARD: ([block, *tied], [block] * (1 + has_next)),
            Stage.BEFORE_LOSS: ([units.output, *tied], [block, units.output]),
            Stage.LOSS: (
                [units.output, units.rest, *tied],
                [block if units.is_tied else units.output],
            ),
            Stage.LAYER_BACKWARD: ([block, units.rest], [block] * has_previous),
            Stage.AFTER_LAYER_BACKWARD: ([units.rest], [block] * has_previous),
            Stage.RECOMPUTE_AHEAD: ([], [block]),
        }[stage]
        numel = sum(unit.numel for unit in used)
        num_ranks = self.geometry.num_sharding
        if num_ranks > 1:  # one rank gathers nothing: it converts straight to the weights
            numel += num_ranks * sum(unit.rows_numel(num_ranks) for unit in arriving)
        return Bytes({MemoryCategory.GATHERED: self.geometry.itemsize * numel})

    def reduce_buffer(self, unit: Unit) -> Bytes:
        """The flat fp32 buffer that the gradient of ``unit`` is reduced from, whole."""
        if not self.is_full:
            return Bytes()
        num_ranks = self.geometry.num_sharding
        gathered = num_ranks * unit.rows_numel(num_ranks)
        return Bytes({MemoryCategory.WEIGHT_GRADIENTS: _FP32 * gathered})

    def reducing(self, unit: Unit) -> Bytes:
        """While the gradient of ``unit`` is reduced, beside :meth:`gradients`."""
        # The result is a second gradient at rest where it is added to that of the micro-batches
        # before, or copied to the host.
        is_extra = self.is_full and (self.geometry.num_micro_batches > 1 or self.is_on_host)
        result = self._row_bytes(unit) if is_extra else 0
        return self.reduce_buffer(unit) + Bytes({MemoryCategory.GRADIENTS: result})

    def embedding_gradient(self) -> Bytes:
        """The gradient of the lookup, whole, when it is converted, summed or reduced."""
        unit, memory = self.units.embedding, self.geometry.config.memory
        if self.units.is_tied:  # beside the output matrix' gradient: their sum
            return full_gradients(unit, unit)
        # Summed over tiles in fp32 if the residual is on the host.
        is_wide = self.geometry.num_sharding == 1 or memory.park_during_attention
        width = _FP32 if is_wide else self.geometry.itemsize
        lookup = Bytes({MemoryCategory.WEIGHT_GRADIENTS: width * unit.numel})
        return lookup + self.reducing(unit)

    def _row_bytes(self, *units: Unit) -> int:
        """fp32 bytes of this rank's rows."""
        return _FP32 * sum(unit.rows_numel(self.geometry.num_sharding) for unit in units)


def lookup_scratch_bytes(num_tokens: int, num_rows: int, width: int) -> int:
    """Of fp32 partial sums that the backward of a lookup on CUDA makes beside its gradient.

    One per ten tokens of a row, and one more per row; few tokens take a kernel without
    (EmbeddingBackwardKernel.cu and Embedding.cu in aten/src/ATen/native/cuda).
    """
    if num_tokens <= 3072:
        return 0
    return _FP32 * width * (num_tokens // 10 + min(num_tokens, num_rows))


def full_gradients(*units: Unit) -> Bytes:
    """Whole gradients, fp32, into which those of tiles or chunks are added up."""
    numel = sum(unit.numel for unit in units)
    return Bytes({MemoryCategory.WEIGHT_GRADIENTS: _FP32 * numel})
