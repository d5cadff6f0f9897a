"""The tokens of a context-parallel rank, their positions and their documents.

A ring of r splits the sequence into 2r equal blocks. Ring rank i owns blocks i and 2r-1-i, one
early and one late, which balances causal work. The a Ulysses ranks of one ring rank own equal
contiguous parts of those two blocks, put together. Without a ring shards are contiguous: rank i of
p owns tokens i*s/p .. (i+1)*s/p.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_untied.config import ParallelConfig
from megatron_untied.context_parallel.kernels import Segments


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """The shards of one context-parallel group, as one rank needs them."""

    num_ulysses: int
    num_ring: int = 1
    rank: int = 0
    """In the whole group: ring rank * num_ulysses + Ulysses rank."""
    _positions: dict = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, parallel: ParallelConfig, *, rank: int = 0) -> "SequenceLayout":
        """The layout of ``parallel`` for ``rank`` of the whole group."""
        num_ulysses, num_ring = parallel.num_ulysses_and_ring
        return cls(num_ulysses=num_ulysses, num_ring=num_ring, rank=rank)

    @property
    def size(self) -> int:
        """Ranks of the whole group (p)."""
        return self.num_ulysses * self.num_ring

    @property
    def divisor(self) -> int:
        """Sequence lengths must be multiples of it."""
        return self.num_ulysses if self.num_ring == 1 else 2 * self.size

    def positions(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        """Positions in the sequence of this rank's ``n`` tokens: int64 [n].

        Cached: the same tensor on each call, so that tensors derived from it can be cached too.

        Raises:
            ValueError: if sequences cannot be split into shards of ``n`` tokens.
        """
        key = n, str(device)
        if key not in self._positions:
            self.check_length(n * self.size)
            ring, ulysses = divmod(self.rank, self.num_ulysses)
            part = slice(ulysses * n, (ulysses + 1) * n)
            if self.num_ring == 1:  # the two blocks are the whole sequence, of any length
                own = torch.arange(part.start, part.stop)
            else:
                blocks = ring_blocks(ring, self.num_ring, block_size=n * self.num_ulysses // 2)
                own = torch.cat([torch.arange(x.start, x.stop) for x in blocks])[part]
            self._positions[key] = own.to(device)
        return self._positions[key]

    def shard(self, x: Tensor, dim: int = -1) -> Tensor:
        """This rank's shard of ``x`` along ``dim``, copied: [..., s, ...] -> [..., s/p, ...].

        Raises:
            ValueError: if s is not a multiple of ``divisor``.
        """
        s = x.shape[dim]
        self.check_length(s)
        return x.index_select(dim, self.positions(s // self.size, x.device))

    def check_length(self, s: int) -> None:
        """Raise ``ValueError`` if ``s`` tokens cannot be sharded evenly."""
        if s % self.divisor:
            raise ValueError(
                f"a sequence of {s} tokens is not divisible over {self.size} context-parallel "
                f"ranks; make --seq-length a multiple of {self.divisor}."
            )


def ring_blocks(ring_rank: int, num_ring: int, *, block_size: int) -> tuple[range, range]:
    """Positions of the early and of the late block of a ring rank."""
    early, late = (i * block_size for i in (ring_rank, 2 * num_ring - 1 - ring_rank))
    return range(early, early + block_size), range(late, late + block_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceInfo:
    """Positions and documents of one micro-batch, passed as megatron-core's packed_seq_params.

    By default positions count from the start of the sequence, and a token sees all tokens before
    it.
    """

    positions: Tensor | None = None
    """int64 [b, n]: the positions that this rank's tokens are rotated to."""
    cos_sin: tuple[Tensor, Tensor] | None = None
    """Rotation of those, for models without a table of their own: fp32 [n, 1, 1, rot/2] each."""
    documents: tuple[Segments, ...] | None = None
    """Of each sample, over the whole sequence: tokens see their own document only."""

    @classmethod
    def from_slot(cls, packed_seq_params: object) -> "SequenceInfo":
        """``packed_seq_params`` as a layer receives it; None is the default.

        Raises:
            ValueError: for megatron-core's own parameters of packed sequences.
        """
        if packed_seq_params is None:
            return cls()
        if not isinstance(packed_seq_params, cls):
            raise ValueError(
                f"packed_seq_params is a {type(packed_seq_params).__name__}, which this attention "
                "does not read; give a SequenceInfo with the documents of each sample."
            )
        return packed_seq_params


def documents_of(positions: Tensor) -> tuple[Segments, ...]:
    """The documents of each sample, from int64 [b, s] positions that restart at each document.

    Their memory grows with documents, not with tokens or pairs of tokens.
    """
    b, s = positions.shape
    rows, starts = torch.nonzero(positions == 0, as_tuple=True)
    by_sample = starts.split(torch.bincount(rows, minlength=b).tolist())
    return tuple(Segments.of((*sample.tolist(), s)) for sample in by_sample)
