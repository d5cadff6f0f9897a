"""The megatron-core transformer layer: forward and backward in phases.

Forward: for each chunk of heads project and exchange q (k, v), attend, exchange back into the
chunk's slot of O; then tile by tile the output projection, the residual and the MLP, written over
the residual itself.

Backward, with the incoming gradient G overwritten in place:

1. by tiles: the backward of the MLP and the output projection; the gradient of O goes into
   its slots, one for each chunk of heads;
2. by chunks of heads: the backward of attention; dQ is received in the slot that dO was sent from;
3. by tiles: the backward of the rotation, the QKV projection and the norm, added to G.

With ``--park-during-attention`` residual and gradient are on the host, and layers pass stand-ins
(:mod:`megatron_untied.residual`).
"""

from dataclasses import dataclass, field

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megatron_untied.context_parallel.exchange import HeadChunks
from megatron_untied.context_parallel.kv_gradients import KvHome
from megatron_untied.context_parallel.sequence import SequenceInfo
from megatron_untied.context_parallel.ulysses import SavedAttention
from megatron_untied.dtypes import accumulation_dtype
from megatron_untied.phases import MemoryCategory, Phase, allocating
from megatron_untied.residual import Rows
from megatron_untied.rope import rotate_
from megatron_untied.streaming.activation_store import (
    ActivationStore,
    CheckpointGroup,
    SavedLayer,
    StoredLse,
    fetch,
)
from megatron_untied.streaming.projections import (
    StreamedProjections,
    attention_and_mlp,
    queries_keys_values,
)
from megatron_untied.streaming.replay import ReplayCheck, layer_checksums, row_checksum
from megatron_untied.tiling import (
    GradientSums,
    Tile,
    rows_of,
    split_rows,
    tile_backward,
    tiles_of,
)

# Parameters whose gradients are summed over tiles in phase 3, and in phase 1.
BEFORE_ATTENTION = (
    "input_layernorm.",
    "self_attention.linear_qkv.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
)
AFTER_ATTENTION = ("self_attention.linear_proj.", "pre_mlp_layernorm.", "mlp.")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingContext:
    """What the streamed layers of one model share."""

    tile_size: int
    store: ActivationStore
    ends_on_host: bool = False
    """Whether what follows the last layer takes a residual that is on the host."""
    replay: ReplayCheck = field(default_factory=ReplayCheck)
    """Compares recomputed values with those of forward, in the steps in which it is active."""


