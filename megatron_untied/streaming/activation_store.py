"""What a layer saves for its backward, on the device or the host.

``full`` saves the layer input x. ``selective`` also saves the attention output O and its
log-sum-exp, so that attention runs once per step. With checkpoint groups of k layers x is saved for
the first layer of a group only, and backward recomputes the others from the x before it
(:func:`.layer.recompute`): with ``selective`` by linear work alone, with ``full`` by running the
group's attention once more, whose O is then saved until the group's own backward.
"""

import contextlib
import functools
from collections.abc import Iterator
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
    HostHeadChunks,
    HostKvSums,
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
                kept = x.clone()  # 1 H: the layer overwrites x itself
            saved.x = Rows(kept, self.workspace, x.device)
            return None
        slot = self.arena.reserve(x.shape, x.dtype)
        saved.x = Rows(slot, self.workspace, x.device)
        return slot.write(x)

    def out(
        self, index: int, sizes: Sizes, tile_rows: int, device: torch.device, *, is_saved: bool
    ) -> HeadChunks:
        """Slots for the attention output of layer ``index``, [n, b, h, d].

        If it is not saved, its last use must be before another layer runs. ``tile_rows``: the most
        tokens that are read or written at once.
        """
        if self.policy.layers[index].output_on_host:
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

    @contextlib.contextmanager
    def offload_during_attention(self, x: Tensor, copy: Rows | None = None) -> Iterator[Rows]:
        """The rows of ``x`` [n, b, m]; if the policy parks, ``x`` has no device memory meanwhile.

        ``copy`` is an existing copy of ``x``: if it is on the host, nothing is copied out. The
        storage object stays the same, so aliases of ``x`` are valid again afterwards.
        """
        if not self.policy.park:
            yield Rows(x, self.workspace, x.device)
            return
        slot = copy and copy.host_slot
        owns_slot = slot is None
        if owns_slot:
            slot = self.arena.reserve(x.shape, x.dtype)
            slot.write(x).wait()
        else:
            self.arena.engine.wait_all()  # that copy may still be in flight
        storage = x.untyped_storage()
        num_bytes = storage.nbytes()
        storage.resize_(0)
        try:
            yield Rows(slot, self.workspace, x.device)
        finally:  # an error inside must not leave a tensor without memory behind
            storage.resize_(num_bytes)
        slot.read(x).wait()
        if owns_slot:
            slot.release()
