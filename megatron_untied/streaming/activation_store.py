"""What a layer saves for its backward, on the device or the host.

``full`` saves the layer input x. ``selective`` also saves the attention output O and its
log-sum-exp, so that attention runs once per step. With checkpoint groups of k layers x is saved for
the first layer of a group only, and backward recomputes the others from the x before
(:mod:`.recompute`): with ``selective`` by linear work alone, with ``full`` by running the group's
attention once more, whose O is then saved until the group's own backward.
"""

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron_untied.context_parallel.buffer_plan import Sizes, Staging
from megatron_untied.context_parallel.exchange import HeadChunkLayout, HeadChunks
from megatron_untied.context_parallel.kv_gradients import MakeSums
from megatron_untied.context_parallel.sequence import SequenceInfo
from megatron_untied.context_parallel.ulysses import LogSumExps
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.phases import MemoryCategory, allocating
from megatron_untied.streaming.activation_policy import ActivationPolicy
from megatron_untied.streaming.copy_engine import Copy
from megatron_untied.streaming.host_arena import HostArena
from megatron_untied.streaming.host_tensors import (
    DeviceRows,
    HostHeadChunks,
    HostKvSums,
    HostRows,
    Rows,
)


class StoredLse:
    """Log-sum-exps that wait for their backward: on the device, or in slots of ``arena``."""

    def __init__(self, lse: LogSumExps, arena: HostArena | None):
        """``lse``: fp32 [b, heads of a kernel call, s/r], by chunk and kernel call."""
        self._lse, self._slots, self._device = lse, None, lse[0][0].device
        if arena is None:
            return
        self._lse, self._slots = None, []
        for chunk in lse:
            self._slots.append([arena.reserve(x.shape, x.dtype) for x in chunk])
            for slot, x in zip(self._slots[-1], chunk, strict=True):
                slot.write(x.contiguous()).wait()  # small: one copy per kernel call

    def on_device(self) -> LogSumExps:
        """On the device, as given; host memory is released, so call it once."""
        if self._lse is not None:
            return self._lse
        fetched: LogSumExps = []
        for chunk in self._slots:
            fetched.append([])
            for slot in chunk:
                lse = torch.empty(slot.shape, dtype=slot.dtype, device=self._device)
                slot.read(lse).wait()
                slot.release()
                fetched[-1].append(lse)
        return fetched


@dataclass(slots=True, eq=False)
class SavedLayer:
    """What layer ``index`` saved in one forward."""

    layer: nn.Module
    index: int
    x: Rows | None = None  # [n, b, m], or with sequence parallelism [n/t, b, m]
    out: HeadChunks | None = None  # [n, b, h, d]
    lse: StoredLse | None = None


@dataclass(slots=True, eq=False)
class CheckpointGroup:
    """The layers from one saved input to the next, in one forward."""

    sequence: SequenceInfo
    members: list[SavedLayer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HeadChunksSpec:
    """What O or dO of a layer is made from, in chunks of heads."""

    sizes: Sizes
    tile_tokens: int
    """The most tokens that are read or written at once."""
    device: torch.device

    @property
    def layout(self) -> HeadChunkLayout:
        """The order of its heads in memory."""
        sizes = self.sizes
        return HeadChunkLayout(sizes.schedule, sizes.n, sizes.b, sizes.d)


@dataclass(kw_only=True, slots=True, eq=False)
class ActivationStore:
    """Stores what the layers of one model save, where the policy places it.

    The store itself holds only the group that forward is filling. Everything else is referenced by
    the autograd graph, so a graph that is dropped frees what it saved.
    """

    policy: ActivationPolicy
    arena: HostArena
    workspace: Workspace
    _open: CheckpointGroup | None = None

    def begin(self, layer: nn.Module, index: int, sequence: SequenceInfo) -> CheckpointGroup:
        """Append layer ``index`` to the checkpoint group of the running forward; returns that."""
        policy = self.policy.layers[index]
        if policy.saves_input:
            self._open = CheckpointGroup(sequence)
        group = self._open
        assert group is not None, "layers run in order, from the first of a group"
        group.members.append(SavedLayer(layer, index))
        if index == policy.group[-1]:
            self._open = None  # from here on only the graph references it
        return group

    def save_input(self, saved: SavedLayer, x: Tensor) -> Copy | None:
        """Save the layer's input [n, b, m] or [n/t, b, m]; wait for the copy before changing x."""
        if not self.policy.layers[saved.index].input_on_host:
            with allocating(MemoryCategory.KEPT):
                saved.x = DeviceRows(x.clone())  # the layer overwrites x itself
            return None
        slot = self.arena.reserve(x.shape, x.dtype)
        saved.x = HostRows(slot, self.workspace, x.device)
        return slot.write(x)

    def out(self, index: int, spec: HeadChunksSpec, *, is_saved: bool) -> HeadChunks:
        """Slots for the attention output of layer ``index``, [n, b, h, d].

        If it is not saved, its last use must be before another layer runs.
        """
        if self.policy.layers[index].output_on_host:
            staging = Staging.plan("out", spec.sizes, spec.tile_tokens)
            return HostHeadChunks(staging, spec.layout, self.arena, self.workspace, spec.device)
        if is_saved:
            with allocating(MemoryCategory.KEPT):
                storage = torch.empty(spec.layout.numel, dtype=spec.sizes.dtype, device=spec.device)
            return HeadChunks(storage, spec.layout)
        return HeadChunks.in_workspace("out", spec.sizes, self.workspace, spec.device)

    def d_out(self, spec: HeadChunksSpec) -> HeadChunks:
        """Slots for the gradient of the attention output, [n, b, h, d]."""
        if self.policy.park:
            staging = Staging.plan("d_out", spec.sizes, spec.tile_tokens)
            return HostHeadChunks(staging, spec.layout, self.arena, self.workspace, spec.device)
        return HeadChunks.in_workspace("d_out", spec.sizes, self.workspace, spec.device)

    def save_lse(self, index: int, lse: LogSumExps, *, is_saved: bool) -> StoredLse:
        """The log-sum-exps of layer ``index``, for its backward."""
        on_host = is_saved and self.policy.layers[index].input_on_host
        return StoredLse(lse, self.arena if on_host else None)

    def make_sums(self, sizes: Sizes, rows_at_a_time: int, device: torch.device) -> MakeSums | None:
        """Makes what dK and dV are summed in; None if that is the workspace of the chunk loop."""
        if not self.policy.park:
            return None
        return functools.partial(
            HostKvSums,
            sizes=sizes,
            rows_at_a_time=rows_at_a_time,
            device=device,
            arena=self.arena,
            workspace=self.workspace,
        )