class StreamedTransformerLayer(TransformerLayer):
    """A transformer layer whose residual is updated in place and whose backward recomputes.

    Built from the standard layer's submodules, with the same parameter names. The output of
    :meth:`forward` is in the memory of its input: nothing else may read the input afterwards.

    If the policy parks, an input on the device is copied to the host, and stays as it is. From
    there on to the last layer, and back, hooks see stand-ins.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        layer_number: int = 1,
        hidden_dropout: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        *,
        streaming: StreamingContext,
        **newer_core_arguments: object,
    ):
        """``newer_core_arguments``: what megatron-core passes after 0.16, such as ``name``."""
        super().__init__(
            config,
            submodules,
            layer_number,
            hidden_dropout,
            pg_collection,
            vp_stage,
            **newer_core_arguments,
        )
        if self.hidden_dropout or config.attention_dropout:
            raise ValueError(
                "a streamed layer recomputes without replaying random numbers; set "
                "--hidden-dropout 0 and --attention-dropout 0."
            )
        self.streaming = streaming
        self.progress = self.self_attention.ulysses.progress  # receives the phases of this layer

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: SequenceInfo | None = None,
        **unused_arguments: object,
    ) -> tuple[Tensor, None]:
        """[n, b, m] -> [n, b, m] in the same memory, or on the host if parked; and no context.

        Masks, rotary tables and inference contexts that megatron-core passes are not used.
        """
        if self._backward_hooks:
            raise ValueError(
                "a full backward hook on a streamed layer would see its output's gradient after "
                "that became its input's; use register_full_backward_pre_hook, or a hook on the "
                "output tensor."
            )
        store, index = self.streaming.store, self.layer_number - 1
        if store.policy.park and not Rows.of(hidden_states).is_on_host:
            hidden_states = MoveResidual.apply(hidden_states, store, True)
        sequence, group = SequenceInfo.from_slot(packed_seq_params), None
        # Inside a Function's forward grad mode is off, so it is tested here: without a backward
        # nothing may be saved.
        if torch.is_grad_enabled() and store.policy.layers[index].has_backward:
            group = store.begin(self, index, sequence)
        out = _StreamedLayer.apply(hidden_states, self, sequence, group, *self.parameters())
        is_last = index + 1 == len(store.policy.layers)
        if store.policy.park and is_last and not self.streaming.ends_on_host:
            out = MoveResidual.apply(out, store, False)
        return out, None

    def tiles(self, num_local: int) -> list[Tile]:
        """The tiles of a residual of ``num_local`` rows."""
        # With sequence parallelism a tile is gathered over the tensor-parallel ranks.
        gathered = self.tp_group.size() if self.config.sequence_parallel else 1
        return tiles_of(num_local, self.streaming.tile_size, gathered)


class MoveResidual(torch.autograd.Function):
    """A residual to the host, and in backward its gradient back; or the other way round."""

    @staticmethod
    def forward(ctx, x: Tensor, store: ActivationStore, to_host: bool) -> Tensor:
        """[n, b, m] -> the same; on the host it is a stand-in."""
        ctx.store, ctx.to_host = store, to_host
        return store.move(x, to_host=to_host)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        """The gradient, where ``x`` was."""
        return ctx.store.move(gradient, to_host=not ctx.to_host), None, None


class _StreamedLayer(torch.autograd.Function):
    """Parameters are inputs only as addresses of their gradients; values come from the module."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        layer: StreamedTransformerLayer,
        sequence: SequenceInfo,
        group: CheckpointGroup | None,
        *parameters,
    ) -> Tensor:
        """The layer's output, written over ``x`` [n, b, m]; saved in the last of ``group``."""
        ctx.layer, ctx.group, store = layer, group, layer.streaming.store
        for parameter in (p for p in parameters if p.requires_grad):
            # A bf16 leaf takes the fp32 sums as they are; autograd would round them first.
            parameter.grad_dtype = accumulation_dtype(parameter.dtype)
        saved = group and group.members[-1]
        saves_attention = saved is not None and store.policy.layers[saved.index].keeps_output
        # Not mark_dirty(x): FSDP2 passes x as a view made by a custom Function, which autograd
        # refuses to modify. An alias shares the version counter, so autograd still raises for an
        # operation that saved x for its own backward.
        residual = result = Rows.of(x.detach())
        copy = None
        if saved is not None and store.policy.layers[saved.index].saves_input:
            # A copy overlaps with attention, which only reads.
            result, copy = store.save_input(saved, residual)
        tiles, checksum = layer.tiles(residual.shape[0]), None
        if saved is not None and layer.streaming.replay.active:
            checksum = row_checksum(residual, tiles)  # the output may overwrite it
        with layer.progress.phase(Phase.ATTENTION_FORWARD):
            out, lse = attention_forward(
                layer, residual, sequence, is_saved=saves_attention, has_backward=saved is not None
            )
        if copy is not None:
            copy.wait()
        with layer.progress.phase(Phase.MLP_FORWARD):
            mlp_forward(layer, residual, out, result)
        if checksum is not None:
            saved.checksums = layer_checksums(checksum, out, result.tiles(tiles), tiles)
        if saves_attention:
            saved.out, saved.lse = out, lse
        else:
            out.release()
        if saved is not None:
            store.complete(saved)
        return result.as_tensor()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        layer, group, store = ctx.layer, ctx.group, ctx.layer.streaming.store
        rows = Rows.of(gradient)
        if store.policy.park:
            if not rows.is_on_host:
                raise RuntimeError(
                    "the gradient between two layers is on the host, and this one is a tensor that "
                    "a hook or a second use of a layer's output has computed; leave that out, or "
                    "--park-during-attention"
                )
        elif not is_ours(gradient):
            rows = Rows(gradient.clone(memory_format=torch.contiguous_format))  # costs 1 H
        # In a group the first call recomputes all layers, the others find theirs complete.
        saved = recompute(group, store)
        fetch(saved, group.needed_next())  # the latter beside the backward of this layer
        if saved.checksums is not None:
            tiles = layer.tiles(saved.x.shape[0])
            layer.streaming.replay.replay(layer, saved.x, saved.out, tiles, saved.checksums)
        y = SavedAttention(saved.out, saved.lse)
        sums = layer_backward(layer, rows, saved.x, y, group.sequence)
        saved.x.release()  # host memory is free for the next layer, whatever still references it
        saved.out.release()
        return rows.as_tensor(), None, None, None, *sums.in_order()


