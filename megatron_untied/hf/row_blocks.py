"""Tensors a few rows at a time."""

import math
from collections.abc import Iterator

from megatron_untied.checkpoint.global_tensor import BLOCK_ELEMENTS
from megatron_untied.sharding.parameter_layout import Box


def row_blocks(box: Box) -> Iterator[Box]:
    """``box`` in order, cut along its first dimension to at most ``BLOCK_ELEMENTS``."""
    start, num_rows = box.offsets[0], box.sizes[0]
    at_once = max(1, BLOCK_ELEMENTS // math.prod(box.sizes[1:]))
    for row in range(0, num_rows, at_once):
        rows = min(at_once, num_rows - row)
        yield Box((start + row, *box.offsets[1:]), (rows, *box.sizes[1:]))
