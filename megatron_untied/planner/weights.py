"""The parameters of a model, and what their weights and gradients take at every point of a step.

Parameters are shapes, in the units that full sharding (FSDP2) gathers together.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import NamedTuple

from megatron_untied.config import ModelConfig
from megatron_untied.config.parameters import (
    EMBEDDING,
    OUTPUT,
    TRAIN_ALL,
    AdaptationConfig,
    Parameter,
    parameters,
)
from megatron_untied.phases import MemoryCategory
from megatron_untied.planner.geometry import Bytes, Geometry
from megatron_untied.streaming.layer import BEFORE_ATTENTION

Shape = tuple[int, ...]

_FP32 = 4
"""Bytes of an element of weights, gradients and moments at rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Some parameters of one tensor-parallel rank."""

    shapes: tuple[Shape, ...]
    trained: tuple[Shape, ...]
    """Those of them that have gradients and moments."""

    @classmethod
    def of(cls, found: Iterable[Parameter]) -> "Unit":
        """The unit of these parameters."""
        found = list(found)
        shapes = tuple(parameter.shape for parameter in found)
        trained = tuple(parameter.shape for parameter in found if parameter.is_trained)
        return cls(shapes=shapes, trained=trained)

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return _rows_numel(self.shapes, 1)

    @property
    def trained_numel(self) -> int:
        """Elements of the trained ones."""
        return _rows_numel(self.trained, 1)

    def rows_numel(self, num_ranks: int, *, trained: bool = False) -> int:
        """Elements that the first of ``num_ranks`` holds, each parameter cut by rows.

        Rows are padded to a multiple of the ranks, so ``num_ranks`` times as many are gathered.
        """
        return _rows_numel(self.trained if trained else self.shapes, num_ranks)


@cache
def _rows_numel(shapes: tuple[Shape, ...], num_ranks: int) -> int:
    return sum(-(-rows // num_ranks) * math.prod(rest) for rows, *rest in shapes)


class LayerUnits(NamedTuple):
    """The parameters of one layer."""

    qkv: Unit
    """The part before attention: input norm, QKV projection, norms of queries and keys."""
    output_and_mlp: Unit
    """The part after attention: output projection, norm, MLP."""
    whole: Unit
    """Both: FSDP2 gathers them together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterUnits:
    """A tensor-parallel rank's share of a model."""

    layers: tuple[LayerUnits, ...]
    """They differ only in what is trained."""
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
    trained_numel: int
    """Of those, the trained ones."""

    @property
    def layer(self) -> Unit:
        """A layer, where it does not matter what is trained."""
        return self.layers[0].whole


@cache
def parameter_units(
    model: ModelConfig, num_tensor: int = 1, adaptation: AdaptationConfig = TRAIN_ALL
) -> ParameterUnits:
    """What one of ``num_tensor`` tensor-parallel ranks holds, its vocabulary padded."""
    found = parameters(model, num_tensor, adaptation)
    # By layer: what comes before attention, and after it.
    layers = [([], []) for _ in range(model.num_layers)]
    for name, parameter in found.items():
        if name.startswith("decoder.layers."):
            number, part = name.removeprefix("decoder.layers.").split(".", 1)
            layers[int(number)][not part.startswith(BEFORE_ATTENTION)].append(parameter)
    units = tuple(
        LayerUnits(Unit.of(before), Unit.of(after), Unit.of([*before, *after]))
        for before, after in layers
    )
    embedding = Unit.of([found[EMBEDDING]])
    output = Unit.of([found[OUTPUT]] if OUTPUT in found else [])
    rest = Unit.of(its for n, its in found.items() if n.startswith("decoder.final_layernorm."))
    everything = (embedding, *(its.whole for its in units), output, rest)
    return ParameterUnits(
        layers=units,
        embedding=embedding,
        output=output,
        rest=rest,
        all=everything,
        is_tied=OUTPUT not in found,
        numel=sum(unit.numel for unit in everything),
        trained_numel=sum(unit.trained_numel for unit in everything),
    )


