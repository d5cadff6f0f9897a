"""The loop over head chunks against plain attention over the whole sequence, in float64."""

import pytest
import torch

from megatron_untied.config import RotaryConfig
from megatron_untied.context_parallel.head_schedule import head_schedule, legal_heads_per_chunk
from megatron_untied.context_parallel.kernels import CpuFlash, Mask, Qkv, Segments
from megatron_untied.context_parallel.self_attention import attention_backward, attention_forward
from megatron_untied.context_parallel.sequence import SequenceLayout
from megatron_untied.context_parallel.ulysses import Attention, UntiedUlysses
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.rope import RotaryTable
from tests.support import plain_attention
from tests.support.ranks import rank_shard, run_on_ranks

D = 8
# Rotary tables are stored in fp32, so q and k carry a relative error of 6e-8 against float64.
TOLERANCE = 2e-7


def packed(s: int) -> Mask:
    """Documents of 1, 3, 4, 1 tokens and the rest in a sample, and a single one in the next."""
    bounds = (*(x for x in (0, 1, 4, 8, 9) if x < s), s)
    return Mask(segments=(Segments.of(bounds), Segments.of((0, s))))


def check_against_reference(group, h, g, n, b, overlap, mask):
    torch.manual_seed(0)
    p = group.size()
    q, k, v, d_out = (torch.randn(p * n, b, heads, D).double() for heads in (h, g, g, h))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask, scale = mask(p * n), D**-0.5
    expected, _ = plain_attention.attention(
        *map(plain_attention.rotate, leaves[:2]), leaves[2], mask, scale
    )
    gradients = torch.autograd.grad(expected, leaves, d_out)

    attention = Attention(CpuFlash(), mask)
    positions = SequenceLayout(num_ulysses=p, rank=group.rank()).positions(n)
    rotary = RotaryTable(RotaryConfig(), D).at(positions)
    workspace = Workspace()
    mine = Qkv(*(rank_shard(x, group) for x in (q, k, v)))
    for chunk in legal_heads_per_chunk(h, p):
        schedule = head_schedule(h, g, p, chunk, overlap=overlap)
        ulysses = UntiedUlysses(schedule, D, group, workspace)
        y = attention_forward(mine, rotary, ulysses, attention)
        got = attention_backward(rank_shard(d_out, group), mine, y, rotary, ulysses, attention)
        for name, x, e in zip(
            ("out", "dq", "dk", "dv"), (y[0], *got), (expected, *gradients), strict=True
        ):
            error = (x - rank_shard(e, group)).abs().max() / e.abs().max()
            assert error < TOLERANCE, f"{name}, chunk {chunk}: {error:.1e}"


def whole(s: int) -> Mask:
    """One document a sample."""
    return Mask()


@pytest.mark.parametrize(("overlap", "mask"), [(False, whole), (True, whole), (True, packed)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "heads", [(8, 8), (8, 2), (8, 1), (6, 2), (28, 4), (12, 3), (5, 5), (3, 1)]
)
def test_every_chunk_size_equals_plain_attention(heads, world_size, overlap, mask):
    check, sizes = check_against_reference, {"n": 5, "b": 2}
    run_on_ranks(check, world_size, *heads, **sizes, overlap=overlap, mask=mask)


def check_rounding_does_not_grow(group):
    """bf16 against float64, where one key-value head meets up to 16 chunks."""
    generator = torch.Generator().manual_seed(0)
    n, p, h, g = 32, group.size(), 32, 1
    shapes = [(p * n, 1, heads, D) for heads in (h, g, g, h)]
    q, k, v, d_out = (torch.randn(x, generator=generator).bfloat16() for x in shapes)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected = plain_attention.causal_attention(*map(plain_attention.rotate, leaves[:2]), leaves[2])
    gradients = torch.autograd.grad(expected, leaves, d_out.double())
    positions = SequenceLayout(num_ulysses=p, rank=group.rank()).positions(n)
    rotary = RotaryTable(RotaryConfig(), D).at(positions)
    attention = Attention(CpuFlash(), Mask())
    mine = Qkv(*(rank_shard(x, group) for x in (q, k, v)))
    errors = []
    for chunk in (p * h // p, 2 * p, p):
        ulysses = UntiedUlysses(head_schedule(h, g, p, chunk), D, group, Workspace())
        y = attention_forward(mine, rotary, ulysses, attention)
        got = attention_backward(rank_shard(d_out, group), mine, y, rotary, ulysses, attention)
        differences = zip(got, gradients, strict=True)
        errors.append([(x - rank_shard(e, group)).square().mean().sqrt() for x, e in differences])
    single, *chunked = errors
    for many in chunked:
        for error, reference_error in zip(many, single, strict=True):
            assert error < 1.1 * reference_error


@pytest.mark.parametrize("world_size", [1, 2])
def test_rounding_of_gradients_does_not_grow_with_the_number_of_chunks(world_size):
    run_on_ranks(check_rounding_does_not_grow, world_size)


def check_buffers_are_reused(group):
    workspace, d = Workspace(), 4
    schedule = head_schedule(8, 2, group.size(), group.size())
    ulysses = UntiedUlysses(schedule, d, group, workspace)
    attention = Attention(CpuFlash(), Mask())
    rotary = RotaryTable(RotaryConfig(), d).at(torch.arange(6))
    allocations = []
    for _ in range(3):
        x = Qkv(*(torch.randn(6, 1, heads, d) for heads in (8, 2, 2)))
        y = attention_forward(x, rotary, ulysses, attention)
        attention_backward(y[0], x, y, rotary, ulysses, attention)
        allocations.append((workspace.num_allocations, workspace.num_bytes))
    assert allocations[0] == allocations[1] == allocations[2]


def test_buffers_are_allocated_once():
    run_on_ranks(check_buffers_are_reused, 2)


def check_models_do_not_disturb_each_other(group):
    attention = Attention(CpuFlash(), Mask())
    rotary = RotaryTable(RotaryConfig(), 4).at(torch.arange(6))
    calls = []
    for h, g in ((8, 2), (6, 6)):
        schedule = head_schedule(h, g, 2, 2, overlap=True)
        ulysses = UntiedUlysses(schedule, 4, group, Workspace())
        x = Qkv(*(torch.randn(6, 1, heads, 4) for heads in (h, g, g)))
        calls.append((x, ulysses))

    def alone(x, ulysses):
        y = attention_forward(x, rotary, ulysses, attention)
        return y[0], attention_backward(y[0], x, y, rotary, ulysses, attention)

    expected = [alone(*call) for call in calls]
    forwards = [attention_forward(x, rotary, ulysses, attention) for x, ulysses in calls]
    for (x, ulysses), y, (e_out, e_grads) in zip(calls, forwards, expected, strict=True):
        grads = attention_backward(y[0], x, y, rotary, ulysses, attention)
        assert torch.equal(y[0], e_out)
        assert all(map(torch.equal, grads, e_grads))


def test_two_models_interleaved_do_not_disturb_each_other():
    run_on_ranks(check_models_do_not_disturb_each_other, 2)
