"""Brings to a rank what it attends to, chunk by chunk."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch.distributed as dist
from torch import Tensor

from megatron_untied.context_parallel.all_to_all import HeadExchange
from megatron_untied.context_parallel.head_major import HeadMajor
from megatron_untied.context_parallel.head_schedule import HeadSchedule, Turn
from megatron_untied.context_parallel.workspace import ChunkBuffers


class Projections(Protocol):
    """Queries, keys and values of this rank's n tokens, rotated to their positions."""

    n: int
    b: int
    like: Tensor
    """Any tensor of the device and dtype that attention computes in."""

    def write(self, kind: Literal["q", "k", "v"], heads: Sequence[range], send: Tensor) -> None:
        """Fill ``send``, flat blocks [n, b, len(heads[r]), d] one after the other, r = 0, 1, ..."""


@dataclass(slots=True)
class KeyValueHeads:
    """Some key-value heads over the whole sequence: k and v are [s, b, len(heads), d]."""

    heads: range
    k: Tensor
    v: Tensor


@dataclass(slots=True)
class LoadedChunk:
    """One chunk on this rank. Tensors are [s, b, query heads of this turn, d]."""

    index: int
    turns: tuple[Turn, ...]
    turn: Turn
    """This rank's own of ``turns``."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """``q``, and of each head-major tensor that was asked for."""
    held: list[KeyValueHeads] = field(default_factory=list)
    works: list[dist.Work | None] = field(default_factory=list)

    def key_value(self, heads: range) -> tuple[Tensor, Tensor]:
        """K and v of ``heads``, [s, b, len(heads), d] each: views, loaded in one go."""
        for each in self.held:
            if heads[0] in each.heads:
                first = heads[0] - each.heads[0]
                columns = slice(first, first + len(heads))
                return each.k[:, :, columns], each.v[:, :, columns]
        raise AssertionError(f"key-value heads {heads} were not loaded")

    def wait(self) -> None:
        """Make the compute stream wait for what is on its way."""
        for work in self.works:
            if work is not None:
                work.wait()
        self.works.clear()


class ChunkLoader:
    """Iterates over a rank's chunks, each ready to attend to. Collective over the group.

    If the schedule overlaps, a chunk is on its way while the one before it is in use. Buffers then
    come in two sets that alternate, and projections are sent from buffers of their own. Without,
    they are sent from ``spare``, a buffer that the caller writes only after it got the chunk.
    """

    def __init__(
        self,
        schedule: HeadSchedule,
        exchange: HeadExchange,
        buffers: ChunkBuffers,
        source: Projections,
        *,
        spare: str,
        head_major: dict[str, HeadMajor] | None = None,
    ):
        """``head_major``: tensors whose slots travel with the chunk, by name."""
        self.schedule, self.exchange, self.buffers = schedule, exchange, buffers
        self.source, self.overlap, self.spare = source, schedule.overlap, spare
        self.head_major = head_major or {}

    def set_of(self, name: str, index: int) -> str:
        """The name of the buffer for ``name`` in chunk ``index``."""
        return f"{name}{index % 2}" if self.overlap else name

    def __iter__(self) -> Iterator[LoadedChunk]:
        started: LoadedChunk | None = None
        for index in range(len(self.schedule.chunks)):
            following = self._start(index, started)
            if not self.overlap:
                following.wait()
                yield following
            elif started is not None:
                yield started
            started = following
        if self.overlap and started is not None:
            started.wait()
            yield started

    def _start(self, index: int, before: LoadedChunk | None) -> LoadedChunk:
        turns = self.schedule.chunks[index]
        chunk = LoadedChunk(index, turns, turns[self.exchange.rank])
        queries = [turn.query for turn in turns]
        if before is not None:
            before.wait()  # it may still be reading the send buffers
            chunk.held = [each for each in before.held if set(each.heads) & set(chunk.turn.kv)]
        for name, tensor in self.head_major.items():
            self._bring(chunk, name, tensor.slot(index))
        chunk.tensors["q"] = self._project(chunk, "q", self.set_of("q", index), queries)
        if any(turn.load for turn in turns):
            loads, buffer = [turn.load for turn in turns], chunk.turn.buffer
            k = self._project(chunk, "k", f"k{buffer}", loads)
            v = self._project(chunk, "v", f"v{buffer}", loads)
            chunk.held.append(KeyValueHeads(chunk.turn.load, k, v))
        return chunk

    def _bring(self, chunk: LoadedChunk, name: str, slot: Tensor) -> None:
        """Exchange a head-major slot as it lies; on one rank it is there already."""
        heads = [len(turn.query) for turn in chunk.turns]
        if self.exchange.size == 1:
            chunk.tensors[name] = slot.view(-1, self.buffers.b, heads[0], self.buffers.d)
            return
        receive = self.buffers.head_side(self.set_of(name, chunk.index), len(chunk.turn.query))
        chunk.works.append(self.exchange.to_heads(slot, receive, heads, self.buffers.unit))
        if not self.overlap:
            chunk.wait()  # the slot may lie in the send buffer
        chunk.tensors[name] = receive

    def _project(
        self,
        chunk: LoadedChunk,
        kind: Literal["q", "k", "v"],
        name: str,
        heads: Sequence[range],
    ) -> Tensor:
        """Project ``heads[r]`` for each rank r and exchange them: [s, b, my heads, d]."""
        counts = [len(each) for each in heads]
        receive = self.buffers.head_side(name, counts[self.exchange.rank])
        send = receive.view(-1) if self.exchange.size == 1 else self._send_buffer(kind, counts)
        self.source.write(kind, heads, send)
        chunk.works.append(self.exchange.to_heads(send, receive, counts, self.buffers.unit))
        if not self.overlap:
            chunk.wait()  # the next projection goes into the same send buffer
        return receive

    def _send_buffer(self, kind: str, counts: Sequence[int]) -> Tensor:
        name = f"send_{kind}" if self.overlap else self.spare
        return self.buffers.sequence_side(name, sum(counts))
