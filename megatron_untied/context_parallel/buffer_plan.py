"""Device memory of attention: how large each buffer is, and which buffers are one memory.

Plans are integers, made from the head schedule, and their fields are the only names that buffers
have. A :class:`.workspace.Workspace` holds the memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from megatron_untied.context_parallel.head_schedule import (
    ChunkAssignment,
    HeadSchedule,
    KernelCall,
)
from megatron_untied.dtypes import accumulation_dtype
from megatron_untied.phases import MemoryCategory


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One use of device memory. All uses of one ``memory`` share it; it is as large as the largest.

    ``because``: where it is another buffer's memory, why neither is written while the other is
    still to be read.
    """

    name: str
    memory: str
    numel: int
    dtype: torch.dtype
    because: str = ""
    category: MemoryCategory = MemoryCategory.CHUNKS

    @property
    def num_bytes(self) -> int:
        """Of this use alone."""
        return self.numel * self.dtype.itemsize

    def lend(self, name: str, numel: int, *, because: str) -> "Buffer":
        """Another use of the same memory."""
        return replace(self, name=name, numel=numel, because=because)


@dataclass(frozen=True, slots=True)
class PerChunk:
    """Buffers that chunks use in turn: ``[j]`` is that of chunk j.

    One, or with overlap two, as a chunk arrives while the one before it is in use.
    """

    turns: tuple[Buffer, ...]

    def __getitem__(self, j: int) -> Buffer:
        return self.turns[j % len(self.turns)]

    def __len__(self) -> int:
        return len(self.turns)

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self.turns)


Pair = tuple[Buffer, Buffer]
"""One of keys or dK, one of values or dV."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What the buffers of one attention call depend on. Letters are those of the package."""

    schedule: HeadSchedule
    rank: int
    """Among the a Ulysses ranks."""
    n: int
    b: int
    d: int
    dtype: torch.dtype
    num_ring: int = 1

    @property
    def num_ulysses(self) -> int:
        """Ranks that trade tokens for heads (a)."""
        return len(self.schedule.chunks[0])

    @property
    def mine(self) -> list[ChunkAssignment]:
        """The heads of this rank, chunk by chunk."""
        return self.schedule.of_rank(self.rank)

    @property
    def sums_kv(self) -> bool:
        """Whether the gradient of a key or value is a sum of several kernel calls."""
        return self.num_ring > 1 or self.schedule.kv_heads_in_many_chunks(self.rank)

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of dK and dV before they are sent home: wide if they are sums, so no error adds up."""
        return accumulation_dtype(self.dtype) if self.sums_kv else self.dtype

    def kv_sum_shape(self, heads: int) -> torch.Size:
        """Of sums of dK and dV of some heads, where a head is one piece: [2, heads, s/r, b, d]."""
        return torch.Size((2, heads, self.num_ulysses * self.n, self.b, self.d))

    def lse_shape(self, call: KernelCall) -> torch.Size:
        """Of the log-sum-exps of one kernel call: [b, heads, s/r]."""
        columns = call.query_columns
        return torch.Size((self.b, columns.stop - columns.start, self.num_ulysses * self.n))

    def sequence_sharded(self, name: str, heads: int, dtype: torch.dtype | None = None) -> Buffer:
        """A flat buffer of n * b * heads * d elements."""
        numel = self.n * self.b * heads * self.d
        return Buffer(name=name, memory=name, numel=numel, dtype=dtype or self.dtype)

    def head_sharded(self, name: str, heads: int, dtype: torch.dtype | None = None) -> Buffer:
        """A buffer [s/r, b, heads, d]; s/r = a * n."""
        return self.sequence_sharded(name, self.num_ulysses * heads, dtype)

    def per_chunk(
        self, heads: Callable[[tuple[ChunkAssignment, ...]], int]
    ) -> Iterator[tuple[str, int]]:
        """Which buffers chunks use in turn: a suffix, and the most ``heads`` of its chunks."""
        counts = [heads(chunk) for chunk in self.schedule.chunks]
        if not self.schedule.overlap:
            return iter([("", max(counts))])
        num_turns = min(2, len(counts))
        return ((str(i), max(counts[i::num_turns])) for i in range(num_turns))

    def of_query_heads(self, name: str, *, in_slots: bool = False) -> PerChunk:
        """A chunk's query heads on this rank: [s/r, b, u/a, d].

        ``in_slots``: one rank exchanges nothing and uses the slots of the whole tensor instead.
        """
        alone = in_slots and self.num_ulysses == 1
        turns = self.per_chunk(lambda chunk: 0 if alone else len(chunk[self.rank].query_heads))
        return PerChunk(tuple(self.head_sharded(name + i, heads) for i, heads in turns))

    def of_all_query_heads(self, name: str) -> PerChunk:
        """A chunk's query heads on all ranks, of this rank's tokens: flat, [n, b, u, d]."""
        turns = self.per_chunk(lambda chunk: sum(len(each.query_heads) for each in chunk))
        return PerChunk(tuple(self.sequence_sharded(name + i, heads) for i, heads in turns))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadBuffers:
    """Where a chunk's q, k, v arrive, and what they are sent from."""

    q: PerChunk  # [s/r, b, u/a, d]
    kv: tuple[Pair, ...]  # [s/r, b, key-value heads that arrive together, d], by kv_buffer
    send_q: Buffer  # flat: [n, b, heads of Ulysses rank i, d] for i = 0, 1, ...
    send_kv: Pair

    @classmethod
    def plan(cls, sizes: Sizes, idle: Buffer) -> "LoadBuffers":
        """``idle`` is a buffer that nothing writes before a chunk has arrived."""
        chunks = sizes.schedule.chunks
        queries = max(sum(len(each.query_heads) for each in chunk) for chunk in chunks)
        loads = max(sum(len(each.kv_to_load) for each in chunk) for chunk in chunks)
        if sizes.num_ulysses == 1:  # nothing is sent: it is projected where it is used
            queries = loads = 0
        send_q, send_k, send_v = (
            sizes.sequence_sharded(name, heads)
            for name, heads in (("send_q", queries), ("send_k", loads), ("send_v", loads))
        )
        if not sizes.schedule.overlap:
            because = "each send is waited for before the next, and the last before any attention"
            send_q, send_k, send_v = (
                idle.lend(x.name, x.numel, because=because) for x in (send_q, send_k, send_v)
            )
        return cls(
            q=sizes.of_query_heads("q"),
            kv=tuple(
                (sizes.head_sharded(f"k{i}", heads), sizes.head_sharded(f"v{i}", heads))
                for i, heads in enumerate(kv_loads(sizes))
            ),
            send_q=send_q,
            send_kv=(send_k, send_v),
        )