def attention_forward(
    layer: StreamedTransformerLayer,
    x: Rows,
    sequence: SequenceInfo,
    *,
    is_saved: bool,
    has_backward: bool = True,
) -> tuple[HeadChunks, StoredLse]:
    """Attention of all heads over the layer's input: O [n, b, h, d] and its lse. Collective.

    O that is not saved is valid until the next layer runs.
    """
    store, index = layer.streaming.store, layer.layer_number - 1
    ulysses, attention = layer.self_attention.ulysses, layer.self_attention.attention_over(sequence)
    projections = StreamedProjections(layer, x, layer.tiles(x.shape[0]), sequence)
    sizes, tile_rows = ulysses.sizes(projections, attention), projections.tile_rows
    out = store.out(
        index,
        sizes,
        tile_rows,
        projections.device,
        is_saved=is_saved,
        has_backward=has_backward,
    )
    lse = ulysses.forward(projections, out, attention)
    on_host = is_saved and store.policy.layers[index].input_on_host
    return out, StoredLse(lse, store.arena if on_host else None)


def mlp_forward(layer: StreamedTransformerLayer, x: Rows, out: HeadChunks, result: Rows) -> None:
    """Output projection, residual, MLP: x [n, b, m], O [n, b, h, d] -> ``result`` [n, b, m].

    ``result`` may be ``x`` itself: a tile is written after it was read.
    """
    tiles = layer.tiles(x.shape[0])
    for tile, (x_tile, y) in zip(tiles, x.updates(tiles, result), strict=True):
        torch.add(*attention_and_mlp(layer, x_tile, out.rows(tile.seen)), out=y)  # [t, b, m]


def recompute(group: CheckpointGroup, store: ActivationStore) -> SavedLayer:
    """Pop the last layer left in ``group``, complete; the caller releases its x and O.

    Called in the backward of a group's layers, last first: the first call completes all of them.
    FSDP2 has gathered the parameters of the calling layer only. The others' are gathered here, one
    layer at a time, and those of the layer whose backward comes next stay gathered.
    """
    members = group.members
    for saved, successor in zip(members, [*members[1:], None], strict=True):
        if saved.out is not None and (successor is None or successor.x is not None):
            continue
        layer = saved.layer
        needs_gather = successor is not None and isinstance(layer, FSDPModule)
        if needs_gather:
            layer.unshard()
        if saved.out is None:
            # The last layer's output is used at once, in the backward that called this.
            is_saved = successor is not None
            with layer.progress.phase(Phase.RECOMPUTE_ATTENTION):
                saved.out, saved.lse = attention_forward(
                    layer, saved.x, group.sequence, is_saved=is_saved
                )
        if successor is not None:
            fetch(saved, successor)
            on_host = store.policy.layers[successor.index].input_on_host
            with allocating(MemoryCategory.KEPT):
                x = store.rows(saved.x, on_host=on_host)
            with layer.progress.phase(Phase.RECOMPUTE_MLP):
                mlp_forward(layer, saved.x, saved.out, x)
            successor.x = x
            for slot in saved.out.host_slots:
                slot.leave()  # if it is on the disk: its own backward comes later
        if needs_gather and successor is not members[-1]:
            layer.reshard()
    return members.pop()


# A function for each phase of backward: what it holds of its last tile is freed on return.


def layer_backward(
    layer: StreamedTransformerLayer,
    gradient: Rows,
    x: Rows,
    y: SavedAttention,
    sequence: SequenceInfo,
) -> GradientSums:
    """Turn ``gradient`` [n, b, m] of the output into that of x; returns the parameters'."""
    store, ulysses = layer.streaming.store, layer.self_attention.ulysses
    attention = layer.self_attention.attention_over(sequence)
    projections = StreamedProjections(layer, x, layer.tiles(x.shape[0]), sequence)
    sizes, device = ulysses.sizes(projections, attention), projections.device
    sums, tile_rows = GradientSums(layer), projections.tile_rows
    d_out = store.d_out(sizes, tile_rows, device)
    with layer.progress.phase(Phase.MLP_BACKWARD):
        _mlp_backward(layer, gradient, x, y.out, d_out, sums)
    if store.policy.park:
        store.workspace.release()  # of the tiles
        free_reduced_gradients(layer)
    make_sums, home = store.kv_gradients(sizes, layer.streaming.tile_size, tile_rows, device)
    with layer.progress.phase(Phase.ATTENTION_BACKWARD):
        dkv = ulysses.backward(projections, y, d_out, attention, make_sums, home)
    # The rest reads none of the chunk loop's buffers, and tiles need their memory.
    store.workspace.release()
    with layer.progress.phase(Phase.QKV_BACKWARD):
        _qkv_backward(layer, gradient, projections, d_out, dkv, sums)  # dQ was received over dO
    store.workspace.release()
    d_out.release()
    dkv.release()
    return sums


