"""Attention over a ring, alone and behind an exchange of heads, against the whole sequence."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_untied.config import ParallelConfig, RotaryConfig
from megatron_untied.context_parallel.head_schedule import head_schedule, legal_heads_per_chunk
from megatron_untied.context_parallel.kernels import Attended, CpuFlash, Mask, Qkv, Segments
from megatron_untied.context_parallel.ring import Ring, RingAttention, merge, ring_steps
from megatron_untied.context_parallel.self_attention import attention_backward, attention_forward
from megatron_untied.context_parallel.sequence import SequenceLayout, ring_blocks
from megatron_untied.context_parallel.ulysses import UntiedUlysses
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.rope import RotaryTable
from tests.support import plain_attention
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import batch, make_model, parallel_groups, tiny

D = 4
SCALE = 0.4
# Rotary tables are stored in fp32, so q and k carry a relative error of 6e-8 against float64.
TOLERANCE = 3e-7


@pytest.mark.parametrize("num_ring", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("block_size", [1, 3])
def test_steps_see_every_causal_pair_once(num_ring, block_size):
    s = 2 * num_ring * block_size
    seen = torch.zeros(s, s, dtype=torch.int)
    for rank in range(num_ring):
        rows = tokens_of(rank, num_ring, block_size)
        for step in ring_steps(rank, num_ring, block_size):
            queries = rows[step.queries]
            keys = tokens_of(step.owner, num_ring, block_size)[step.keys]
            pairs = torch.ones(len(queries), len(keys), dtype=torch.int)
            seen[queries[:, None], keys] += pairs.tril() if step.index == 0 else pairs
    assert torch.equal(seen, torch.ones_like(seen).tril())


@pytest.mark.parametrize("num_ring", [2, 3, 4, 7])
def test_ranks_work_alike_and_agree_who_sends_what(num_ring):
    steps = [ring_steps(rank, num_ring, block_size=3) for rank in range(num_ring)]
    for rank, own in enumerate(steps):
        for step in own[1:]:
            assert length(step.queries) * length(step.keys) == 2 * 3 * 3
            assert steps[step.reader][step.index].owner == rank
            assert steps[step.reader][step.index].keys == step.lent


def tokens_of(rank: int, num_ring: int, block_size: int) -> torch.Tensor:
    blocks = ring_blocks(rank, num_ring, block_size=block_size)
    return torch.cat([torch.arange(x.start, x.stop) for x in blocks])


def length(rows: slice) -> int:
    return rows.stop - rows.start


def test_merged_parts_are_softmax_over_all_keys():
    torch.manual_seed(0)
    # Scores in the hundreds, where an exponential alone would overflow; fp32 as in training.
    scores, v = 300 * torch.randn(2, 3, 5, 12), torch.randn(2, 3, 12, D)
    scores[..., 1, 4:8] = -torch.inf  # a query that sees nothing of the second part
    out, lse = torch.zeros(5, 2, 3, D), torch.full((2, 3, 5), -torch.inf)
    for keys in (slice(0, 4), slice(4, 8), slice(8, 12)):
        part_lse = scores[..., keys].logsumexp(-1)
        weights = (scores[..., keys] - part_lse[..., None]).exp().nan_to_num()
        merge(out, lse, (weights @ v[..., keys, :]).permute(2, 0, 1, 3), part_lse)
    expected = (scores.double().softmax(-1) @ v.double()).permute(2, 0, 1, 3)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), scores.double().logsumexp(-1))


class Case:
    """q, k, v and d_out [s, b, heads, d] of a whole sequence, and what attention makes of them."""

    names = "out", "dq", "dk", "dv"

    def __init__(self, h, g, s, *, packed=False, dtype=torch.float64, rotated=True, b=2):
        torch.manual_seed(h * g)
        q, k, v, d_out = (torch.randn(s, b, heads, D).to(dtype) for heads in (h, g, g, h))
        self.inputs, self.d_out = (q, k, v), d_out
        self.mask = Mask(segments=documents(s) if packed else None, scale=SCALE)
        leaves = [x.double().clone().requires_grad_() for x in self.inputs]
        rotate = plain_attention.rotate if rotated else torch.clone
        out, _ = plain_attention.attention(*map(rotate, leaves[:2]), leaves[2], self.mask, SCALE)
        self.expected = [out.detach(), *torch.autograd.grad(out, leaves, d_out.double())]

    def shard(self, layout) -> Qkv:
        """q, k, v of this rank's tokens."""
        return Qkv(*(layout.shard(x, dim=0) for x in self.inputs))


