"""The buffers of the loop over chunks of heads: a replay of what it takes from its workspace.

One table for forward, one for backward, in the order of :mod:`megatron_untied.context_parallel`'s
``chunk_loader``, ``untied``, ``key_value_gradients`` and ``ring``: names and heads as there. A
buffer stays once it is taken, at the largest size that was asked of its name.
"""

from dataclasses import dataclass, field

from megatron_untied.context_parallel.head_schedule import ChunkAssignment, KernelCall
from megatron_untied.context_parallel.kernels import TracedFlashAttention3
from megatron_untied.context_parallel.kernels.split_calls import Shape
from megatron_untied.planner.geometry import Geometry
from megatron_untied.planner.stash import Placement

_WIDE = 4


def sums_over_chunks(geometry: Geometry, rank: int) -> bool:
    """Whether gradients of a key-value head are sums of several kernel calls on this rank."""
    return geometry.num_ring > 1 or geometry.schedule.kv_heads_in_many_chunks(rank)


def sums_on_host(geometry: Geometry, rank: int) -> bool:
    """Whether those sums wait on the host between kernels."""
    return geometry.config.memory.park_during_attention and sums_over_chunks(geometry, rank)


@dataclass
class AttentionBuffers:
    """Replays attention on one Ulysses rank. ``taken`` are bytes by name."""

    geometry: Geometry
    rank: int
    placement: Placement
    taken: dict[str, int] = field(default_factory=dict)
    kernel_bytes: int = 0
    """Most that a kernel allocates for itself while it runs, with what came home before."""
    home_bytes: int = 0
    """dK and dV of this rank's own tokens, from when the first came home to the layer's end."""
    home_bytes_when_loading: int = 0
    """Of those, what is there when the last chunk is projected."""

    @property
    def num_bytes(self) -> int:
        """Of all buffers so far."""
        return sum(self.taken.values())

    def forward(self) -> "AttentionBuffers":
        """Take what a forward takes."""
        for index, turns in enumerate(self.geometry.schedule.chunks):
            turn = turns[self.rank]
            self._load(index, turns, spare="o")
            if self.geometry.num_ulysses > 1:
                self._heads(self._set("o", index), len(turn.query_heads))
            for piece in turn.kernel_calls:
                self._ring(piece, turn)
            if self.placement.any_on_host:
                self._staged("out", "landing", index, turns)
        return self

    def backward(self, *, output_on_host: bool) -> "AttentionBuffers":
        """Take what a backward takes."""
        started: set[int] = set()
        for index, turns in enumerate(self.geometry.schedule.chunks):
            turn = turns[self.rank]
            self.home_bytes_when_loading = self.home_bytes
            self._load(index, turns, spare="dk", head_major=("do", "o"))
            if output_on_host:
                self._staged("out", "slot", index, turns)
            if self.placement.park:
                self._staged("d_out", "slot", index, turns)
                self._staged("d_out", "landing", index, turns)
            if self._overlap or self.geometry.num_ring > 1:  # else dQ is written over dO
                self._heads(self._set("dq", index), len(turn.query_heads))
            self._begin_sums(turn)
            for piece in turn.kernel_calls:
                self._attend_backward(piece, turn, started)
            self._send_home(index, turns)
        return self

    def _begin_sums(self, turn: ChunkAssignment) -> None:
        if turn.kv_to_load and sums_on_host(self.geometry, self.rank):
            geo, memory = self.geometry, self.geometry.config.memory
            rows = min(memory.sequence_tile_size * geo.h, geo.n * geo.num_ulysses)
            self.taken["sums_room"] = 2 * rows * geo.b * geo.d * _WIDE
        elif turn.kv_to_load:
            for kind in ("dk", "dv"):
                self._heads(f"{kind}_sum{turn.kv_buffer}", len(turn.kv_to_load), self._sum_width)

    def _attend_backward(self, piece: KernelCall, turn: ChunkAssignment, started: set[int]) -> None:
        self._ring(piece, turn)
        if started & set(piece.kv_heads) or self._sum_width != self.geometry.itemsize:
            second = ("dk_second", "dv_second") if self.geometry.num_ring > 2 else ()
            for name in ("dk", "dv", *second):
                self._heads(name, len(piece.kv_heads))
        started |= set(piece.kv_heads)
        self.kernel_bytes = max(self.kernel_bytes, self._scratch(piece) + self.home_bytes)

    def _send_home(self, index: int, turns: tuple[ChunkAssignment, ...]) -> None:
        dones = [turn.kv_finished for turn in turns]
        if not any(dones):
            return
        geo, mine = self.geometry, turns[self.rank]
        width = _WIDE if geo.schedule.shares_kv_heads else geo.itemsize
        self.home_bytes = 2 * geo.n * geo.b * geo.g * geo.d * width
        self._own(self._set("do", index), sum(map(len, dones)))
        if self._sum_width != geo.itemsize or mine.kv_finished != mine.kv_to_load:
            for name in ("dk", "dv"):
                self._heads(name, len(mine.kv_finished))

    def _load(
        self,
        index: int,
        turns: tuple[ChunkAssignment, ...],
        *,
        spare: str,
        head_major: tuple[str, ...] = (),
    ) -> None:
        turn = turns[self.rank]
        if self.geometry.num_ulysses > 1:
            for name in head_major:
                self._heads(self._set(name, index), len(turn.query_heads))
        self._project("q", self._set("q", index), [len(each.query_heads) for each in turns], spare)
        if any(each.kv_to_load for each in turns):
            for kind in ("k", "v"):
                loads = [len(each.kv_to_load) for each in turns]
                self._project(kind, f"{kind}{turn.kv_buffer}", loads, spare)

    def _project(self, kind: str, name: str, counts: list[int], spare: str) -> None:
        self._heads(name, counts[self.rank])
        if self.geometry.num_ulysses > 1:
            self._own(f"send_{kind}" if self._overlap else spare, sum(counts))

    def _ring(self, piece: KernelCall, turn: ChunkAssignment) -> None:
        ring = self.geometry.num_ring
        if ring == 1:
            return
        columns = piece.query_columns
        self._heads("ring_total", columns.stop - columns.start, _WIDE)
        if len(piece.kv_heads) < len(turn.kv_heads):  # some columns of what was loaded together
            for kind in ("k", "v"):
                self._heads(f"ring_own_{kind}", len(piece.kv_heads))
        for step in range(1, ring):
            for kind in ("k", "v"):
                self._heads(f"ring_{kind}{step % 3}", len(piece.kv_heads))

    def _staged(self, name: str, use: str, index: int, turns: tuple[ChunkAssignment, ...]) -> None:
        """A chunk's slot between host and exchange; see ``streaming/host.py``."""
        borrowed = {
            ("out", "landing"): "q",
            ("out", "slot"): "dk",
            ("d_out", "landing"): "dk",
            ("d_out", "slot"): "dk",
        }[name, use]
        own = f"{name}_{use}{index % 2 if self._overlap else 0}"
        borrows = not self._overlap and self.geometry.num_ulysses > 1
        self._own(borrowed if borrows else own, sum(len(turn.query_heads) for turn in turns))

    def _scratch(self, piece: KernelCall) -> int:
        geo, columns = self.geometry, piece.query_columns
        rows, heads = geo.n * geo.num_ulysses, columns.stop - columns.start
        sizes = {"num_queries": rows, "num_keys": rows, "b": geo.b, "d": geo.d}
        shape = Shape(**sizes, h=heads, g=len(piece.kv_heads))
        return TracedFlashAttention3().backward_bytes(shape)

    @property
    def _overlap(self) -> bool:
        return self.geometry.schedule.overlap

    @property
    def _sum_width(self) -> int:
        summed = sums_over_chunks(self.geometry, self.rank)
        return _WIDE if summed else self.geometry.itemsize

    def _set(self, name: str, index: int) -> str:
        return f"{name}{index % 2}" if self._overlap else name

    def _heads(self, name: str, heads: int, width: int | None = None) -> None:
        """Some heads of the sequence that the Ulysses ranks share."""
        self._own(name, heads * self.geometry.num_ulysses, width)

    def _own(self, name: str, heads: int, width: int | None = None) -> None:
        """Some heads of this rank's own tokens."""
        geo = self.geometry
        size = geo.n * geo.b * heads * geo.d * (width or geo.itemsize)
        self.taken[name] = max(size, self.taken.get(name, 0))