def kv_loads(sizes: Sizes) -> list[int]:
    """The most key-value heads that arrive together in each of the k, v buffers."""
    used = {each.kv_buffer for each in sizes.mine if each.kv_to_load} or {0}
    return [
        max((len(each.kv_to_load) for each in sizes.mine if each.kv_buffer == i), default=0)
        for i in range(max(used) + 1)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBuffers:
    """Device memory of a forward over all chunks."""

    load: LoadBuffers
    out: PerChunk  # [s/r, b, u/a, d]

    @classmethod
    def plan(cls, sizes: Sizes) -> "ForwardBuffers":
        """Attention writes the output only after the chunk has arrived: until then it is idle."""
        out = sizes.of_query_heads("out", in_slots=True)
        return cls(load=LoadBuffers.plan(sizes, idle=out[0]), out=out)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardBuffers:
    """Device memory of a backward over all chunks, but for dK and dV."""

    load: LoadBuffers
    out: PerChunk  # [s/r, b, u/a, d]
    d_out: PerChunk  # [s/r, b, u/a, d]
    dq: PerChunk  # [s/r, b, u/a, d]
    kv_grads: "KvGradBuffers"

    @property
    def dq_over_d_out(self) -> bool:
        """Whether dQ is written over dO."""
        return self.dq[0].memory == self.d_out[0].memory

    @classmethod
    def plan(cls, sizes: Sizes, *, sums_on_host: bool = False) -> "BackwardBuffers":
        """``sums_on_host``: sums of dK and dV wait there between two kernels."""
        d_out = sizes.of_query_heads("d_out", in_slots=True)
        if sizes.schedule.overlap or sizes.num_ring > 1:
            # The next dO arrives while this dQ leaves, or the next call of a ring reads dO again.
            dq = sizes.of_query_heads("dq")
        else:
            because = "a kernel reads dO for the last time before it writes dQ"
            dq = PerChunk(tuple(x.lend("dq", x.numel, because=because) for x in d_out))
        kv_grads = KvGradBuffers.plan(sizes, d_out, sums_on_host=sums_on_host)
        return cls(
            load=LoadBuffers.plan(sizes, idle=kv_grads.scratch[0][0]),
            out=sizes.of_query_heads("out", in_slots=True),
            d_out=d_out,
            dq=dq,
            kv_grads=kv_grads,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KvGradBuffers:
    """Device memory of dK and dV until they are home."""

    scratch: tuple[Pair, Pair]  # [s/r, b, key-value heads of one kernel call, d]
    sums: tuple[Pair, ...]  # [s/r, b, key-value heads that arrived together, d], by kv_buffer
    packed: Pair  # [s/r, b, heads that one chunk finishes, d]
    home: PerChunk  # flat, as send_kv: heads that a chunk finishes
    home_dtype: torch.dtype

    @classmethod
    def plan(cls, sizes: Sizes, d_out: PerChunk, *, sums_on_host: bool) -> "KvGradBuffers":
        """``d_out``: the buffers of dO."""
        mine, sums_on_host = sizes.mine, sums_on_host and sizes.sums_kv
        elsewhere = sums_on_host or sizes.sum_dtype != sizes.dtype
        calls = [len(call.kv_heads) for each in mine for call in each.kernel_calls]
        # A kernel writes straight into a sum that is empty and of its own dtype. In the same dtype
        # only a head that the chunk before used already is written elsewhere, to be added.
        heads = max(calls, default=0) if elsewhere or sizes.num_ring > 1 else int(sizes.sums_kv)
        names = "dk", "dv"
        first, second = (
            tuple(sizes.head_sharded(name + suffix, count) for name in names)
            for suffix, count in (("", heads), ("_second", heads if sizes.num_ring > 2 else 0))
        )
        sent_as_they_lie = set() if elsewhere else {each.kv_to_load for each in mine}
        others = [each.kv_finished for each in mine if each.kv_finished not in sent_as_they_lie]
        packed = sizes.head_sharded("packed", max(map(len, others), default=0))
        because = "the chunk's kernel calls are over, and what they left here was added to the sums"
        finished = sizes.per_chunk(lambda chunk: sum(len(each.kv_finished) for each in chunk))
        return cls(
            scratch=(first, second),
            sums=tuple(
                tuple(sizes.head_sharded(f"{x}_sum{i}", most, sizes.sum_dtype) for x in names)
                for i, most in enumerate([] if sums_on_host else kv_loads(sizes))
            ),
            packed=tuple(x.lend(f"packed_{x.name}", packed.numel, because=because) for x in first),
            home=PerChunk(
                tuple(
                    x.lend(
                        "kv_home",
                        sizes.sequence_sharded("kv_home", heads).numel,
                        because="the chunk's kernels have read dO, and dQ that lay there was sent",
                    )
                    for x, (_, heads) in zip(d_out, finished, strict=True)
                )
            ),
            home_dtype=(
                accumulation_dtype(sizes.dtype)
                if sizes.schedule.shares_kv_heads  # then several ranks' parts meet at home
                else sizes.dtype
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Staging:
    """Device buffers that chunks of heads on the host pass through, one at a time.

    Where exchanges overlap, or one rank exchanges nothing, they have memory of their own; else
    they lie in buffers of the chunk loop that are idle at that moment.
    """

    send: PerChunk  # flat, [n, b, u, d]: from the host, on its way to be sent
    recv: PerChunk  # flat, [n, b, u, d]: received, on its way to the host
    tile: Buffer  # some tokens of all heads
    borrowed: bool = False
    """Whether what was received has to be on the host before the loop goes on."""

    @classmethod
    def of_out(cls, sizes: Sizes, tile_tokens: int) -> "Staging":
        """O: received in forward, sent in backward."""
        q = ForwardBuffers.plan(sizes).load.q[0]
        return cls._plan("out", sizes, tile_tokens, recv=q, because="the kernels have read q")

    @classmethod
    def of_d_out(cls, sizes: Sizes, tile_tokens: int) -> "Staging":
        """The gradient of O, both in backward: dO is sent, and dQ received in its place."""
        dk = BackwardBuffers.plan(sizes).kv_grads.scratch[0][0]
        because = "what the chunk's kernels left in dk was added to its sum"
        return cls._plan("d_out", sizes, tile_tokens, recv=dk, because=because)

    @classmethod
    def _plan(
        cls, name: str, sizes: Sizes, tile_tokens: int, *, recv: Buffer, because: str
    ) -> "Staging":
        """``recv`` is idle when a chunk is received; ``because`` says why."""
        own = cls(
            send=sizes.of_all_query_heads(f"{name}_send"),
            recv=sizes.of_all_query_heads(f"{name}_recv"),
            tile=replace(
                replace(sizes, n=tile_tokens).sequence_sharded(
                    f"{name}_tile", sizes.schedule.num_heads
                ),
                category=MemoryCategory.TILES,
            ),
        )
        if sizes.schedule.overlap or sizes.num_ulysses == 1:
            return own
        dk = BackwardBuffers.plan(sizes).kv_grads.scratch[0][0]
        before = "what is fetched is sent before the chunk's kernels write dk"
        return replace(
            own,
            send=PerChunk(tuple(dk.lend(x.name, x.numel, because=before) for x in own.send)),
            recv=PerChunk(tuple(recv.lend(x.name, x.numel, because=because) for x in own.recv)),
            borrowed=True,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RingBuffers:
    """Device memory of one attention call over a ring."""

    total: Buffer  # [s/r, b, query heads of the call, d]: the sum of out, or of dq, in fp32
    own: Pair  # [s/r, b, key-value heads of the call, d]: contiguous, to be sent
    borrowed: tuple[Pair, ...]  # as own; by step: used, arriving, or gradients on their way back

    @classmethod
    def plan(cls, q: torch.Size, k: torch.Size, dtype: torch.dtype) -> "RingBuffers":
        """For queries and keys of these shapes."""
        total = _of_shape("ring_total", q, accumulation_dtype(dtype))
        own, *borrowed = (
            (_of_shape(f"ring_k_{which}", k, dtype), _of_shape(f"ring_v_{which}", k, dtype))
            for which in ("own", 0, 1, 2)
        )
        return cls(total=total, own=own, borrowed=tuple(borrowed))


@dataclass(frozen=True, kw_only=True, slots=True)
class ReorderBuffers:
    """Copies of a call's tensors with their rows in another order."""

    qkv: tuple[Buffer, Buffer, Buffer]
    out: Buffer
    d_out: Buffer
    grads: tuple[Buffer, Buffer, Buffer]

    @classmethod
    def plan(cls, q: torch.Size, k: torch.Size, dtype: torch.dtype) -> "ReorderBuffers":
        """For queries and keys of these shapes."""
        names = {"q": q, "k": k, "v": k, "out": q, "d_out": q, "dq": q, "dk": k, "dv": k}
        buffers = {x: _of_shape(f"reordered_{x}", shape, dtype) for x, shape in names.items()}
        return cls(
            qkv=(buffers["q"], buffers["k"], buffers["v"]),
            out=buffers["out"],
            d_out=buffers["d_out"],
            grads=(buffers["dq"], buffers["dk"], buffers["dv"]),
        )


def _of_shape(name: str, shape: torch.Size, dtype: torch.dtype) -> Buffer:
    return Buffer(name=name, memory=name, numel=shape.numel(), dtype=dtype)


def row_tiles(numel: int, dtype: torch.dtype) -> Buffer:
    """Two tiles of a residual on the host, ``numel`` elements each: one in use, one arriving."""
    name, category = "row_tiles", MemoryCategory.TILES
    return Buffer(name=name, memory=name, numel=2 * numel, dtype=dtype, category=category)


def sum_rows(sizes: Sizes, rows: int) -> Buffer:
    """Twice ``rows`` of one head of the sums on the host: one in use, one arriving."""
    numel = 2 * min(rows, sizes.kv_sum_shape(1)[2]) * sizes.b * sizes.d
    return Buffer(name="sum_rows", memory="sum_rows", numel=numel, dtype=sizes.sum_dtype)


def head_chunks_buffer(name: str, sizes: Sizes) -> Buffer:
    """All slots of an O or dO that is kept no longer than one layer runs."""
    slots = sizes.sequence_sharded(f"{name}_slots", sizes.schedule.num_heads)
    return replace(slots, category=MemoryCategory.SLOTS)


def ring_buffers(sizes: Sizes) -> Iterator[Buffer]:
    """Those of every attention call of a ring; none without one."""
    if sizes.num_ring == 1:
        return
    together = {head: each.kv_to_load for each in sizes.mine for head in each.kv_to_load}
    for each in sizes.mine:
        for call in each.kernel_calls:
            columns = call.query_columns
            shape = sizes.kv_sum_shape(1)[2:]
            q = torch.Size((*shape[:2], columns.stop - columns.start, sizes.d))
            k = torch.Size((*shape[:2], len(call.kv_heads), sizes.d))
            ring = RingBuffers.plan(q, k, sizes.dtype)
            yield ring.total
            if call.kv_heads != together[call.kv_heads[0]]:  # columns of what arrived together
                yield from ring.own
            for step in range(1, sizes.num_ring):
                yield from ring.borrowed[step % len(ring.borrowed)]


def buffers_of(plan: Any) -> Iterator[Buffer]:
    """All buffers of a plan: of a dataclass, its fields', and so on."""
    if isinstance(plan, Buffer):
        if plan.numel:
            yield plan
    elif is_dataclass(plan):
        for each in fields(plan):
            yield from buffers_of(getattr(plan, each.name))
    elif isinstance(plan, tuple):
        for each in plan:
            yield from buffers_of(each)
