"""Device memory through a step, snapshot by snapshot: one step for every kind of layer."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from typing_extensions import override

from megatron_untied.config.parameters import first_layer_with_backward
from megatron_untied.context_parallel.buffer_plan import Buffer
from megatron_untied.phases import MemoryCategory, Phase
from megatron_untied.planner.activations import (
    KernelBuffers,
    StreamedActivations,
    attention_sizes,
    bytes_by_category,
    plain_buffers,
)
from megatron_untied.planner.geometry import Bytes, Geometry
from megatron_untied.planner.tiles import Tiles, loss_bytes
from megatron_untied.planner.weights import (
    ShardedWeights,
    Stage,
    Unit,
    full_gradients,
    lookup_scratch_bytes,
)


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Device memory at one moment of a step."""

    phase: Phase
    by_category: Bytes
    layer: int | None = None
    """Counted from 0; None outside of layers."""
    buffers: tuple[Buffer, ...] = ()
    """What is alive of the workspace, the residual, and what attention's kernel makes.

    They are part of ``by_category``, which holds all else as well.
    """

    @property
    def num_bytes(self) -> int:
        """All that is alive."""
        return self.by_category.total()


_LayerPeak = tuple[Phase, Bytes, Iterable[Buffer]]
"""What is alive in a phase of a layer: by category, and as buffers beside that."""


def _snapshot(
    phase: Phase, other: Bytes, buffers: Iterable[Buffer] = (), layer: int | None = None
) -> MemorySnapshot:
    alive = tuple(buffers)
    return MemorySnapshot(phase, other + bytes_by_category(alive), layer, alive)


def _outside(name: str, num_bytes: int, category: MemoryCategory) -> Buffer:
    """A tensor that is not in the workspace."""
    return Buffer(name=name, numel=num_bytes, dtype=torch.uint8, category=category)


