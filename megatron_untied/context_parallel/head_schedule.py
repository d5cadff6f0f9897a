"""Which heads travel in which chunk: integers only.

Query heads in their natural order are cut into one contiguous run a rank, as even as can be; chunk
j is the j-th slice of every run. Since the runs are contiguous, weights need no permutation, and
one checkpoint is the same model at every number of ranks and every chunk size. A rank loads the
key-value heads that its slice needs and keeps one that its next slice uses again.

For 32 query and 8 key-value heads over 8 ranks, one head a rank: run r is heads 4r..4r+3, all of
key-value head r; chunk 0 brings k and v, chunks 1-3 bring only q. In general slices straddle
key-value heads and ranks load and finish them in different chunks.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One kernel call: query heads and the key-value heads they share evenly."""

    query_columns: slice
    """Columns of the chunk's [s, b, query heads of this rank, d]."""
    kv: range


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What one rank attends to in one chunk. All fields but ``query`` number key-value heads."""

    query: range
    kv: range
    load: range
    """Of ``kv``, those that the turn before did not use: they travel."""
    done: range
    """Of ``kv``, those that the turn after does not use: their gradient is complete."""
    pieces: tuple[Piece, ...]
    buffer: int
    """Which of the alternating k, v buffers ``load`` is received into."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSchedule:
    """``chunks[j][r]`` is the turn of rank r in chunk j."""

    num_heads: int
    num_kv_heads: int
    overlap: bool
    """Whether a chunk is loaded while the one before it is in use."""
    chunks: tuple[tuple[Turn, ...], ...]

    @property
    def shares_kv_heads(self) -> bool:
        """Whether several ranks use one key-value head, so that its gradients meet at home."""
        uses = [head for run in zip(*self.chunks, strict=True) for head in _union(run)]
        return len(uses) > len(set(uses))

    def kv_heads_in_many_chunks(self, rank: int) -> bool:
        """Whether ``rank`` uses a key-value head in more than one chunk."""
        turns = [chunk[rank] for chunk in self.chunks]
        return sum(len(turn.kv) for turn in turns) > sum(len(turn.load) for turn in turns)


def legal_heads_per_chunk(num_heads: int, num_ranks: int) -> list[int]:
    """Every chunk size :func:`head_schedule` takes; the last is a single exchange."""
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
        ValueError: if key-value heads do not divide query heads, or for a chunk size that is not
            legal; the message lists the legal ones.
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
            f"--cp-heads-per-chunk {heads_per_chunk} does not cut {num_heads} heads over "
            f"{num_ranks} ranks; use one of {', '.join(map(str, legal))} or all."
        )
    per_rank = heads_per_chunk // num_ranks
    runs = [
        _turns(
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


def _turns(
    run: range, per_rank: int, ratio: int, num_chunks: int, overlap: bool
) -> tuple[Turn, ...]:
    """One rank's turns over its ``run`` of query heads; ``ratio`` query heads share a kv head."""
    slices = [run[j * per_rank : (j + 1) * per_rank] for j in range(num_chunks)]
    kv = [range(q[0] // ratio, q[-1] // ratio + 1) if q else range(0) for q in slices]
    # A slice starts where the one before ended, so they share at most one key-value head.
    load = [now[1:] if before and now and now[0] in before else now for before, now in _pairs(kv)]
    turns: list[Turn] = []
    for j, query in enumerate(slices):
        after = kv[j + 1] if j + 1 < num_chunks else range(0)
        done = kv[j][:-1] if kv[j] and after and kv[j][-1] in after else kv[j]
        turns.append(
            Turn(
                query=query,
                kv=kv[j],
                load=load[j],
                done=done,
                pieces=_pieces(query, kv[j], load[j], ratio),
                buffer=_free_buffer(turns, kv[j], overlap) if load[j] else -1,
            )
        )
    return tuple(turns)


def _pairs(kv: list[range]) -> list[tuple[range, range]]:
    return list(zip([range(0), *kv], kv, strict=False))


def _pieces(query: range, kv: range, load: range, ratio: int) -> tuple[Piece, ...]:
    """Kernel calls of a turn: the loaded heads together where they share evenly, else singly."""

    def piece(heads: range) -> Piece:
        first = max(heads[0] * ratio, query.start) - query.start
        last = min((heads[-1] + 1) * ratio, query.stop) - query.start
        return Piece(query_columns=slice(first, last), kv=heads)

    single = [piece(range(head, head + 1)) for head in kv]
    widths = {p.query_columns.stop - p.query_columns.start for p in single if p.kv[0] in load}
    if len(load) > 1 and len(widths) == 1:
        return tuple([*single[: len(kv) - len(load)], piece(load)])
    return tuple(single)


def _free_buffer(turns: list[Turn], kv: range, overlap: bool) -> int:
    """The first k, v buffer that holds no head still needed when this turn's load arrives."""
    needed = set(kv) | (set(turns[-1].kv) if overlap and turns else set())
    busy = {turn.buffer for turn in turns if needed & set(turn.load)}
    return next(i for i in range(3) if i not in busy)


def _union(turns: tuple[Turn, ...]) -> set[int]:
    return {head for turn in turns for head in turn.kv}
