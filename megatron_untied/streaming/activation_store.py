"""What a layer saves for its backward, on the device, the host or a disk.

``full`` saves the layer input x. ``selective`` also saves the attention output O and its
log-sum-exp in all layers or the last N, so that attention runs once per step there. With checkpoint
groups of k layers x is saved for the first layer of a group only, and backward recomputes the
others from the x before it (:func:`.layer.recompute`): by linear work alone where O was saved, else
by running attention once more, whose O is then saved until the layer's own backward.

With ``--activation-disk`` x and O of the first layers go on from the host to the disk. Host memory
is then two layers deep: in forward a layer's is free once the next layer is done, and in backward
it is fetched while the layer after it runs. Log-sum-exps are small, and stay on the host.
"""

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron_untied.context_parallel.buffer_plan import Sizes, Staging
from megatron_untied.context_parallel.exchange import HeadChunkLayout, HeadChunks
from megatron_untied.context_parallel.kv_gradients import KvHome, MakeSums
from megatron_untied.context_parallel.sequence import SequenceInfo
from megatron_untied.context_parallel.ulysses import LogSumExps
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.phases import MemoryCategory, allocating
from megatron_untied.residual import Rows
from megatron_untied.streaming.activation_policy import ActivationPolicy
from megatron_untied.streaming.copy_engine import Copy
from megatron_untied.streaming.host_arena import HostArena, HostSlot
from megatron_untied.streaming.host_tensors import (
    HostHeadChunks,
    HostKvHome,
    HostKvSums,
    HostRows,
)


class StoredLse(Sequence[Sequence[Tensor]]):
    """Log-sum-exps that wait for their backward: on the device, or in slots of ``arena``.

    Those of chunk j are an item. One on the host is fetched and its memory released: get it once.
    """

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

    @override
    def __len__(self) -> int:
        return len(self._lse if self._slots is None else self._slots)

    @override
    def __getitem__(self, j: int) -> list[Tensor]:
        if self._slots is None:
            return self._lse[j]
        fetched = []
        for slot in self._slots[j]:
            fetched.append(torch.empty(slot.shape, dtype=slot.dtype, device=self._device))
            slot.read(fetched[-1]).wait()
            slot.release()
        return fetched


@dataclass(slots=True, eq=False, weakref_slot=True)
class SavedLayer:
    """What layer ``index`` saved in one forward."""

    layer: nn.Module
    index: int
    x: Rows | None = None  # [n, b, m], or with sequence parallelism [n/t, b, m]
    out: HeadChunks | None = None  # [n, b, h, d]
    lse: StoredLse | None = None
    checksums: Tensor | None = None
    """Of what forward computed, int64 [3]; None unless the step is verified (:mod:`.replay`)."""

    def host_slots(self) -> list[HostSlot]:
        """Of x and O, as far as they are saved on the host."""
        return [slot for each in (self.x, self.out) if each is not None for slot in each.host_slots]


