"""What a layer keeps for its backward, and what is built again from less.

``full`` keeps the layer input x. ``selective`` also keeps the attention output O and its
log-sum-exp, so that attention runs once a step. With groups of k layers x is kept for the first
layer of a group only. In backward the others' are built again, from the x before: with
``selective`` by linear work alone, with ``full`` by running the group's attention once more, whose
O is then kept for the group's own backward.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from megatron_untied.context_parallel.head_major import (
    DeviceHeadMajor,
    HeadMajor,
    HeadMajorShape,
)
from megatron_untied.context_parallel.key_value_sums import MakeSums
from megatron_untied.context_parallel.sequence import SequenceInfo
from megatron_untied.context_parallel.untied import LogSumExps
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.phases import MemoryCategory, allocating
from megatron_untied.streaming.copy_engine import Copy
from megatron_untied.streaming.host import HostHeadMajor, HostLogSumExps, HostRows
from megatron_untied.streaming.host_arena import HostArena
from megatron_untied.streaming.host_sums import HostSums
from megatron_untied.streaming.tiles import Tile


class Rows(Protocol):
    """[rows, b, m] that can be had tile by tile on the device."""

    shape: tuple[int, ...]
    like: Tensor
    """A tensor of the device and dtype that tiles come in."""

    def tiles(self, tiles: Sequence[Tile]) -> Iterator[Tensor]:
        """The local rows of each tile; one is valid until the next is asked for."""

    def release(self) -> None:
        """Nothing will be read any more."""


class DeviceRows:
    """Rows of a tensor that is on the device. See :class:`Rows`."""

    def __init__(self, tensor: Tensor):
        self.tensor = self.like = tensor
        self.shape = tuple(tensor.shape)

    def tiles(self, tiles: Sequence[Tile]) -> Iterator[Tensor]:
        """See :class:`Rows`."""
        return (self.tensor[tile.local] for tile in tiles)

    def release(self) -> None:
        """See :class:`Rows`."""


@dataclass(slots=True, eq=False)
class LayerStash:
    """What layer ``index`` keeps from one forward."""

    layer: nn.Module
    index: int
    x: Rows | None = None
    attention: "Attention | None" = None


Attention = tuple[HeadMajor, LogSumExps | HostLogSumExps]
"""O of one layer and its log-sum-exps."""


@dataclass(slots=True, eq=False)
class Group:
    """The layers between two kept inputs, in one forward."""

    sequence: SequenceInfo
    members: list[LayerStash] = field(default_factory=list)


@dataclass(kw_only=True, slots=True, eq=False)
class Stash:
    """Decides what the layers of one model keep, and where. The records live in a step's graph."""

    num_layers: int
    selective: bool
    layers_per_group: int
    host_layers: int
    """The first so many layers keep on the host."""
    park: bool
    """Slots and sums go through the host even if nothing has to be kept."""
    arena: HostArena
    workspace: Workspace
    _open: Group | None = None

    def open(self, layer: nn.Module, index: int, sequence: SequenceInfo) -> Group:
        """The group of layer ``index`` in the forward that is running, its record the last."""
        if index % self.layers_per_group == 0:
            self._open = Group(sequence)
        group, is_last = self._open, index + 1 in (self.num_layers, self._end_of_group(index))
        assert group is not None, "layers run in order, from the first of a group"
        group.members.append(LayerStash(layer, index))
        if is_last:  # from here on only the graph keeps it
            self._open = None
        return group

    def keeps_input(self, record: LayerStash) -> bool:
        """Whether a layer's input is kept: the first of a group."""
        return record.index % self.layers_per_group == 0

    def _end_of_group(self, index: int) -> int:
        return index - index % self.layers_per_group + self.layers_per_group

    def keep_rows(self, record: LayerStash, x: Tensor) -> Copy | None:
        """Keep ``x`` as the layer's input; it may change once the returned copy was waited for."""
        if record.index >= self.host_layers:
            with allocating(MemoryCategory.KEPT):
                record.x = DeviceRows(x.clone())
            return None
        slot = self.arena.reserve(x.shape, x.dtype)
        record.x = HostRows(slot, self.workspace, x)
        return slot.store(x)

    def out(self, index: int, shape: HeadMajorShape, like: Tensor, *, is_kept: bool) -> HeadMajor:
        """Slots for the attention output of layer ``index``.

        What is not kept is done with before another layer runs. It goes to the host all the same
        if the layer keeps there: beside it on the device backward has slots of its gradient.
        """
        if self.park or index < self.host_layers:
            return HostHeadMajor("out", shape, self.arena, self.workspace, like)
        if is_kept:
            with allocating(MemoryCategory.KEPT):
                return DeviceHeadMajor(like.new_empty(shape.numel), shape)
        return self._shared("out", shape, like)

    def log_sum_exps(
        self, index: int, lse: LogSumExps, *, is_kept: bool
    ) -> LogSumExps | HostLogSumExps:
        """Where those of layer ``index`` wait for its backward."""
        on_host = is_kept and index < self.host_layers
        return HostLogSumExps(lse, self.arena) if on_host else lse

    def d_out(self, shape: HeadMajorShape, like: Tensor) -> HeadMajor:
        """Slots for the gradient of the attention output."""
        if self.park:
            return HostHeadMajor("d_out", shape, self.arena, self.workspace, like)
        return self._shared("d_out", shape, like)

    def make_sums(self, rows_at_a_time: int, like: Tensor) -> MakeSums | None:
        """Where sums of key and value gradients are made; None is on the device, by attention."""
        if not self.park:
            return None
        return functools.partial(
            HostSums,
            arena=self.arena,
            workspace=self.workspace,
            like=like.new_empty(0),
            rows_at_a_time=rows_at_a_time,
        )

    def _shared(self, name: str, shape: HeadMajorShape, like: Tensor) -> HeadMajor:
        storage = self.workspace.take(f"{name}_slots", shape.numel, like=like)
        return DeviceHeadMajor(storage, shape)
