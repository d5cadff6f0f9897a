"""Which tokens a context-parallel rank owns, and what its sequences are made of.

The sequence is split into 2r equal blocks for a ring of r. Ring rank i owns blocks i and 2r-1-i,
one early and one late, so that causal work is even; the a Ulysses ranks behind one ring rank own
equal contiguous parts of those two blocks, put together. Without a ring that is plain: rank i of p
owns tokens i*s/p .. (i+1)*s/p.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_untied.config import ParallelConfig
from megatron_untied.context_parallel.kernels import Segments


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """The shards of one context-parallel group, seen from one rank."""

    num_ulysses: int
    num_ring: int = 1
    rank: int = 0
    """In the whole group: ring rank * num_ulysses + Ulysses rank."""
    _positions: dict = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, parallel: ParallelConfig, *, rank: int = 0) -> "SequenceLayout":
        """The layout that ``parallel`` asks for, seen from ``rank`` of the whole group."""
        num_ulysses, num_ring = parallel.num_ulysses_and_ring
        return cls(num_ulysses=num_ulysses, num_ring=num_ring, rank=rank)

    @property
    def size(self) -> int:
        """Ranks of the whole group (p)."""
        return self.num_ulysses * self.num_ring

    @property
    def divisor(self) -> int:
        """What a sequence length must be a multiple of."""
        return self.num_ulysses if self.num_ring == 1 else 2 * self.size

    def positions(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        """Positions in the sequence of this rank's ``n`` tokens: int64 [n].

        The same tensor each time, so that what is derived from it can be kept.

        Raises:
            ValueError: if sequences cannot be cut into shards of ``n`` tokens.
        """
        key = n, str(device)
        if key not in self._positions:
            self.check_length(n * self.size)
            self._positions[key] = self._own(n).to(device)
        return self._positions[key]

    def shard(self, x: Tensor, dim: int = -1) -> Tensor:
        """This rank's part of ``x`` along its sequence dimension: a tensor of its own.

        Raises:
            ValueError: if the length does not divide.
        """
        s = x.shape[dim]
        self.check_length(s)
        return x.index_select(dim, self.positions(s // self.size, x.device))

    def check_length(self, s: int) -> None:
        """Raises ``ValueError`` if a sequence of ``s`` tokens does not divide over the ranks."""
        if s % self.divisor:
            raise ValueError(
                f"a sequence of {s} tokens does not divide over {self.size} context-parallel "
                f"ranks; make --seq-length a multiple of {self.divisor}."
            )

    def _own(self, n: int) -> Tensor:
        ring, ulysses = divmod(self.rank, self.num_ulysses)
        if self.num_ring == 1:  # both blocks together, whatever their parity
            return torch.arange(ulysses * n, (ulysses + 1) * n)
        blocks = ring_blocks(ring, self.num_ring, block_size=n * self.num_ulysses // 2)
        pair = torch.cat([torch.arange(each.start, each.stop) for each in blocks])
        return pair[ulysses * n : (ulysses + 1) * n]


def ring_blocks(ring_rank: int, num_ring: int, *, block_size: int) -> tuple[range, range]:
    """Positions of the early and of the late block of a ring rank."""
    early, late = (i * block_size for i in (ring_rank, 2 * num_ring - 1 - ring_rank))
    return range(early, early + block_size), range(late, late + block_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceInfo:
    """Positions and documents of one micro-batch; it travels in megatron-core's packed_seq_params.

    What is None is plain: positions count from the start of the sequence, and a token sees all
    tokens before it.
    """

    positions: Tensor | None = None
    """int64 [b, n]: the positions that this rank's tokens are rotated to."""
    cos_sin: tuple[Tensor, Tensor] | None = None
    """What they are rotated by, where the model has no table of its own: fp32 [n, 1, 1, rot/2]."""
    documents: tuple[Segments, ...] | None = None
    """Of each sample, over the whole sequence: tokens see their own document only."""

    @classmethod
    def from_slot(cls, packed_seq_params: object) -> "SequenceInfo":
        """The value in the slot of a layer; an empty slot is plain.

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
    """The documents of each sample, from whole sequences of positions that restart: [b, s].

    They take memory by document, never by token or pair of tokens.
    """
    b, s = positions.shape
    rows, starts = torch.nonzero(positions == 0, as_tuple=True)
    by_sample = starts.split(torch.bincount(rows, minlength=b).tolist())
    return tuple(Segments.of((*its_starts.tolist(), s)) for its_starts in by_sample)
