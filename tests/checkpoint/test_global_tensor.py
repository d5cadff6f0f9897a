import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_untied.checkpoint import global_tensor as module
from megatron_untied.checkpoint.global_tensor import (
    GlobalTensor,
    TensorReader,
    in_blocks,
    write_tensors,
)
from megatron_untied.sharding.parameter_layout import GlobalSlice
from tests.support.ranks import run_on_ranks
from tests.support.whole_model import part_of

WHOLE = torch.arange(7 * 5.0).view(7, 5)


@pytest.mark.parametrize("block_elements", [1, 5, 11, 35, 100])
def test_blocks_are_the_piece_in_parts(monkeypatch, block_elements):
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", block_elements)
    whole = torch.arange(20 * 5.0).view(20, 5)
    blocks = list(in_blocks([GlobalSlice((3, 1), whole[3:10, 1:4])]))
    assert torch.equal(torch.cat([block.tensor for block in blocks]), whole[3:10, 1:4])
    for block in blocks:
        assert torch.equal(block.tensor, part_of(whole, block))
        assert block.tensor.numel() <= max(block_elements, 3)
    assert sum(b.tensor.numel() for b in in_blocks([GlobalSlice((4,), torch.ones(9))])) == 9


def write(group, folder, pieces_by_rank):
    slices = [GlobalSlice((row, column), WHOLE[row : row + h, column : column + w].clone())
              for row, column, h, w in pieces_by_rank[group.rank()]]  # fmt: skip
    write_tensors(folder, {"x": GlobalTensor((7, 5), slices)} if slices else {})


def read(group, folder, dtype):
    """Every rank reads two overlapping, non-contiguous parts into ``dtype``."""
    held = torch.full((9, 9), -1, dtype=dtype)
    slices = [GlobalSlice((1, 1), held[:5, :3]), GlobalSlice((0, 4), held[:7, 8:])]
    TensorReader(folder).read({"x": GlobalTensor((7, 5), slices)})
    for part in slices:
        assert torch.equal(part.tensor, part_of(WHOLE, part).to(dtype))
    assert (held == -1).sum() == 81 - 15 - 7


HALVES = [[(0, 0, 3, 5)], [(3, 0, 4, 5)]]
THE_SAME_ON_BOTH = [[(0, 0, 7, 5)], [(0, 0, 7, 5)]]
AWKWARD = [[(0, 0, 1, 2), (1, 0, 6, 2)], [(0, 2, 7, 3)]]
ALL_ON_ONE = [[], [(0, 0, 7, 5)]]


@pytest.mark.parametrize("slices", [HALVES, THE_SAME_ON_BOTH, AWKWARD, ALL_ON_ONE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_is_what_was_written(tmp_path, slices, dtype):
    run_on_ranks(write, 2, str(tmp_path), slices)
    run_on_ranks(read, 1, str(tmp_path), dtype)


def write_badly(group, folder, slices):
    with pytest.raises(CheckpointException, match="x"):
        write(group, folder, slices)


@pytest.mark.parametrize(
    "slices", [[[(0, 0, 3, 5)], [(4, 0, 3, 5)]], [[(0, 0, 4, 5)], [(3, 0, 4, 5)]]],
    ids=["hole", "overlap"],
)  # fmt: skip
def test_slices_that_do_not_make_up_the_tensor_are_refused(tmp_path, slices):
    run_on_ranks(write_badly, 2, str(tmp_path), slices)