@dataclass(slots=True, eq=False, weakref_slot=True)
class CheckpointGroup:
    """The layers from one saved input to the next, in one forward."""

    sequence: SequenceInfo
    before: "CheckpointGroup | None" = None
    members: list[SavedLayer] = field(default_factory=list)
    """Those whose backward is still to come."""

    def needed_next(self) -> SavedLayer | None:
        """What backward reads first after the layer that was popped last."""
        if self.members:
            return self.members[-1]
        return self.before.members[0] if self.before and self.before.members else None


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
    # Weak: only the graph references what is complete.
    _last_group: weakref.ref[CheckpointGroup] | None = None
    _last_layer: weakref.ref[SavedLayer] | None = None

    def begin(self, layer: nn.Module, index: int, sequence: SequenceInfo) -> CheckpointGroup:
        """Append layer ``index`` to the checkpoint group of the running forward; returns that."""
        policy = self.policy.layers[index]
        if policy.saves_input:
            before = self._last_group() if index and self._last_group else None
            self._open = CheckpointGroup(sequence, before)
            self._last_group = weakref.ref(self._open)
        group = self._open
        assert group is not None, "layers run in order, from the first of a group"
        group.members.append(SavedLayer(layer, index))
        if index == policy.group[-1]:
            self._open = None  # from here on only the graph references it
        return group

    def complete(self, saved: SavedLayer) -> None:
        """Start to write to the disk what a layer saved, once nothing is added to it.

        Host memory that the layer before has on the disk too is free then.
        """
        before = self._last_layer() if self._last_layer else None
        for slot in before.host_slots() if before is not None else ():
            slot.leave()
        for slot in saved.host_slots() if self.policy.layers[saved.index].goes_to_disk else ():
            slot.to_disk()
        self._last_layer = weakref.ref(saved)

    def rows(self, like: Rows, *, on_host: bool) -> Rows:
        """Rows of the shape of ``like``, uninitialized."""
        if on_host:
            return HostRows(like.shape, like.dtype, like.device, self.arena, self.workspace)
        return Rows(torch.empty(like.shape, dtype=like.dtype, device=like.device))

    def save_input(self, saved: SavedLayer, x: Rows) -> tuple[Rows, Copy | None]:
        """Save the layer's input; returns where the layer's output goes.

        That is ``x`` itself, once it was read for the last time and the copy, if there is one, was
        waited for. An input that is on the host stays where it is: nothing is copied.
        """
        if not self.policy.layers[saved.index].input_on_host:
            with allocating(MemoryCategory.KEPT):
                saved.x = Rows(x.on_device())  # 1 H: the layer overwrites x itself
            return x, None
        if x.is_on_host:
            saved.x = x
            return self.rows(x, on_host=True), None
        saved.x = self.rows(x, on_host=True)
        return x, saved.x.fill(x.as_tensor())

    def move(self, tensor: Tensor, *, to_host: bool) -> Tensor:
        """A residual [n, b, m] on the device as a stand-in for a copy on the host, or back."""
        rows = Rows.of(tensor)
        if to_host:
            moved = self.rows(rows, on_host=True)
            moved.fill(tensor).wait()
            return moved.as_tensor()
        with allocating(MemoryCategory.RESIDUAL):
            on_device = rows.on_device()
        rows.release()
        return on_device

    def out(
        self,
        index: int,
        sizes: Sizes,
        tile_rows: int,
        device: torch.device,
        *,
        is_saved: bool,
        has_backward: bool = True,
    ) -> HeadChunks:
        """Slots for the attention output of layer ``index``, [n, b, h, d].

        If it is not saved, its last use must be before another layer runs. ``tile_rows``: the most
        tokens that are read or written at once. Without a backward the device has room for the
        slots, which only parked layers leave on the host.
        """
        if self.policy.park or (has_backward and self.policy.layers[index].output_on_host):
            layout = HeadChunkLayout(sizes.schedule, sizes.n, sizes.b, sizes.d)
            staging = Staging.plan("out", sizes, tile_rows)
            return HostHeadChunks(staging, layout, self.arena, self.workspace, device)
        if is_saved:
            layout = HeadChunkLayout(sizes.schedule, sizes.n, sizes.b, sizes.d)
            with allocating(MemoryCategory.KEPT):
                storage = torch.empty(layout.numel, dtype=sizes.dtype, device=device)
            return HeadChunks(storage, layout)
        # The next layer takes the same memory.
        return HeadChunks.in_workspace("out", sizes, self.workspace, device)

    def d_out(self, sizes: Sizes, tile_rows: int, device: torch.device) -> HeadChunks:
        """Slots for the gradient of the attention output, [n, b, h, d]; dQ is received in them."""
        if self.policy.park:
            layout = HeadChunkLayout(sizes.schedule, sizes.n, sizes.b, sizes.d)
            staging = Staging.plan("d_out", sizes, tile_rows)
            return HostHeadChunks(staging, layout, self.arena, self.workspace, device)
        return HeadChunks.in_workspace("d_out", sizes, self.workspace, device)

    def kv_gradients(
        self, sizes: Sizes, tile_tokens: int, tile_rows: int, device: torch.device
    ) -> tuple[MakeSums | None, KvHome | None]:
        """What dK and dV are summed in, and where they go; None is the device.

        ``tile_tokens`` of all tensor-parallel ranks, ``tile_rows`` the most that are read at once.
        """
        if not self.policy.park:
            return None, None
        make_sums = functools.partial(
            HostKvSums,
            sizes=sizes,
            tile_tokens=tile_tokens,
            device=device,
            arena=self.arena,
            workspace=self.workspace,
        )
        return make_sums, HostKvHome(sizes, tile_rows, self.arena, self.workspace)


def fetch(*layers: SavedLayer | None) -> None:
    """Start to read from the disk what of ``layers`` only that has."""
    for saved in filter(None, layers):
        for slot in saved.host_slots():
            slot.fetch()
