"""Attention on sequences in Megatron-LM's order: only rows move, so it is the same bits."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron_untied.context_parallel.kernels import (
    Attended,
    CpuFlash,
    Mask,
    Qkv,
    QkvGrads,
)
from megatron_untied.context_parallel.sequence import SequenceLayout
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.megatron_lm.zigzag import ZigzagReorder, megatron_blocks
from tests.support.ranks import run_on_ranks

SHAPES = {"q": 4, "k": 2, "v": 2, "d_out": 4}
"""Heads of each tensor."""


def check_shards(group):
    p = group.size()
    positions = torch.arange(2 * p * 3)
    batch = {"positions": positions[None]}
    theirs = get_batch_on_this_cp_rank(batch, group)["positions"][0]
    layout = SequenceLayout(num_ulysses=1, num_ring=p, rank=group.rank())
    assert torch.equal(layout.positions(len(theirs)), theirs)
    shards = [torch.empty_like(theirs) for _ in range(p)]
    dist.all_gather(shards, theirs, group=group)
    blocks = positions.view(2 * p, 3)
    assert torch.equal(torch.cat(shards), blocks[megatron_blocks(p)].flatten())


@pytest.mark.parametrize("world_size", [2, 3])
def test_shards_are_those_of_megatron(world_size):
    run_on_ranks(check_shards, world_size)


def as_they_arrive(x, num_ranks):
    """Rows of [s, ...] in Megatron-LM's order, one head wide of a larger buffer."""
    blocks = x.unflatten(0, (2 * num_ranks, -1))
    arrived = blocks[megatron_blocks(num_ranks)].flatten(0, 1)
    buffer = torch.full((*x.shape[:2], x.shape[2] + 3, x.shape[3]), torch.nan, dtype=x.dtype)
    buffer[:, :, 1:-2] = arrived
    return buffer[:, :, 1:-2]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_results_are_those_in_order_of_position(num_ranks, window):
    kernel, workspace = CpuFlash(), Workspace()
    generator = torch.Generator().manual_seed(0)
    whole = {
        name: torch.randn(4 * num_ranks, 2, heads, 8, generator=generator)
        for name, heads in SHAPES.items()
    }
    mask = Mask(window=window, scale=0.3)
    expected = run(kernel, whole, mask)
    arrived = {name: as_they_arrive(x, num_ranks) for name, x in whole.items()}
    for _ in range(2):  # in the same buffers
        found = run(ZigzagReorder(kernel, num_ranks, workspace), arrived, mask)
        allocations = workspace.num_allocations
        assert torch.equal(found.pop("lse"), expected["lse"])
        for name, x in found.items():
            assert torch.equal(x, as_they_arrive(expected[name], num_ranks)), name
    run(ZigzagReorder(kernel, num_ranks, workspace), arrived, mask)
    assert workspace.num_allocations == allocations


def run(kernel, tensors, mask):
    *qkv, d_out = tensors.values()
    x, out = Qkv(*qkv), torch.empty_like(qkv[0])
    lse = kernel.forward(x, out=out, mask=mask)
    into = QkvGrads(*map(torch.empty_like, x))
    kernel.backward(d_out, x, Attended(out, lse), into=into, mask=mask)
    return {"out": out, "lse": lse} | into._asdict()