def num_parameters(
    model: ModelConfig, adaptation: AdaptationConfig = TRAIN_ALL, *, trained: bool = False
) -> int:
    """Of the whole model, without padding of the vocabulary; or those that are trained."""
    units = parameter_units(model, 1, adaptation)
    padding = (model.padded_vocab_size(1) - model.vocab_size) * model.hidden_size
    if trained:
        padded = bool(units.embedding.trained) + bool(units.output.trained)
        return units.trained_numel - padded * padding
    return units.numel - (1 + bool(units.output.shapes)) * padding


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
            units=parameter_units(model, geometry.num_tensor, geometry.config.adaptation),
            is_full=optimization.use_torch_fsdp2,
            is_on_host=optimization.optimizer_cpu_offload,
        )

    def at_rest(self) -> Bytes:
        """Between steps, on the device or on the host."""
        itemsize, numel = self.geometry.itemsize, self.units.trained_numel
        if self.is_full:  # fp32 rows of the weights and of both moments
            states = 3 * self._row_bytes(*self.units.all) + self._frozen_row_bytes()
            return Bytes({MemoryCategory.STATES: states})
        main = 0 if itemsize == _FP32 else _FP32  # fp32 weights are their own main weights
        states = (main + 2 * _FP32) * numel
        if self.geometry.config.optimization.use_distributed_optimizer:
            states = -(-states // self.geometry.num_sharding)
        return Bytes(
            {
                MemoryCategory.STATES: itemsize * self.units.numel + states,
                MemoryCategory.GRADIENTS: _FP32 * numel,
            }
        )

    def alone(self) -> Bytes:
        """Weights without gradients and moments, on the device or on the host."""
        if self.is_full:
            rows = self._row_bytes(*self.units.all) + self._frozen_row_bytes()
            return Bytes({MemoryCategory.STATES: rows})
        return Bytes({MemoryCategory.STATES: self.geometry.itemsize * self.units.numel})

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
        # Those of adapters leave the frozen weights out.
        has_frozen = self.geometry.config.adaptation.lora_rank is None
        if self.is_full:
            num_bytes = 3 * self._row_bytes(*self.units.all)
            num_bytes += has_frozen * self._frozen_row_bytes()
        else:
            num_bytes = 3 * _FP32 * self.units.trained_numel
            frozen = self.units.numel - self.units.trained_numel
            num_bytes += has_frozen * self.geometry.itemsize * frozen
            num_bytes = -(-num_bytes // self.geometry.num_sharding)
        return Bytes({MemoryCategory.CHECKPOINT: num_bytes})

    def gradients(self, num_layers_done: int | None) -> Bytes:
        """Sharded gradients: of the output and of so many layers; None is all."""
        if not self.is_full or self.is_on_host:
            return Bytes()
        done = self.units.all
        if num_layers_done is not None:
            layers = self.units.layers[len(self.units.layers) - num_layers_done :]
            done = (self.units.output, *(its.whole for its in layers))
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
        gathered = num_ranks * unit.rows_numel(num_ranks, trained=True)
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
        if not unit.trained:
            return Bytes()
        if self.units.is_tied:  # beside the output matrix' gradient: their sum
            return full_gradients(unit, unit)
        # Summed over tiles in fp32 if the residual is on the host.
        is_wide = self.geometry.num_sharding == 1 or memory.park_during_attention
        width = _FP32 if is_wide else self.geometry.itemsize
        lookup = Bytes({MemoryCategory.WEIGHT_GRADIENTS: width * unit.numel})
        return lookup + self.reducing(unit)

    def _row_bytes(self, *units: Unit) -> int:
        """fp32 bytes of this rank's rows of trained parameters."""
        ranks = self.geometry.num_sharding
        return _FP32 * sum(unit.rows_numel(ranks, trained=True) for unit in units)

    def _frozen_row_bytes(self) -> int:
        """Bytes of this rank's rows of frozen parameters, in the model's dtype."""
        ranks, units = self.geometry.num_sharding, self.units.all
        numel = sum(u.rows_numel(ranks) - u.rows_numel(ranks, trained=True) for u in units)
        return self.geometry.itemsize * numel


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
    numel = sum(unit.trained_numel for unit in units)
    return Bytes({MemoryCategory.WEIGHT_GRADIENTS: _FP32 * numel})