def _mlp_backward(
    layer: StreamedTransformerLayer,
    gradient: Rows,
    x: Rows,
    out: HeadChunks,
    d_out: HeadChunks,
    sums: GradientSums,
) -> None:
    """Turn ``gradient`` [n, b, m] into that of the residual; write ``d_out`` [n, b, h, d]."""
    names, tiles = sums.names(AFTER_ATTENTION), layer.tiles(x.shape[0])
    gradients = gradient.updates(tiles, gradient, "gradient_tiles")
    for tile, x_tile, (g, left) in zip(tiles, x.tiles(tiles), gradients, strict=True):
        inputs = x_tile, out.rows(tile.seen)  # [t, b, m], [t, b, h, d]
        # Both addends have the gradient of their sum, which is not computed again.
        dx, do = tile_backward(attention_and_mlp, layer, inputs, [g, g], sums, names)
        left.copy_(dx)  # of the residual; what comes through q, k, v is added in phase 3
        for rows, part in split_rows(do, tile.seen):
            d_out.write(rows, part)  # [t, b, h, d] -> slots of chunks


def _qkv_backward(
    layer: StreamedTransformerLayer,
    gradient: Rows,
    projections: StreamedProjections,
    dq: HeadChunks,
    dkv: KvHome,
    sums: GradientSums,
) -> None:
    """Add the gradient that comes through q, k, v to ``gradient`` [n, b, m].

    ``dq`` [n, b, h, d] and dK are those of the rotated queries and keys; dK and dV [n, b, g, d].
    """
    names, dtype = sums.names(BEFORE_ATTENTION), gradient.dtype
    (cos, sin), tiles = projections.rotary, projections.tiles
    updates = gradient.updates(tiles, gradient, "gradient_tiles")
    for tile, x_tile, (g, left) in zip(tiles, projections.x.tiles(tiles), updates, strict=True):
        seen = tile.seen
        rotary = rows_of(cos, seen), rows_of(sin, seen)
        gradients = [  # [t, b, h, d] and twice [t, b, g, d]
            rotate_(dq.rows(seen), *rotary, adjoint=True),
            # fp32 if several ranks' parts of a key-value head met here: rounded after the rotation.
            rotate_(dkv.rows(0, seen), *rotary, adjoint=True).to(dtype),
            dkv.rows(1, seen).to(dtype),
        ]
        (dx,) = tile_backward(queries_keys_values, layer, [x_tile], gradients, sums, names)
        torch.add(g, dx, out=left)  # to that of the residual, left by phase 1


def free_reduced_gradients(layer: StreamedTransformerLayer) -> None:
    """Free the buffer that the gradients of the unit before were reduced from: up to 2 GiB.

    FSDP2 itself holds it until the gradients of ``layer`` are reduced, past attention's peak. The
    reduction runs beside the tiles before, so compute waits for little. Private, torch 2.13.
    """
    if not isinstance(layer, FSDPModule):
        return
    state = layer._get_fsdp_state()
    for reduced in state._comm_ctx.reduce_scatter_states:
        if reduced.event is not None:
            state._device_handle.current_stream().wait_event(reduced.event)
    state._comm_ctx.reduce_scatter_states.clear()


def is_ours(gradient: Tensor) -> bool:
    """Whether nothing else references this incoming gradient, so that it may be overwritten.

    The backward of an addition passes one tensor to both branches, that of a reshape a view of it.
    torch has no public test for that: both counts are private, checked with torch 2.13.
    """
    # The storage handle made here counts as well.
    storage_uses = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) - 1
    alone = gradient._use_count() == 1 and storage_uses == 1 + gradient._is_view()
    return alone and gradient.is_contiguous()
