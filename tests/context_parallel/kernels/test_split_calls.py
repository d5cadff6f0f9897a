"""How attention is split into calls: integers, at sizes that no test could compute."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_untied.context_parallel.kernels import Mask, Segments
from megatron_untied.context_parallel.kernels.flash_attention import (
    ALL_HEADS_IN_32_BITS,
    FlashAttention3,
)
from megatron_untied.context_parallel.kernels.split_calls import (
    INDEX_LIMIT,
    Limits,
    Shape,
    split_calls,
)

ANY = Limits(dtypes=(torch.float32,))
JOINING = Limits(dtypes=(torch.float32,), joins_segments=True)


def shape(s: int, *, b: int = 1, h: int = 4, g: int = 1, d: int = 128) -> Shape:
    return Shape(num_queries=s, num_keys=s, b=b, h=h, g=g, d=d)


def parts(calls):
    return [(c.samples.start, c.samples.stop, c.kv_heads.start, c.kv_heads.stop) for c in calls]


def test_one_call_where_everything_fits():
    (call,) = split_calls(shape(1000, b=3), Mask(window=7), ANY)
    assert (call.samples, call.heads, call.kv_heads) == (slice(0, 3), slice(0, 4), slice(0, 1))
    assert (call.queries, call.keys) == (slice(0, 1000), slice(0, 1000))
    assert (call.causal, call.window, call.run) == (True, 7, None)


def test_a_kernel_with_64_bit_addresses_is_never_split():
    assert len(split_calls(shape(1 << 24, b=8), Mask(), ANY)) == 1


FIVE_MI = 5 << 20


def test_flash_attention_3_takes_all_heads_but_one_sample_at_a_time():
    limits = FlashAttention3.limits
    assert len(split_calls(shape(FIVE_MI, h=32, g=8), Mask(), limits)) == 1
    assert parts(split_calls(shape(FIVE_MI, b=2, h=32, g=8), Mask(), limits)) == [
        (0, 1, 0, 8),
        (1, 2, 0, 8),
    ]


def test_torch_flash_takes_as_many_heads_as_it_can_count():
    # 5 Mi x 128 x 2 heads are 1.34e9 elements; 4 heads would be above 2^31.
    calls = split_calls(shape(FIVE_MI, b=2, h=6, g=3), Mask(), ALL_HEADS_IN_32_BITS)
    assert parts(calls) == [(i, i + 1, j, j + 1) for i in range(2) for j in range(3)]
    assert [call.heads for call in calls[:3]] == [slice(0, 2), slice(2, 4), slice(4, 6)]
    assert parts(split_calls(shape(FIVE_MI // 2, h=6, g=3), Mask(), ALL_HEADS_IN_32_BITS)) == [
        (0, 1, 0, 3),
    ]


def test_the_boundary_counts_padding():
    fits = INDEX_LIMIT // 128 - 128 - 1  # one block of padding
    limits = FlashAttention3.limits
    assert len(split_calls(shape(fits), Mask(), limits)) == 1
    with pytest.raises(ValueError, match=r"give more ring ranks"):
        split_calls(shape(fits + 1), Mask(), limits)
    with pytest.raises(ValueError, match=r"kernel's limit is 2147483648"):
        split_calls(shape(fits, d=136), Mask(), limits)  # padded to 192 inside


def test_heads_of_one_key_value_head_stay_together():
    message = r"5243008 rows x 128 channels x 4 heads .* fewer --cp-heads-per-chunk or more ring"
    with pytest.raises(ValueError, match=message):
        split_calls(shape(FIVE_MI), Mask(), ALL_HEADS_IN_32_BITS)


@st.composite
def segments(draw):
    sides = st.lists(st.integers(0, 5), min_size=1, max_size=8)
    queries = draw(sides)
    keys = draw(st.lists(st.integers(0, 5), min_size=len(queries), max_size=len(queries)))
    bounds = [tuple(torch.tensor([0, *side]).cumsum(0).tolist()) for side in (queries, keys)]
    return Segments(queries=bounds[0], keys=bounds[1])


@given(segments())
def test_runs_are_the_segments_with_both_sides(segments):
    both = zip(pairwise(segments.queries), pairwise(segments.keys), strict=True)
    expected = [(q, k) for q, k in both if q[0] < q[1] and k[0] < k[1]]
    assert [(run.queries, run.keys) for run in segments.singles] == expected
    in_runs = [
        (run.queries[i : i + 2], run.keys[i : i + 2])
        for run in segments.runs
        for i in range(len(run.queries) - 1)
    ]
    assert in_runs == expected
    for run, following in pairwise(segments.runs):
        ends = run.queries[-1], run.keys[-1]
        assert ends != (following.queries[0], following.keys[0]), "should have been joined"


def test_a_sample_without_gaps_is_one_call_of_a_joining_kernel():
    segments = Segments.of((0, 3, 4, 9))
    (call,) = split_calls(shape(9), Mask(segments=(segments,)), JOINING)
    assert call.run.queries == (0, 3, 4, 9)
    assert call.run.longest == (5, 5)
    assert len(split_calls(shape(9), Mask(segments=(segments,)), ANY)) == 3


def test_cumulative_lengths_start_at_0_and_are_made_once():
    (_, run) = Segments(queries=(0, 4, 4, 6, 9), keys=(0, 4, 5, 7, 10)).runs
    queries, keys = run.cumulative(torch.device("cpu"))
    assert (queries.tolist(), keys.tolist()) == ([0, 2, 5], [0, 2, 5])
    assert run.cumulative(torch.device("cpu"))[0] is queries


RUNS = st.lists(st.integers(0, 20), min_size=4, max_size=4).map(sorted)


@given(segments(), RUNS, RUNS)
def test_blocks_of_rows_keep_their_documents(segments, rows, columns):
    def inside(bounds, places):
        a, b, c, d = (min(place, bounds[-1]) for place in places)
        return range(a, b), range(c, d)

    def document_of(bounds):
        return torch.bucketize(torch.arange(bounds[-1]), torch.tensor(bounds[1:]), right=True)

    queries, keys = inside(segments.queries, rows), inside(segments.keys, columns)
    block = segments.blocks(queries, keys)
    for found, bounds, runs in (
        (block.queries, segments.queries, queries),
        (block.keys, segments.keys, keys),
    ):
        expected = [document_of(bounds)[run.start : run.stop] for run in runs]
        assert torch.equal(document_of(found), torch.cat(expected))
    assert segments.blocks(queries, keys) is block


def test_rejects_windows_that_mean_nothing():
    with pytest.raises(ValueError, match=r"a window of 0 keys must hold at least 1\."):
        Mask(window=0)
    with pytest.raises(ValueError, match=r"a window of 4 keys needs a causal mask\."):
        Mask(window=4, causal=False)
