"""Blocks of queries with the keys that they see, for kernels without a window of their own."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_untied.context_parallel.kernels.split_calls import Call


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Consecutive rows of q and all rows of k that any of them sees."""

    queries: slice
    keys: slice
    hidden: Tensor | None
    """Bool [queries, keys]: True where a query does not see a key; None if it sees all of them."""


def query_blocks(
    num_queries: int, call: Call, block_size: int, device: torch.device
) -> Iterator[QueryBlock]:
    """Cut the queries of a call of one segment into blocks of ``block_size``."""
    for first in range(0, num_queries, block_size):
        queries = slice(first, min(first + block_size, num_queries))
        if not call.causal:
            yield QueryBlock(queries, slice(0, call.keys.stop - call.keys.start), None)
            continue
        keys = slice(max(0, first + 1 - (call.window or queries.stop)), queries.stop)
        rows, columns = (torch.arange(x.start, x.stop, device=device) for x in (queries, keys))
        distance = rows[:, None] - columns[None, :]
        hidden = distance < 0
        if call.window is not None:
            hidden |= distance >= call.window
        yield QueryBlock(queries, keys, hidden)
