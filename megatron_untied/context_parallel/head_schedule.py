"""Which heads travel in which chunk: integers only.

Query heads in their natural order are split into one contiguous run per rank, as evenly as
possible; chunk j is the j-th slice of every run. As runs are contiguous, weights need no
permutation, and one checkpoint is the same model at every number of ranks and every chunk size. A
rank loads the key-value heads of its slice, except one that its previous slice left in place.

For 32 query and 8 key-value heads over 8 ranks, one head per rank at a time: run r is heads
4r..4r+3, all of key-value head r; chunk 0 brings k and v, chunks 1-3 bring only q. In general
slices straddle key-value heads, and ranks load and finish them in different chunks.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCall:
    """Query heads of one chunk on one rank, and the key-value heads that they share evenly."""

    query_columns: slice
    """Columns of the chunk's [s/r, b, query heads of this rank, d]."""
    kv_heads: range


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkAssignment:
    """The heads of one rank in one chunk."""

    query_heads: range
    kv_heads: range
    kv_to_load: range
    """Of ``kv_heads``, those that the chunk before did not use: they travel."""
    kv_finished: range
    """Of ``kv_heads``, those that the chunk after does not use: their gradient is complete."""
    kernel_calls: tuple[KernelCall, ...]
    kv_buffer: int
    """Index of the k, v buffers that ``kv_to_load`` is received in; -1 if it is empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSchedule:
    """``chunks[j][r]`` are the heads of rank r in chunk j."""

    num_heads: int
    num_kv_heads: int
    overlap: bool
    """Whether a chunk is loaded while the one before it is in use."""
    chunks: tuple[tuple[ChunkAssignment, ...], ...]

    @property
    def shares_kv_heads(self) -> bool:
        """Whether several ranks use one key-value head, so that its owner sums their gradients."""
        by_rank = zip(*self.chunks, strict=True)
        uses = [head for run in by_rank for head in {head for a in run for head in a.kv_heads}]
        return len(uses) > len(set(uses))

    @property
    def heads_of_calls(self) -> set[tuple[int, int]]:
        """Query and key-value heads of every kernel call, on any rank in any chunk."""
        assignments = (assignment for chunk in self.chunks for assignment in chunk)
        calls = (call for assignment in assignments for call in assignment.kernel_calls)
        return {(c.query_columns.stop - c.query_columns.start, len(c.kv_heads)) for c in calls}


def legal_heads_per_chunk(num_heads: int, num_ranks: int) -> list[int]:
    """Every valid ``heads_per_chunk`` of :func:`head_schedule`; the last is a single exchange."""
    most = -(-num_heads // num_ranks)
    return [num_ranks * per_rank for per_rank in range(1, most + 1)]


def head_schedule(
    num_heads: int,
    num_kv_heads: int,
    num_ranks: int,
    heads_per_chunk: int | Literal["all"] = "all",
    *,
    overlap: bool = False,
) -> HeadSchedule:
    """The schedule of ``num_heads`` query heads, ``heads_per_chunk`` at a time over all ranks.

    Where the ranks do not divide the heads, only the last chunk is uneven, and a rank may have no
    head in it. With ``overlap`` the next chunk is loaded while this one is in use, so it goes to
    another buffer.

    Raises:
        ValueError: if key-value heads do not divide query heads, or for an invalid chunk size; the
            message lists the valid ones.
    """
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads do not share {num_kv_heads} key-value heads evenly; "
            f"make --num-query-groups a divisor of {num_heads}."
        )
    legal = legal_heads_per_chunk(num_heads, num_ranks)
    if heads_per_chunk == "all":
        heads_per_chunk = legal[-1]
    if heads_per_chunk not in legal:
        raise ValueError(
            f"--cp-heads-per-chunk {heads_per_chunk} does not split {num_heads} heads over "
            f"{num_ranks} ranks; use one of {', '.join(map(str, legal))} or all."
        )
    per_rank = heads_per_chunk // num_ranks
    runs = [
        _assignments(
            range(r * num_heads // num_ranks, (r + 1) * num_heads // num_ranks),
            per_rank,
            num_heads // num_kv_heads,
            len(legal) // per_rank + (len(legal) % per_rank > 0),
            overlap,
        )
        for r in range(num_ranks)
    ]
    return HeadSchedule(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        overlap=overlap,
        chunks=tuple(zip(*runs, strict=True)),
    )


def _assignments(
    run: range, per_rank: int, ratio: int, num_chunks: int, overlap: bool
) -> tuple[ChunkAssignment, ...]:
    """One rank's chunks of its ``run`` of query heads; ``ratio`` of them share a kv head."""
    slices = [run[j * per_rank : (j + 1) * per_rank] for j in range(num_chunks)]
    kv = [range(q[0] // ratio, q[-1] // ratio + 1) if q else range(0) for q in slices]
    assignments: list[ChunkAssignment] = []
    for j, query_heads in enumerate(slices):
        before, now = kv[j - 1] if j else range(0), kv[j]
        after = kv[j + 1] if j + 1 < num_chunks else range(0)
        # A slice starts where the one before ended, so they share at most one key-value head,
        # the first of this slice and the last of the one before.
        to_load = now[1:] if now and now[0] in before else now
        assignments.append(
            ChunkAssignment(
                query_heads=query_heads,
                kv_heads=now,
                kv_to_load=to_load,
                kv_finished=now[:-1] if now and now[-1] in after else now,
                kernel_calls=_kernel_calls(query_heads, now, to_load, ratio),
                kv_buffer=_free_buffer(assignments, now, overlap) if to_load else -1,
            )
        )
    return tuple(assignments)


def _kernel_calls(query: range, kv: range, loaded: range, ratio: int) -> tuple[KernelCall, ...]:
    """One call for the heads loaded now, where they share queries evenly; else one per kv head."""

    def call(heads: range) -> KernelCall:
        first = max(heads[0] * ratio, query.start) - query.start
        last = min((heads[-1] + 1) * ratio, query.stop) - query.start
        return KernelCall(query_columns=slice(first, last), kv_heads=heads)

    single = [call(range(head, head + 1)) for head in kv]
    widths = {
        c.query_columns.stop - c.query_columns.start for c in single if c.kv_heads[0] in loaded
    }
    if len(loaded) > 1 and len(widths) == 1:
        return tuple([*single[: len(kv) - len(loaded)], call(loaded)])
    return tuple(single)


def _free_buffer(before: list[ChunkAssignment], kv: range, overlap: bool) -> int:
    """The first k, v buffer without a head that is still used when this chunk arrives."""
    in_use = set(kv) | (set(before[-1].kv_heads) if overlap and before else set())
    busy = {chunk.kv_buffer for chunk in before if in_use & set(chunk.kv_to_load)}
    # Three suffice: one head left in place, the chunk that attends, the chunk that arrives.
    return next(i for i in range(3) if i not in busy)
