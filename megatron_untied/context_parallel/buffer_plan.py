"""Device memory of attention: how large each buffer is, and which buffers share memory.

Plans are integers, made from the head schedule, and their fields are the only names that buffers
have. A :class:`.workspace.Workspace` holds the memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

import torch

from megatron_untied.context_parallel.head_schedule import ChunkAssignment, HeadSchedule
from megatron_untied.dtypes import accumulation_dtype
from megatron_untied.phases import MemoryCategory


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One use of device memory. All uses of one ``memory`` share it; it is as large as the largest.

    ``because``: where it is another buffer's memory, why neither is written while the other is
    still to be read.
    """

    name: str
    numel: int
    dtype: torch.dtype
    memory: str = ""
    """Name of the buffer that owns the memory; by default this one."""
    because: str = ""
    category: MemoryCategory = MemoryCategory.CHUNKS
    num_bytes: int = field(init=False)
    """Size of this use; the memory may be larger."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", self.memory or self.name)
        object.__setattr__(self, "num_bytes", self.numel * self.dtype.itemsize)

    def alias(self, name: str, numel: int, *, because: str) -> "Buffer":
        """Another use of the same memory."""
        return replace(self, name=name, numel=numel, because=because)


Pair = tuple[Buffer, Buffer]
"""A buffer of keys or dK, and one of values or dV."""

PerChunk = tuple[Buffer, ...]
"""``[j]`` is the buffer of chunk j: one for all, or with overlap two in turn.