def documents(s: int) -> tuple[Segments, Segments]:
    """Lengths 1, 3, 17, the rest; and one across every boundary between two equal shards."""
    others = sorted({0, *(x for x in range(1, s, 5)), s})
    return Segments.of([min(x, s) for x in (0, 1, 4, 21, s)]), Segments.of(others)


def groups_of(group, num_ulysses):
    """Ulysses group and ring group of this rank; every rank makes all of them."""
    ranks = torch.arange(group.size()).view(-1, num_ulysses)
    made = [[dist.new_group(part.tolist()) for part in side] for side in (ranks, ranks.T)]
    ring_rank, ulysses_rank = divmod(group.rank(), num_ulysses)
    return made[0][ring_rank], made[1][ulysses_rank]


def run_chunks(case, ulysses, attention, layout):
    """Output and gradients of this rank's tokens."""
    x = case.shard(layout)
    rotary = RotaryTable(RotaryConfig(), D).at(layout.positions(len(x.q)))
    y = attention_forward(x, rotary, ulysses, attention)
    d_out = layout.shard(case.d_out, dim=0)
    return y[0], *attention_backward(d_out, x, y, rotary, ulysses, attention)


def relative_errors(case, results, layout):
    expected = (layout.shard(e, dim=0) for e in case.expected)
    return {
        name: ((x - mine).abs().max() / whole.abs().max()).item()
        for name, x, mine, whole in zip(case.names, results, expected, case.expected, strict=True)
    }


def check_every_chunk_size(group, num_ulysses, geometries, block_size=3):
    ulysses_group, ring = groups_of(group, num_ulysses)
    ring, workspace = Ring(ring), Workspace()
    layout = SequenceLayout(num_ulysses=num_ulysses, num_ring=ring.size, rank=group.rank())
    for h, g in geometries:
        for packed in (False, True):
            case = Case(h, g, 2 * group.size() * block_size, packed=packed)
            for chunk in legal_heads_per_chunk(h, num_ulysses):
                overlap = chunk != h or packed  # of all heads only exchanges of the ring could
                attention = RingAttention(CpuFlash(), case.mask, ring, workspace, overlap=overlap)
                schedule = head_schedule(
                    h, g, num_ulysses, chunk, overlap=overlap and num_ulysses > 1
                )
                ulysses = UntiedUlysses(schedule, D, ulysses_group, workspace)
                results = run_chunks(case, ulysses, attention, layout)
                for name, error in relative_errors(case, results, layout).items():
                    assert error < TOLERANCE, f"{name} of {h}/{g}, chunk {chunk}, {packed}: {error}"


CONFIG = tiny(num_query_groups=2)  # fewer than ranks
GEOMETRIES = ((8, 8), (8, 2), (8, 1), (6, 2), (28, 4), (12, 3), (5, 5))


@pytest.mark.parametrize(
    ("num_ulysses", "num_ring"), [(1, 2), (1, 3), (1, 4), (2, 2)], ids=lambda n: str(n)
)
def test_every_chunk_size_equals_plain_attention(num_ulysses, num_ring):
    run_on_ranks(check_every_chunk_size, num_ulysses * num_ring, num_ulysses, GEOMETRIES)


def ring_results(case, ring, layout, workspace, *, overlap=True):
    """One call of ring attention on this rank's blocks, without any exchange of heads."""
    attention = RingAttention(CpuFlash(), case.mask, ring, workspace, overlap=overlap)
    x = case.shard(layout)
    out, dq = torch.empty_like(x.q), torch.empty_like(x.q)
    lse = attention.forward(x, out=out)
    dkv = Accumulator(x.k)
    d_out = layout.shard(case.d_out, dim=0)
    attention.backward(d_out, x, Attended(out, lse), dq=dq, dkv=dkv)
    return out, dq, *dkv.sums


