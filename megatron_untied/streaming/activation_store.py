"""What a layer keeps for its backward, and what is recomputed from less.

``full`` keeps the layer input x. ``selective`` also keeps the attention output O and its
log-sum-exp, so that attention runs once per step. With checkpoint groups of k layers x is kept for
the first layer of a group only. In backward the others' are recomputed from the x before: with
``selective`` by linear work alone, with ``full`` by running the group's attention once more, whose
O is then kept for the group's own backward.
"""

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron_untied.context_parallel.buffer_plan import Sizes, Staging, head_major_slots
from megatron_untied.context_parallel.exchange import DeviceHeadMajor, HeadMajor, HeadMajorLayout
from megatron_untied.context_parallel.kv_gradients import MakeSums
from megatron_untied.context_parallel.sequence import SequenceInfo
from megatron_untied.context_parallel.ulysses import LogSumExps
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.phases import MemoryCategory, allocating
from megatron_untied.streaming.activation_policy import ActivationPolicy
from megatron_untied.streaming.copy_engine import Copy
from megatron_untied.streaming.host import HostHeadMajor, HostRows
from megatron_untied.streaming.host_arena import HostArena, HostSlot
from megatron_untied.streaming.host_sums import HostKvSums
from megatron_untied.streaming.rows import DeviceRows, Rows


class StoredLse:
    """Log-sum-exps that wait for their backward: on the device, or in slots of ``arena``."""

    def __init__(self, lse: LogSumExps, arena: HostArena | None):
        self._device = lse[0][0].device
        self._lse: LogSumExps | None = lse if arena is None else None
        self._slots = [] if arena is None else [[_stored(x, arena) for x in c] for c in lse]

    def on_device(self) -> LogSumExps:
        """On the device; host memory is given back."""
        if self._lse is not None:
            return self._lse
        return [[_fetched(slot, self._device) for slot in chunk] for chunk in self._slots]


def _stored(lse: Tensor, arena: HostArena) -> HostSlot:
    slot = arena.reserve(lse.shape, lse.dtype)
    slot.store(lse.contiguous()).wait()
    return slot


def _fetched(slot: HostSlot, device: torch.device) -> Tensor:
    lse = torch.empty(slot.shape, dtype=slot.dtype, device=device)
    slot.fetch(lse).wait()
    slot.release()
    return lse


@dataclass(slots=True, eq=False)
class SavedLayer:
    """What layer ``index`` keeps from one forward."""

    layer: nn.Module
    index: int
    x: Rows | None = None  # [n, b, m], or with sequence parallelism [n/t, b, m]
    out: HeadMajor | None = None  # [n, b, h, d]
    lse: StoredLse | None = None


@dataclass(slots=True, eq=False)
class CheckpointGroup:
    """The layers from one kept input to the next, in one forward."""

    sequence: SequenceInfo
    members: list[SavedLayer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HeadMajorSpec:
    """What a head-major tensor of a layer is made from."""

    sizes: Sizes
    tile_tokens: int
    """The most tokens that are read or written at once."""
    device: torch.device

    @property
    def layout(self) -> HeadMajorLayout:
        """Where its heads lie."""
        sizes = self.sizes
        return HeadMajorLayout(sizes.schedule, sizes.n, sizes.b, sizes.d)


@dataclass(kw_only=True, slots=True, eq=False)
class ActivationStore:
    """Puts what the layers of one model keep where the policy says. It lives in the graph."""

    policy: ActivationPolicy
    arena: HostArena
    workspace: Workspace
    _open: CheckpointGroup | None = None

    def begin(self, layer: nn.Module, index: int, sequence: SequenceInfo) -> CheckpointGroup:
        """The group of layer ``index`` in the forward that is running, that layer its last."""
        if self.policy.keeps_input(index):
            self._open = CheckpointGroup(sequence)
        group = self._open
        assert group is not None, "layers run in order, from the first of a group"
        group.members.append(SavedLayer(layer, index))
        if index == self.policy.last_of_group(index):
            self._open = None  # from here on only the graph keeps it
        return group

    def keep_rows(self, saved: SavedLayer, x: Tensor) -> Copy | None:
        """Keep ``x`` as the layer's input; it may change once the returned copy was waited for."""
        if not self.policy.input_on_host(saved.index):
            with allocating(MemoryCategory.KEPT):
                saved.x = DeviceRows(x.clone())
            return None
        slot = self.arena.reserve(x.shape, x.dtype)
        saved.x = HostRows(slot, self.workspace, x.device)
        return slot.store(x)

    def out(self, index: int, spec: HeadMajorSpec, *, is_kept: bool) -> HeadMajor:
        """Slots for the attention output of layer ``index``.

        What is not kept is done with before another layer runs.
        """
        if self.policy.output_on_host(index):
            return self._on_host(Staging.of_out(spec.sizes, spec.tile_tokens), spec)
        if is_kept:
            with allocating(MemoryCategory.KEPT):
                storage = torch.empty(spec.layout.numel, dtype=spec.sizes.dtype, device=spec.device)
            return DeviceHeadMajor(storage, spec.layout)
        return self._shared("out", spec)

    def d_out(self, spec: HeadMajorSpec) -> HeadMajor:
        """Slots for the gradient of the attention output."""
        if self.policy.park:
            return self._on_host(Staging.of_d_out(spec.sizes, spec.tile_tokens), spec)
        return self._shared("d_out", spec)

    def keep_lse(self, index: int, lse: LogSumExps, *, is_kept: bool) -> StoredLse:
        """The log-sum-exps of layer ``index``, for its backward."""
        on_host = is_kept and self.policy.input_on_host(index)
        return StoredLse(lse, self.arena if on_host else None)

    def make_sums(self, sizes: Sizes, rows_at_a_time: int, device: torch.device) -> MakeSums | None:
        """What dK and dV are summed in; None is device memory of the chunk loop."""
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

    def _on_host(self, staging: Staging, spec: HeadMajorSpec) -> HeadMajor:
        return HostHeadMajor(staging, spec.layout, self.arena, self.workspace, spec.device)

    def _shared(self, name: str, spec: HeadMajorSpec) -> HeadMajor:
        """In the workspace: no longer kept than one layer runs."""
        storage = self.workspace.take(head_major_slots(name, spec.sizes), spec.device)
        return DeviceHeadMajor(storage, spec.layout)
