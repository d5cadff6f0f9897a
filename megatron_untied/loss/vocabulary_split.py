"""How tensor-parallel ranks share a language-model head, and the reductions over them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularySplit:
    """This rank's columns of the logits, and the group that has the rest.

    Letters as in :mod:`megatron_untied.loss.chunked_cross_entropy`. Methods that end in ``_``
    and :meth:`gather` are collective over ``group``.
    """

    group: ProcessGroup | None
    """The ranks that share the vocabulary; None for one rank, without collectives."""
    first_column: int
    num_columns: int
    """Real tokens among this rank's rows of the weight; 0 if they are all padding."""
    num_token_blocks: int
    """Ranks that hold a part of the tokens each: t with sequence parallelism, otherwise 1."""

    @classmethod
    def of(
        cls, weight: Tensor, *, vocab_size: int, group: ProcessGroup | None, sequence_parallel: bool
    ) -> "VocabularySplit":
        """From this rank's rows of the weight, [v/t, m], the same number on every rank.

        Raises:
            ValueError: if the vocabulary has more tokens than the weight has rows.
        """
        t, rank = (1, 0) if group is None else (group.size(), group.rank())
        rows = len(weight)
        if vocab_size > rows * t:
            raise ValueError(
                f"vocab_size is {vocab_size}, but the weight has {rows} rows on each of {t} "
                f"tensor-parallel ranks; pad it to at least {-(-vocab_size // t)} rows per rank"
            )
        return cls(
            group=None if t == 1 else group,
            first_column=rank * rows,
            num_columns=min(max(vocab_size - rank * rows, 0), rows),
            num_token_blocks=t if sequence_parallel else 1,
        )

    def by_hidden_row(self, x: Tensor) -> Tensor:
        """Reorder values per token to hidden rows: [b, n] -> [blocks, n/blocks * b]."""
        return x.t().reshape(self.num_token_blocks, -1)

    def by_token(self, x: Tensor, b: int) -> Tensor:
        """The inverse of :meth:`by_hidden_row`: [blocks, n/blocks * b] -> [b, n]."""
        return x.reshape(-1, b).t()

    def column_of(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Each label's column in this rank's logits, int64 [c], and whether it is there, bool [c].

        Labels of other ranks, and arbitrary labels of masked tokens, get column 0.
        """
        column = labels - self.first_column
        owned = (column >= 0) & (column < self.num_columns)
        return column.where(owned, 0), owned

    def gather(self, rows: Tensor) -> Tensor:
        """The chunk's hidden states, block after block: [c/blocks, m] -> [c, m].

        Without sequence parallelism these are ``rows`` themselves, not a copy.
        """
        if self.num_token_blocks == 1:
            return rows
        gathered = rows.new_empty(self.num_token_blocks * len(rows), rows.shape[1])
        dist.all_gather_into_tensor(gathered, rows, self.group)
        return gathered

    def max_(self, x: Tensor) -> Tensor:
        """Maximum over the ranks, in place; any shape."""
        if self.group is not None:
            dist.all_reduce(x, dist.ReduceOp.MAX, self.group)
        return x

    def sum_(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; any shape."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def argmax(self, logits: Tensor) -> Tensor:
        """Token of the largest logit over all ranks, the lowest of several: int64 [c]. Collective.

        ``logits``: this rank's columns, [c, columns].
        """
        value, column = logits.max(1)  # of equal ones the first
        best = self.max_(value.clone())
        token = (column + self.first_column).where(value == best, torch.iinfo(torch.int64).max)
        if self.group is not None:
            dist.all_reduce(token, dist.ReduceOp.MIN, self.group)
        return token

    def sum_product_(self, rows: Tensor, a: Tensor, b: Tensor) -> None:
        """Sum ``a @ b``, [c, m], over the ranks; ``rows`` [c/blocks, m] receives its own part."""
        if self.num_token_blocks == 1:
            self.sum_(torch.mm(a, b, out=rows))
        else:
            dist.reduce_scatter_tensor(rows, a @ b, group=self.group)