class Accumulator:
    """A KvAccumulator in plain tensors, with sums in at least fp32."""

    def __init__(self, like):
        wide = torch.promote_types(like.dtype, torch.float32)
        self.sums = [torch.zeros_like(like, dtype=wide) for _ in range(2)]
        self.made = [[torch.empty_like(like) for _ in range(2)] for _ in range(2)]

    def scratch(self, which=0):
        return self.made[which]

    def add(self, dk, dv, *, rows=None):
        for total, part in zip(self.sums, (dk, dv), strict=True):
            total[rows or slice(None)].add_(part)


class LateRing(Ring):
    """Nothing moves before it is waited for: what is overwritten too early is sent wrong."""

    def trade(self, send, to, receive, source):
        for x in receive:
            x.fill_(torch.nan)
        return [LateWork(lambda: super(LateRing, self).trade(send, to, receive, source))]


class LateWork:
    def __init__(self, start):
        self.start = start

    def wait(self):
        for work in self.start():
            work.wait()


class EarlyRing(Ring):
    """All has arrived before anything else is done: what is still read there is overwritten."""

    def trade(self, send, to, receive, source):
        for work in super().trade(send, to, receive, source):
            work.wait()
        return []


def check_timing(group):
    layout = SequenceLayout(num_ulysses=1, num_ring=group.size(), rank=group.rank())
    case = Case(4, 2, 2 * group.size() * 3, packed=True)
    usual, *others = (
        ring_results(case, kind(group), layout, Workspace(), overlap=overlap)
        for overlap in (True, False)
        for kind in (Ring, LateRing, EarlyRing)
    )
    assert all(all(map(torch.equal, usual, other)) for other in others)


@pytest.mark.parametrize("num_ring", [2, 3, 4])
def test_blocks_may_arrive_as_early_and_as_late_as_can_be(num_ring):
    run_on_ranks(check_timing, num_ring)


