"""What the sequences of a micro-batch are made of, as the attention of every layer is told."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_untied.context_parallel.kernels import Segments


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
