"""Plans of buffers: the workspace of a real call holds what they say, to the byte."""

import pytest
import torch

from megatron_untied.config import RotaryConfig
from megatron_untied.context_parallel.buffer_plan import (
    BackwardBuffers,
    ForwardBuffers,
    Sizes,
    Staging,
    buffers_of,
    head_chunks_buffer,
    ring_buffers,
)
from megatron_untied.context_parallel.head_schedule import head_schedule, legal_heads_per_chunk
from megatron_untied.context_parallel.kernels import CpuFlash, Mask, Qkv
from megatron_untied.context_parallel.ring import Ring, RingAttention
from megatron_untied.context_parallel.self_attention import attention_backward, attention_forward
from megatron_untied.context_parallel.sequence import SequenceLayout
from megatron_untied.context_parallel.ulysses import Attention, UntiedUlysses
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.rope import RotaryTable
from tests.context_parallel.test_ring import groups_of
from tests.support.ranks import run_on_ranks

HEADS = ((8, 8), (8, 2), (28, 4), (12, 3), (3, 1))
N, B, D = 6, 2, 4


def planned_bytes(sizes: Sizes) -> int:
    """Of a forward and a backward in the plain layer."""
    buffers = [
        *buffers_of(ForwardBuffers.plan(sizes)),
        *buffers_of(BackwardBuffers.plan(sizes)),
        *ring_buffers(sizes),
        *(head_chunks_buffer(name, sizes) for name in ("out", "d_out")),
    ]
    largest = {}
    for each in buffers:
        largest[each.memory] = max(largest.get(each.memory, 0), each.num_bytes)
    return sum(largest.values())


def check_workspace(group, num_ulysses, dtype):
    ulysses_group, ring_group = groups_of(group, num_ulysses)
    num_ring = ring_group.size()
    layout = SequenceLayout(num_ulysses=num_ulysses, num_ring=num_ring, rank=group.rank())
    rotary = RotaryTable(RotaryConfig(), D).at(layout.positions(N))
    for h, g in HEADS:
        x = Qkv(*(torch.randn(N, B, heads, D).to(dtype) for heads in (h, g, g)))
        for chunk in legal_heads_per_chunk(h, num_ulysses):
            for overlap in (False, True):
                workspace = Workspace()
                attention = Attention(CpuFlash(), Mask())
                if num_ring > 1:
                    ring = Ring(ring_group)
                    attention = RingAttention(CpuFlash(), Mask(), ring, workspace, overlap=overlap)
                schedule = head_schedule(h, g, num_ulysses, chunk, overlap=overlap)
                ulysses = UntiedUlysses(schedule, D, ulysses_group, workspace)
                y = attention_forward(x, rotary, ulysses, attention)
                attention_backward(y[0], x, y, rotary, ulysses, attention)
                rank = ulysses_group.rank()
                sizes = Sizes(
                    schedule=schedule, rank=rank, n=N, b=B, d=D, dtype=dtype, num_ring=num_ring,
                    ring_overlap=overlap,
                )  # fmt: skip
                case = h, g, chunk, overlap
                assert workspace.num_bytes == planned_bytes(sizes), case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_ulysses", "num_ring"), [(1, 1), (2, 1), (3, 1), (1, 3), (2, 2)])
def test_the_workspace_holds_what_is_planned(num_ulysses, num_ring, dtype):
    run_on_ranks(check_workspace, num_ulysses * num_ring, num_ulysses, dtype)


@pytest.mark.parametrize("num_ring", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_shared_memory_has_a_reason_and_one_dtype(heads, overlap, num_ring):
    schedule = head_schedule(*heads, 2, 2, overlap=overlap)
    sizes = Sizes(schedule=schedule, rank=0, n=N, b=B, d=D, dtype=torch.bfloat16, num_ring=num_ring)
    plans = (
        ForwardBuffers.plan(sizes),
        BackwardBuffers.plan(sizes),
        Staging.plan("out", sizes, 3),
        Staging.plan("d_out", sizes, 3),
    )
    dtypes = {}
    for each in (buffer for plan in plans for buffer in buffers_of(plan)):
        assert (each.name == each.memory) == (not each.because), each
        assert dtypes.setdefault(each.memory, each.dtype) == each.dtype, each


def test_one_rank_projects_and_attends_in_place():
    schedule = head_schedule(8, 2, 1, 2)
    sizes = Sizes(schedule=schedule, rank=0, n=N, b=B, d=D, dtype=torch.float32)
    names = {each.name for each in buffers_of(ForwardBuffers.plan(sizes))}
    assert names == {"q", "k0", "v0"}


def test_with_overlap_nothing_is_lent_but_to_gradients_on_their_way_home():
    schedule = head_schedule(32, 8, 8, 8, overlap=True)
    sizes = Sizes(schedule=schedule, rank=0, n=N, b=B, d=D, dtype=torch.bfloat16)
    plans = ForwardBuffers.plan(sizes), BackwardBuffers.plan(sizes), Staging.plan("d_out", sizes, 3)
    lent = {each.name for each in buffers_of(plans) if each.because}
    assert lent == {"packed_dk", "packed_dv", "kv_home"}