def ring_error(group, num_ring, dtype):
    """Sums of squared errors and of squares, by result, over this rank's tokens."""
    members = dist.new_group(list(range(num_ring)))
    if group.rank() >= num_ring:
        return None
    layout = SequenceLayout(num_ulysses=1, num_ring=num_ring, rank=group.rank())
    if num_ring == 1:  # one block after the other is the sequence
        layout = SequenceLayout(num_ulysses=1)
    case = Case(4, 2, 96, dtype=dtype, rotated=False, b=1)
    results = ring_results(case, Ring(members), layout, Workspace())
    expected = (layout.shard(e, dim=0) for e in case.expected)
    return [
        ((x - e).square().sum().item(), e.square().sum().item())
        for x, e in zip(results, expected, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_does_not_grow_with_the_ring(dtype):
    errors = {}
    for num_ring in (1, 2, 4):
        parts = [x for x in run_on_ranks(ring_error, 4, num_ring, dtype) if x is not None]
        sums = torch.tensor(parts).sum(0)
        errors[num_ring] = (sums[:, 0] / sums[:, 1]).sqrt()
    # A part of out is rounded to the dtype, and so is the sum: up to 1.2 times in bf16.
    assert (errors[2] < 1.3 * errors[1]).all(), errors
    assert (errors[4] < 1.3 * errors[1]).all(), errors


def check_buffers_and_traffic(group, overlap):
    """In bytes of q and of k in bf16; v is as large as k."""
    r, workspace, ring = group.size(), Workspace(), Ring(group)
    layout = SequenceLayout(num_ulysses=1, num_ring=r, rank=group.rank())
    case = Case(4, 2, 2 * r * 6, dtype=torch.bfloat16)
    x = case.shard(layout)
    attention = RingAttention(CpuFlash(), case.mask, ring, workspace, overlap=overlap)
    out, d_out = torch.empty_like(x.q), torch.ones_like(x.q)
    y = Attended(out, attention.forward(x, out=out))
    sent = ring.counter.sent_bytes
    before = workspace.num_allocations, workspace.num_bytes
    assert before[1] == 2 * size(x.q) + overlap * min(r - 1, 3) * 2 * size(x.k)
    if r == 2:  # its backward has no fp32 sum
        workspace.held["ring_total"].fill_(torch.nan)
    attention.backward(d_out, x, y, dq=torch.empty_like(x.q), dkv=Accumulator(x.k))
    assert (workspace.num_allocations, workspace.num_bytes) == before
    total = torch.tensor([sent, ring.counter.sent_bytes - sent])
    dist.all_reduce(total, group=group)
    relayed = r * (r - 1) * 2 * size(x.k)
    assert total.tolist() == [relayed * 3 // 4, 2 * relayed * 3 // 4]


def size(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_ring", [2, 3, 4])
def test_buffers_and_traffic_are_as_documented(num_ring, overlap):
    run_on_ranks(check_buffers_and_traffic, num_ring, overlap)


def check_two_parts_of_dq(group):
    """In bf16: the sum of both parts, rounded once, as with fp32 memory for it."""
    layout = SequenceLayout(num_ulysses=1, num_ring=2, rank=group.rank())
    case = Case(4, 2, 24, dtype=torch.bfloat16, packed=True)
    parts, kernel = [], CpuFlash()

    def backward(d_out, x, y, *, into, mask):
        CpuFlash.backward(kernel, d_out, x, y, into=into, mask=mask)
        parts.append(into.dq.float())

    attention = RingAttention(mock.Mock(wraps=kernel, backward=backward), case.mask, Ring(group),
                              Workspace())  # fmt: skip
    x, d_out = case.shard(layout), layout.shard(case.d_out, dim=0).clone()
    out, dq = torch.empty_like(x.q), torch.empty_like(x.q)
    lse = attention.forward(x, out=out)
    attention.backward(d_out, x, Attended(out, lse), dq=dq, dkv=Accumulator(x.k))
    total, second = parts
    total[len(total) - len(second) :] += second  # all rows, or the late ones
    assert torch.equal(dq, total.bfloat16())


def test_two_parts_of_dq_are_summed_as_in_fp32():
    run_on_ranks(check_two_parts_of_dq, 2)


def loss_and_gradients(parallel, groups, data):
    model = make_model(CONFIG, parallel, groups=groups)
    layout = SequenceLayout.of(parallel, rank=groups.cp.rank())
    loss = model(**{name: layout.shard(x) for name, x in data.items()})
    loss.backward()
    return loss, *(p.grad for p in model.parameters())


def check_one_level_is_the_pure_form(group):
    data = batch(CONFIG, s=24, b=2)
    for comm_type, sizes in (("a2a", (4, 1)), ("p2p", (1, 4))):
        pure = ParallelConfig(context_parallel_size=4, cp_comm_type=comm_type)
        hybrid = replace(pure, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=sizes)
        groups = parallel_groups(hybrid)
        results = (loss_and_gradients(each, groups, data) for each in (pure, hybrid))
        assert all(map(torch.equal, *results))


def test_a_hierarchy_of_one_level_is_the_pure_form_bit_for_bit():
    run_on_ranks(check_one_level_is_the_pure_form, 4)


@pytest.mark.parametrize(
    ("parallel", "num_ulysses", "num_ring"),
    [
        (ParallelConfig(context_parallel_size=4), 4, 1),
        (ParallelConfig(context_parallel_size=4, cp_comm_type="p2p"), 1, 4),
        (
            ParallelConfig(
                context_parallel_size=8,
                cp_comm_type="a2a+p2p",
                hierarchical_context_parallel_sizes=(4, 2),
            ),
            4,
            2,
        ),
    ],
)
def test_layout_of_each_comm_type(parallel, num_ulysses, num_ring):
    layout = SequenceLayout.of(parallel, rank=3)
    assert layout == SequenceLayout(num_ulysses=num_ulysses, num_ring=num_ring, rank=3)


def test_ulysses_ranks_share_the_two_blocks_of_their_ring_rank():
    shards = [
        SequenceLayout(num_ulysses=2, num_ring=2, rank=rank).shard(torch.arange(16)).tolist()
        for rank in range(4)
    ]
    assert shards == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_sequence_that_does_not_divide_is_refused():
    layout = SequenceLayout(num_ulysses=2, num_ring=2)
    with pytest.raises(ValueError, match="over 4 context-parallel ranks; make .* multiple of 8"):
        layout.shard(torch.arange(12))