class Step(ABC):
    """A step of one rank, after the first one; subclasses add the layers."""

    kept: Bytes
    """What all layers keep on the device between forward and backward; set by subclasses."""

    def __init__(
        self,
        geometry: Geometry,
        rank: int = 0,
        every_layer: bool = True,
        *,
        evaluates: bool = False,
    ) -> None:
        """What is alive all along.

        Args:
            geometry: sizes of the rank.
            rank: a Ulysses rank; their heads, and so their buffers, may differ.
            every_layer: otherwise only the layers at which something changes, which have the same
                peak in less time.
            evaluates: no step but a forward of one micro-batch, without gradients and optimizer.
        """
        self.geometry, self.rank, self.every_layer = geometry, rank, every_layer
        self.evaluates = evaluates
        self.weights = weights = ShardedWeights.of(geometry)
        # Tokens, labels (int64) and masks (fp32) of all micro-batches; weights of one's tokens.
        batch = 20 * geometry.n * geometry.b * geometry.num_micro_batches
        batch += 4 * geometry.n * geometry.b
        if evaluates:  # tokens and labels
            batch = 16 * geometry.n * geometry.b
        # fp32 cosines and sines: one table, or one per sample where positions are reset.
        num_tables = geometry.b if geometry.config.data.reset_position_ids else 1
        rotated = int(geometry.d * geometry.config.model.rotary.percent)
        tables = 4 * rotated * geometry.n * num_tables
        positions = 8 * geometry.n  # int64
        # Megatron-core's one buffer for what sequence parallelism gathers: [tokens, m]. It is
        # never freed, so it counts in every phase.
        gathered_tokens = geometry.tile_tokens if geometry.is_streamed else geometry.tokens
        gathered_tokens *= geometry.num_token_parts > 1
        gathered = gathered_tokens * geometry.m * geometry.itemsize
        inputs = {MemoryCategory.INPUTS: batch + tables + positions, MemoryCategory.TILES: gathered}
        at_rest = weights.alone() if evaluates else weights.at_rest()
        self.states = Bytes(inputs) + (Bytes() if weights.is_on_host else at_rest)
        """Through a whole step: weights, moments, and what every layer reads."""
        # Of the micro-batches before.
        has_gradients = geometry.num_micro_batches > 1 and not evaluates
        self.in_forward = self.states + (weights.gradients(None) if has_gradients else Bytes())
        """Through a whole forward."""
        self.residual = (_outside("residual", geometry.residual_bytes, MemoryCategory.RESIDUAL),)
        """The residual, in backward its gradient: [n, b, m] or a part of it."""
        self.residual_in_loss = self.residual
        self.residual_at_ends = self.residual
        """While the embedding's forward or backward runs."""

    def forward(self) -> Iterator[MemorySnapshot]:
        """The peaks of each phase up to the loss."""
        weights, residual = self.weights, self.residual
        lookup = self.in_forward + weights.gathered(Stage.EMBEDDING)
        yield _snapshot(Phase.FORWARD, lookup, self.residual_at_ends)
        for layer in self._layers:
            for phase, alive, buffers in self.layer_forward(layer):
                yield _snapshot(phase, alive, buffers, layer)

        before_loss = self.in_forward + self.kept
        at_loss = before_loss + weights.gathered(Stage.BEFORE_LOSS)
        yield _snapshot(Phase.FORWARD, at_loss, residual)
        in_loss = before_loss + weights.gathered(Stage.LOSS)
        in_loss += loss_bytes(self.geometry, weights.units, evaluates=self.evaluates)
        yield _snapshot(Phase.LOSS, in_loss, self.residual_in_loss)

    def snapshots(self) -> Iterator[MemorySnapshot]:
        """The peaks of each phase, in the order of a step."""
        yield from self.forward()
        if self.evaluates:
            return
        num_layers, weights, units = self.geometry.num_layers, self.weights, self.weights.units
        residual = self.residual
        # The reduction of the output matrix' gradient starts while the last layer arrives.
        after_loss = self.in_backward(0) + self.kept
        after_loss += weights.gathered(Stage.AFTER_LAYER_BACKWARD, num_layers)
        after_loss += weights.reducing(units.output) + full_gradients(units.output)
        yield _snapshot(Phase.BACKWARD, after_loss, residual)
        for layer in reversed(self._layers):
            for phase, alive, buffers in self.layer_backward(layer):
                yield _snapshot(phase, alive, buffers, layer)

        if not self.geometry.config.memory.park_during_attention:  # else summed tile by tile
            yield _snapshot(Phase.BACKWARD, self._in_lookup_backward(), self.residual_at_ends)
        embedding = weights.gradients(None) - weights.gradients(num_layers)
        lookup_backward = self.in_backward(num_layers) + embedding + weights.embedding_gradient()
        yield _snapshot(Phase.BACKWARD, lookup_backward, self.residual_at_ends)
        yield _snapshot(Phase.OPTIMIZER, self.states + weights.gradients(None))

    def _in_lookup_backward(self) -> Bytes:
        """In the kernel of the embedding's backward, while the first layer is reduced."""
        geo, units = self.geometry, self.weights.units
        num_bytes = geo.itemsize * units.embedding.numel  # what it returns
        num_bytes += lookup_scratch_bytes(geo.tokens, geo.v, geo.m)
        if geo.b > 1:  # it takes [b, n, m], contiguous
            num_bytes += geo.tokens * geo.m * geo.itemsize
        alive = self.in_backward(geo.num_layers) + self.weights.reduce_buffer(units.layer)
        return alive + Bytes({MemoryCategory.WEIGHT_GRADIENTS: num_bytes})

    @abstractmethod
    def layer_forward(self, layer: int) -> Iterator[_LayerPeak]:
        """The peaks of one layer's forward."""

    @abstractmethod
    def layer_backward(self, layer: int) -> Iterator[_LayerPeak]:
        """The peaks of one layer's backward."""

    @cached_property
    def _layers(self) -> list[int]:
        num_layers, memory = self.geometry.num_layers, self.geometry.config.memory
        if self.every_layer:
            return list(range(num_layers))
        size, on_host = memory.recompute_num_layers, memory.cpu_offloading_num_layers
        first_kept = memory.first_kept_output(num_layers)
        last_group = (num_layers - 1) // size * size
        # The ends, both sides of the last group, of the last layer on the host and of the first
        # that keeps its output; the last layers of the first group and of groups that are only
        # partly on the host, or keep outputs only partly.
        layers = {0, 1, on_host - 1, on_host, last_group - 1, last_group}
        layers |= {first_kept - 1, first_kept}
        layers |= {at // size * size + size - 1 for at in (0, on_host, first_kept)}
        layers |= {at // size * size - 1 for at in (on_host, first_kept)}
        layers |= {num_layers - 2, num_layers - 1}
        config = self.geometry.config
        first = first_layer_with_backward(config.model, config.adaptation)
        layers |= {first, first + 1, first + size - 1}
        return sorted(i for i in layers if 0 <= i < num_layers)

    def in_backward(self, num_layers_done: int) -> Bytes:
        """Through a backward, with the gradients that are done.

        The gradient of a tied output matrix is whole until the end, where the lookup's joins it.
        """
        units = self.weights.units
        tied = full_gradients(units.embedding) if units.is_tied else Bytes()
        if self.geometry.num_micro_batches > 1:  # all gradients are there already
            return self.in_forward + tied
        return self.states + self.weights.gradients(num_layers_done) + tied

    def around_layer_backward(self, layer: int) -> Bytes:
        """Alive all along the backward of ``layer``, but for activations."""
        num_layers = self.geometry.num_layers
        alive = self.in_backward(num_layers - 1 - layer)
        alive += self.weights.gathered(Stage.LAYER_BACKWARD, layer)
        return alive + self.weights.reduce_buffer(self._reduced_before(layer))

    def _reduced_before(self, layer: int) -> Unit:
        """The unit whose gradients are being reduced when the backward of ``layer`` begins."""
        units = self.weights.units
        is_last = layer + 1 == self.geometry.num_layers
        return units.output if is_last else units.layers[layer + 1].whole


class StreamedStep(Step):
    """A step whose layers recompute."""

    def __init__(
        self,
        geometry: Geometry,
        rank: int = 0,
        every_layer: bool = True,
        *,
        evaluates: bool = False,
    ) -> None:
        """As a step, with what layers keep, their workspace, and temporaries of tiles."""
        super().__init__(geometry, rank, every_layer, evaluates=evaluates)
        self.activations = StreamedActivations.of(geometry, rank, self._layers, evaluates=evaluates)
        self.kept = self.activations.kept_forward(geometry.num_layers - 1)
        self.tiles = Tiles.of(geometry, self.weights.units)
        if self.activations.policy.park:  # it is on the host
            sizes, self.residual = self.activations.plan.sizes, ()
            self.residual_in_loss = (sizes.loss_tiles(),)
            self.residual_at_ends = (sizes.row_tiles(),)

    @override
    def layer_forward(self, layer: int) -> Iterator[_LayerPeak]:
        kept, policy = self.activations, self.activations.policy
        alive = self.in_forward + self.weights.gathered(Stage.LAYER_FORWARD, layer)
        alive += kept.kept_forward(layer)
        lse = Bytes({MemoryCategory.KEPT: self.geometry.lse_bytes})

        in_attention = kept.workspace(Phase.ATTENTION_FORWARD, layer)
        in_attention = (*self.residual, *in_attention)
        # Log-sum-exps that stay on the device are already counted with what is kept.
        keeps_output = policy.layers[layer].keeps_output
        is_counted = keeps_output and not policy.layers[layer].lse_on_host
        attention = alive + (Bytes() if is_counted else lse)
        yield Phase.ATTENTION_FORWARD, attention + self.tiles.projection, in_attention
        # A chunk is projected before the kernel of the one before it is called, never during it.
        yield Phase.ATTENTION_FORWARD, attention, (*in_attention, *kept.kernel.in_forward)

        mlp = alive + self.tiles.mlp_forward + (Bytes() if keeps_output else lse)
        in_mlp = kept.workspace(Phase.MLP_FORWARD, layer)
        yield Phase.MLP_FORWARD, mlp, (*self.residual, *in_mlp)

    @override
    def layer_backward(self, layer: int) -> Iterator[_LayerPeak]:
        geo, policy, workspace = self.geometry, self.activations.policy, self.activations.workspace
        if not policy.layers[layer].has_backward:
            return
        alive = self.around_layer_backward(layer) + self.activations.kept_backward(layer)
        if layer == policy.layers[layer].group[-1]:
            yield from self._recompute_group(layer, alive)

        # Gradients of weights are summed over tiles in fp32, those of a first tile are not yet.
        units = self.weights.units.layers[layer]
        mlp_gradients, qkv_gradients = map(full_gradients, (units.output_and_mlp, units.qkv))
        has_sums = geo.num_tiles > 1
        in_mlp = (*self.residual, *workspace(Phase.MLP_BACKWARD, layer))
        sums = mlp_gradients if has_sums else Bytes()
        yield Phase.MLP_BACKWARD, alive + self.tiles.mlp_backward + sums, in_mlp
        yield Phase.MLP_BACKWARD, alive + self.tiles.mlp_backward_end + mlp_gradients, in_mlp

        if policy.park:  # waited for before attention
            alive -= self.weights.reduce_buffer(self._reduced_before(layer))
        kernel, attention = self.activations.kernel, alive + mlp_gradients
        if policy.layers[layer].lse_on_host:  # fetched chunk by chunk
            sizes = self.activations.plan.sizes.attention
            heads = max(len(each.query_heads) for each in sizes.mine)
            attention += Bytes({MemoryCategory.KEPT: 4 * sizes.tokens * sizes.b * heads})
        in_attention = (*self.residual, *workspace(Phase.ATTENTION_BACKWARD, layer))
        loading = attention + self.tiles.projection
        yield Phase.ATTENTION_BACKWARD, loading, (*in_attention, kernel.home_while_loading)
        yield Phase.ATTENTION_BACKWARD, attention, (*in_attention, *kernel.at_peak)
        yield Phase.ATTENTION_BACKWARD, attention, (*in_attention, kernel.home)

        qkv = alive + self.tiles.qkv_backward
        qkv += mlp_gradients + (qkv_gradients if has_sums else Bytes())
        in_qkv = workspace(Phase.QKV_BACKWARD, layer)
        dk_dv = replace(kernel.home, category=MemoryCategory.SLOTS)
        yield Phase.QKV_BACKWARD, qkv, (*self.residual, *in_qkv, dk_dv)

        # Afterwards the reduction of the layer's gradients starts, while the next one arrives.
        after = self.in_backward(geo.num_layers - layer)
        after += self.weights.gathered(Stage.AFTER_LAYER_BACKWARD, layer)
        after += self.weights.reducing(units.whole) + full_gradients(units.whole)
        if layer and policy.layers[layer - 1].has_backward:
            after += self.activations.kept_backward(layer - 1)
        yield Phase.BACKWARD, after, self.residual

    def _recompute_group(self, layer: int, alive: Bytes) -> Iterator[_LayerPeak]:
        """The group that ends with ``layer`` is recomputed when the backward of ``layer`` begins.

        Every layer but the last makes the input of the next one where it is kept.
        """
        policy, workspace = self.activations.policy, self.activations.workspace
        first = policy.layers[layer].group[0]
        attends = [i for i in range(first, layer + 1) if not policy.layers[i].keeps_output]
        if attends:
            # The last of them has most; the inputs of layers behind it are not there yet.
            later = policy.layers[attends[-1] + 1 : layer + 1]
            missing = sum(not each.input_on_host for each in later) * self.geometry.residual_bytes
            before = alive - Bytes({MemoryCategory.KEPT: missing})
            in_attention = (*self.residual, *workspace(Phase.RECOMPUTE_ATTENTION, attends[-1]))
            yield Phase.RECOMPUTE_ATTENTION, before + self.tiles.projection, in_attention
            in_kernel = self.activations.kernel.in_forward
            yield Phase.RECOMPUTE_ATTENTION, before, (*in_attention, *in_kernel)
        members = layer - first + 1
        if members == 1:
            return
        in_mlp = (*self.residual, *workspace(Phase.RECOMPUTE_MLP, layer - 1))
        yield Phase.RECOMPUTE_MLP, alive + self.tiles.mlp_forward, in_mlp
        if members == 2:
            return
        # One layer earlier the next layer's weights arrive, and the last input is not there yet.
        alive = alive + self.weights.gathered(Stage.RECOMPUTE_AHEAD)  # += would change the caller's
        if not policy.layers[layer].input_on_host:
            alive -= Bytes({MemoryCategory.KEPT: self.geometry.residual_bytes})
        yield Phase.RECOMPUTE_MLP, alive + self.tiles.mlp_forward, in_mlp


class PlainStep(Step):
    """A step whose layers keep all that autograd saves."""

    def __init__(
        self,
        geometry: Geometry,
        rank: int = 0,
        every_layer: bool = True,
        *,
        evaluates: bool = False,
    ) -> None:
        """As a step, with what autograd saves per layer, and what is alive in attention.

        If it ``evaluates``, a layer has at most what autograd would save of it, and keeps nothing.
        """
        super().__init__(geometry, rank, every_layer, evaluates=evaluates)
        geo, model = geometry, geometry.config.model
        # What autograd saves of a layer, counted from megatron-core's modules.
        heads = geo.h + 2 * geo.g + geo.h  # q, k, v, o
        heads += geo.h if 1 < geo.g < geo.h else 0  # grouped queries are made contiguous
        heads += geo.h + geo.g if model.qk_layernorm else 0
        inner = (5 if model.swiglu else 2) * geo.f
        # Two norms save their input and output each; LayerNorm saves its input in fp32.
        wide = 4 // geo.itemsize if model.normalization == "LayerNorm" else 1
        norms = 2 * (1 + wide) * geo.residual_tokens * geo.m
        numel = norms + geo.tokens * (heads * geo.d + inner)
        self.saved_bytes = numel * geo.itemsize + geo.lse_bytes
        """Of one layer."""
        num_kept = 0 if evaluates else geo.num_layers
        self.kept = Bytes({MemoryCategory.KEPT: num_kept * self.saved_bytes})

        self.attention = plain_buffers(geo, rank)
        """What is alive in attention, forward and backward."""
        kernel = KernelBuffers.of(attention_sizes(geo, rank), geo.kernel)
        # dO before it is in slots, and dK and dV as autograd takes them beside the kernel's peak.
        incoming = _outside("incoming_d_out", geo.output_bytes, MemoryCategory.SLOTS)
        returned = replace(kernel.home, name="returned_dk_dv", memory="returned_dk_dv")
        self.attention[Phase.ATTENTION_FORWARD] += kernel.in_forward
        self.attention[Phase.ATTENTION_BACKWARD] += (*kernel.at_peak, incoming, returned)

    @override
    def layer_forward(self, layer: int) -> Iterator[_LayerPeak]:
        alive = self.in_forward + self.weights.gathered(Stage.LAYER_FORWARD, layer)
        num_layers = 1 if self.evaluates else layer + 1
        alive += Bytes({MemoryCategory.KEPT: num_layers * self.saved_bytes})
        in_attention = self.attention[Phase.ATTENTION_FORWARD]
        yield Phase.ATTENTION_FORWARD, alive, (*self.residual, *in_attention)

    @override
    def layer_backward(self, layer: int) -> Iterator[_LayerPeak]:
        geo, is_gated = self.geometry, self.geometry.config.model.swiglu
        alive = self.around_layer_backward(layer)
        alive += Bytes({MemoryCategory.KEPT: (layer + 1) * self.saved_bytes})
        gradient = geo.tokens * geo.f * (2 if is_gated else 1)  # [n, b, 2 f or f]
        matrix = geo.m * geo.f
        mlp = Bytes({MemoryCategory.TILES: (gradient + matrix) * geo.itemsize})
        yield Phase.BACKWARD, alive + mlp, self.residual

        # What the MLP and the norm before it saved is gone when attention's backward begins.
        freed = geo.tokens * geo.f * (5 if is_gated else 2) + 2 * geo.residual_tokens * geo.m
        alive -= Bytes({MemoryCategory.KEPT: freed * geo.itemsize})
        in_attention = self.attention[Phase.ATTENTION_BACKWARD]
        yield Phase.ATTENTION_BACKWARD, alive, (*self.residual, *in_attention)