A chunk arrives while the one before it is in use.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What the buffers of one attention call depend on. Letters are those of the package."""

    schedule: HeadSchedule
    rank: int
    """This rank's index among the a Ulysses ranks."""
    n: int
    b: int
    d: int
    dtype: torch.dtype
    num_ring: int = 1
    ring_overlap: bool = True
    """Whether a ring exchanges keys and values during attention, with a set of buffers for it."""
    num_ulysses: int = field(init=False)
    """Ranks that trade tokens for heads (a)."""
    tokens: int = field(init=False)
    """Tokens of a head-sharded tensor: s/r = a * n."""
    mine: tuple[ChunkAssignment, ...] = field(init=False)
    """The heads of this rank, chunk by chunk."""
    kv_loads: tuple[int, ...] = field(init=False)
    """The most key-value heads that arrive together in each of the k, v buffers."""
    sums_kv: bool = field(init=False)
    """Whether the gradient of a key or value is a sum of several kernel calls."""
    sum_dtype: torch.dtype = field(init=False)
    """Dtype of dK and dV before they are returned: wide if they are sums, so no error adds up."""
    home_dtype: torch.dtype = field(init=False)
    """Of dK and dV at home: wide if several ranks' parts meet there."""

    def __post_init__(self) -> None:
        num_ulysses = len(self.schedule.chunks[0])
        mine = tuple(chunk[self.rank] for chunk in self.schedule.chunks)
        loads = [0]  # the first pair of buffers is there even if it stays empty
        for each in mine:
            loads += [0] * (each.kv_buffer + 1 - len(loads))
            if each.kv_to_load:
                loads[each.kv_buffer] = max(loads[each.kv_buffer], len(each.kv_to_load))
        uses_twice = sum(len(x.kv_heads) for x in mine) > sum(len(x.kv_to_load) for x in mine)
        sums_kv = self.num_ring > 1 or uses_twice
        computed = {
            "num_ulysses": num_ulysses,
            "tokens": num_ulysses * self.n,
            "mine": mine,
            "kv_loads": tuple(loads),
            "sums_kv": sums_kv,
            "sum_dtype": accumulation_dtype(self.dtype) if sums_kv else self.dtype,
            "home_dtype": (
                accumulation_dtype(self.dtype) if self.schedule.shares_kv_heads else self.dtype
            ),
        }
        for name, value in computed.items():
            object.__setattr__(self, name, value)  # frozen

    def buffer(
        self, name: str, tokens: int, heads: int, dtype: torch.dtype | None = None
    ) -> Buffer:
        """[tokens, b, heads, d], where ``tokens`` are this rank's own n or all s/r."""
        return Buffer(name=name, numel=tokens * self.b * heads * self.d, dtype=dtype or self.dtype)

    def per_chunk(self, name: str, tokens: int, heads: Sequence[int]) -> PerChunk:
        """[tokens, b, heads[j], d] for each chunk j, which use one or two memories in turn."""
        num_turns = min(2, len(heads)) if self.schedule.overlap else 1
        turns = [
            self.buffer(f"{name}{i}" if self.schedule.overlap else name, tokens, most)
            for i, most in enumerate(max(heads[i::num_turns]) for i in range(num_turns))
        ]
        return tuple(turns[j % num_turns] for j in range(len(heads)))

    def kv_sum_shape(self, heads: int) -> torch.Size:
        """Shape of the sums of dK and dV, contiguous per head: [2, heads, s/r, b, d]."""
        return torch.Size((2, heads, self.tokens, self.b, self.d))


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
            sizes.buffer(name, sizes.n, heads)
            for name, heads in (("send_q", queries), ("send_k", loads), ("send_v", loads))
        )
        if not sizes.schedule.overlap:
            because = "each send is waited for before the next, and the last before any attention"
            send_q, send_k, send_v = (
                idle.alias(x.name, x.numel, because=because) for x in (send_q, send_k, send_v)
            )
        return cls(
            q=sizes.per_chunk("q", sizes.tokens, [len(each.query_heads) for each in sizes.mine]),
            kv=tuple(
                (
                    sizes.buffer(f"k{i}", sizes.tokens, heads),
                    sizes.buffer(f"v{i}", sizes.tokens, heads),
                )
                for i, heads in enumerate(sizes.kv_loads)
            ),
            send_q=send_q,
            send_kv=(send_k, send_v),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBuffers:
    """Device memory of a forward over all chunks."""

    load: LoadBuffers
    out: PerChunk  # [s/r, b, u/a, d]

    @classmethod
    def plan(cls, sizes: Sizes) -> "ForwardBuffers":
        """Attention writes the output only after the chunk has arrived: until then it is idle."""
        # One rank exchanges nothing: its kernels write into the slots of O.
        received = [len(x.query_heads) * (sizes.num_ulysses > 1) for x in sizes.mine]
        out = sizes.per_chunk("out", sizes.tokens, received)
        return cls(load=LoadBuffers.plan(sizes, idle=out[0]), out=out)


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardBuffers:
    """Device memory of a backward over all chunks, without the returned dK and dV."""

    load: LoadBuffers
    out: PerChunk  # [s/r, b, u/a, d]
    d_out: PerChunk  # [s/r, b, u/a, d]
    dq: PerChunk  # [s/r, b, u/a, d]
    dq_over_d_out: bool
    """Whether dQ is written over dO."""
    kv_grads: "KvGradBuffers"

    @classmethod
    def plan(cls, sizes: Sizes, *, sums_on_host: bool = False) -> "BackwardBuffers":
        """``sums_on_host``: sums of dK and dV wait there between two kernels."""
        heads = [len(each.query_heads) for each in sizes.mine]
        # One rank exchanges nothing: its kernels read the slots of O and dO.
        received = [count * (sizes.num_ulysses > 1) for count in heads]
        d_out = sizes.per_chunk("d_out", sizes.tokens, received)
        # With overlap the next dO arrives while this dQ leaves; the next call of a ring reads dO
        # again.
        dq_over_d_out = not sizes.schedule.overlap and sizes.num_ring == 1
        if dq_over_d_out:
            because = "a kernel reads dO for the last time before it writes dQ"
            dq = tuple(x.alias("dq", x.numel, because=because) for x in d_out)
        else:
            dq = sizes.per_chunk("dq", sizes.tokens, heads)
        kv_grads = KvGradBuffers.plan(sizes, d_out, sums_on_host=sums_on_host)
        return cls(
            load=LoadBuffers.plan(sizes, idle=kv_grads.scratch[0][0]),
            out=sizes.per_chunk("out", sizes.tokens, received),
            d_out=d_out,
            dq=dq,
            dq_over_d_out=dq_over_d_out,
            kv_grads=kv_grads,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class KvGradBuffers:
    """Device memory of dK and dV until they are returned to the ranks that own the tokens."""

    scratch: tuple[Pair, Pair]  # [s/r, b, key-value heads of one kernel call, d]
    sums: tuple[Pair, ...]  # [s/r, b, key-value heads that arrived together, d], by kv_buffer
    packed: Pair  # [s/r, b, heads that one chunk finishes, d]
    home: PerChunk  # flat, as send_kv: heads that a chunk finishes

    @classmethod
    def plan(cls, sizes: Sizes, d_out: PerChunk, *, sums_on_host: bool) -> "KvGradBuffers":
        """``d_out``: the buffers of dO."""
        mine, sums_on_host = sizes.mine, sums_on_host and sizes.sums_kv
        elsewhere = sums_on_host or sizes.sum_dtype != sizes.dtype
        calls = [len(call.kv_heads) for each in mine for call in each.kernel_calls]
        # A kernel writes straight into a sum that is empty and of its own dtype. In the same dtype
        # only a head that the chunk before used already is written elsewhere, to be added.
        heads = max(calls, default=0) if elsewhere or sizes.num_ring > 1 else int(sizes.sums_kv)
        names, still_sends = ("dk", "dv"), sizes.num_ring > 2 and sizes.ring_overlap
        first, second = (
            tuple(sizes.buffer(name + suffix, sizes.tokens, count) for name in names)
            # A ring of three or more still sends one pair while the next step fills another.
            for suffix, count in (("", heads), ("_second", heads if still_sends else 0))
        )
        sent_as_they_lie = set() if elsewhere else {each.kv_to_load for each in mine}
        packed_heads = [len(x.kv_finished) for x in mine if x.kv_finished not in sent_as_they_lie]
        packed = sizes.buffer("packed", sizes.tokens, max(packed_heads, default=0))
        because = "the chunk's kernel calls are over, and what they left here was added to the sums"
        finished = [
            # One rank has them at home already.
            sum(len(each.kv_finished) for each in chunk) * (sizes.num_ulysses > 1)
            for chunk in sizes.schedule.chunks
        ]
        kernels_done = "the chunk's kernels have read dO, and dQ that lay there was sent"
        return cls(
            scratch=(first, second),
            sums=tuple(
                tuple(
                    sizes.buffer(f"{x}_sum{i}", sizes.tokens, most, sizes.sum_dtype) for x in names
                )
                for i, most in enumerate([] if sums_on_host else sizes.kv_loads)
            ),
            packed=tuple(x.alias(f"packed_{x.name}", packed.numel, because=because) for x in first),
            home=tuple(
                owner.alias("kv_home", home.numel, because=kernels_done)
                for owner, home in zip(
                    d_out, sizes.per_chunk("kv_home", sizes.n, finished), strict=True
                )
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
    shares_memory: bool
    """Whether what was received has to be on the host before the loop goes on."""

    @classmethod
    def plan(cls, name: Literal["out", "d_out"], sizes: Sizes, tile_tokens: int) -> "Staging":
        """O is received in forward and sent in backward; dO is sent in backward, dQ received."""
        heads = [sum(len(each.query_heads) for each in c) for c in sizes.schedule.chunks]
        send, recv = (sizes.per_chunk(f"{name}_{way}", sizes.n, heads) for way in ("send", "recv"))
        tile = sizes.buffer(f"{name}_tile", tile_tokens, sizes.schedule.num_heads)
        shares_memory = not sizes.schedule.overlap and sizes.num_ulysses > 1
        if shares_memory:
            # The chunk loop writes neither dk nor q while these chunks pass through them.
            dk = BackwardBuffers.plan(sizes).kv_grads.scratch[0][0]
            because = "what is fetched is sent before the chunk's kernels write dk"
            send = tuple(dk.alias(x.name, x.numel, because=because) for x in send)
            idle, because = dk, "what the chunk's kernels left in dk was added to its sum"
            if name == "out":
                idle, because = ForwardBuffers.plan(sizes).load.q[0], "the kernels have read q"
            recv = tuple(idle.alias(x.name, x.numel, because=because) for x in recv)
        tile = replace(tile, category=MemoryCategory.TILES)
        return cls(send=send, recv=recv, tile=tile, shares_memory=shares_memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class RingBuffers:
    """Device memory of one attention call over a ring."""

    total: Buffer
    """[s/r, b, query heads of the call, d] in fp32: the sum of out, or of more than two dq."""
    own: Pair  # [s/r, b, key-value heads of the call, d]: contiguous, to be sent
    remote_kv: tuple[Pair, ...]  # as own; by step: in use, arriving, or gradients being returned

    @classmethod
    def plan(cls, q: torch.Size, k: torch.Size, dtype: torch.dtype) -> "RingBuffers":
        """For queries and keys of these shapes."""
        total = Buffer(name="ring_total", numel=q.numel(), dtype=accumulation_dtype(dtype))
        own, *remote_kv = (
            tuple(
                Buffer(name=f"ring_{kv}_{which}", numel=k.numel(), dtype=dtype) for kv in ("k", "v")
            )
            for which in ("own", 0, 1, 2)
        )
        return cls(total=total, own=own, remote_kv=tuple(remote_kv))


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
        buffers = {
            name: Buffer(name=f"reordered_{name}", numel=shape.numel(), dtype=dtype)
            for name, shape in names.items()
        }
        return cls(
            qkv=(buffers["q"], buffers["k"], buffers["v"]),
            out=buffers["out"],
            d_out=buffers["d_out"],
            grads=(buffers["dq"], buffers["dk"], buffers["dv"]),
        )


def row_tiles(numel: int, num_tiles: int, dtype: torch.dtype, memory: str = "row_tiles") -> Buffer:
    """Two tiles of a residual on the host, ``numel`` elements each: one in use, one on its way.

    ``memory``: "row_tiles", or "gradient_tiles" for a gradient that is read beside a residual.
    """
    numel *= min(2, num_tiles)
    return Buffer(name=memory, numel=numel, dtype=dtype, category=MemoryCategory.TILES)


def kv_tile(sizes: Sizes, tile_tokens: int) -> Buffer:
    """Some tokens of all dK or dV that ranks sent home, from the host."""
    heads = sum(len(each.kv_finished) for chunk in sizes.schedule.chunks for each in chunk)
    return replace(sizes.buffer("kv_tile", tile_tokens, heads), category=MemoryCategory.TILES)


def sum_rows(sizes: Sizes, tile_tokens: int) -> Buffer:
    """Some rows of one head of the sums on the host, twice: one part in use, one arriving.

    A fourth of what a tile of all heads has: 32 MiB in fp32 for 32 heads and 8,192 tokens.
    """
    rows = min(max(1, tile_tokens * sizes.schedule.num_heads // 4), sizes.tokens)
    return sizes.buffer("sum_rows", 2 * rows, 1, sizes.sum_dtype)


def head_chunks_buffer(name: str, sizes: Sizes) -> Buffer:
    """All slots of an O or dO that is kept no longer than one layer runs."""
    slots = sizes.buffer(f"{name}_slots", sizes.n, sizes.schedule.num_heads)
    return replace(slots, category=MemoryCategory.SLOTS)


def ring_buffers(sizes: Sizes, *, backward: bool = False) -> Iterator[Buffer]:
    """Those of every attention call of a ring, forward or backward; none without one."""
    if sizes.num_ring == 1:
        return
    together = {head: each.kv_to_load for each in sizes.mine for head in each.kv_to_load}
    for call in (call for each in sizes.mine for call in each.kernel_calls):
        columns = call.query_columns
        q = torch.Size((sizes.tokens, sizes.b, columns.stop - columns.start, sizes.d))
        k = torch.Size((sizes.tokens, sizes.b, len(call.kv_heads), sizes.d))
        ring = RingBuffers.plan(q, k, sizes.dtype)
        if sizes.num_ring > 2 or not backward:
            yield ring.total
        if call.kv_heads != together[call.kv_heads[0]]:  # columns of what arrived together
            yield from ring.own
        for step in range(1, sizes.num_ring) if sizes.ring_overlap else ():
            yield from ring.remote_kv[step % len(ring.remote_kv)]


def buffers_of(plan: Any) -> Iterator[Buffer]:
    """All buffers of a plan, each once: of a dataclass, its fields', and so on."""
    if isinstance(plan, Buffer):
        if plan.numel:
            yield plan
    elif is_dataclass(plan):
        for each in fields(plan):
            yield from buffers_of(getattr(plan, each.name))
    elif isinstance(plan, tuple):
        for each in dict.fromkeys(plan):  # chunks that take turns share their buffers
            yield from buffers_of(each)
