import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_untied.context_parallel.buffer_plan import Sizes
from megatron_untied.context_parallel.head_schedule import head_schedule, legal_heads_per_chunk


@st.composite
def geometries(draw):
    kv_heads = draw(st.integers(1, 8))
    heads = kv_heads * draw(st.integers(1, 8))
    ranks = draw(st.integers(1, 9))
    chunk = draw(st.sampled_from([*legal_heads_per_chunk(heads, ranks), "all"]))
    return heads, kv_heads, ranks, chunk


@given(geometries(), st.booleans())
def test_every_head_once_in_contiguous_runs(geometry, overlap):
    heads, _, ranks, _ = geometry
    schedule = head_schedule(*geometry, overlap=overlap)
    runs = [
        [head for chunk in schedule.chunks for head in chunk[r].query_heads] for r in range(ranks)
    ]
    assert [head for run in runs for head in run] == list(range(heads))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@given(geometries(), st.booleans())
def test_a_rank_holds_the_kv_heads_it_needs_and_loads_none_twice(geometry, overlap):
    heads, kv_heads, ranks, _ = geometry
    ratio = heads // kv_heads
    for assignments in zip(*head_schedule(*geometry, overlap=overlap).chunks, strict=True):
        buffers, unfinished = {}, set()
        for before, now in zip([None, *assignments], assignments, strict=False):
            held = {head for load in buffers.values() for head in load}
            assert not held & set(now.kv_to_load) & set(now.kv_heads)
            if now.kv_to_load:
                # The load arrives while the heads of this chunk, with overlap also those of the
                # chunk before, are in use.
                overwritten = set(buffers.get(now.kv_buffer, ()))
                assert not overwritten & set(now.kv_heads)
                assert not (overlap and before and overwritten & set(before.kv_heads))
                buffers[now.kv_buffer] = now.kv_to_load
            assert set(now.kv_heads) == {head // ratio for head in now.query_heads}
            assert set(now.kv_heads) <= {head for load in buffers.values() for head in load}
            unfinished |= set(now.kv_heads)
            assert set(now.kv_finished) <= unfinished
            unfinished -= set(now.kv_finished)
            assert not before or not set(before.kv_finished) & set(now.kv_heads)
        assert not unfinished


@given(geometries())
def test_kernel_calls_pair_each_query_head_with_its_kv_head(geometry):
    heads, kv_heads, _, _ = geometry
    for chunk in head_schedule(*geometry).chunks:
        for now in chunk:
            pairs = []
            for call in now.kernel_calls:
                query = now.query_heads[call.query_columns]
                share, rest = divmod(len(query), len(call.kv_heads))
                assert rest == 0
                assert set(call.kv_heads) <= set(now.kv_to_load) or len(call.kv_heads) == 1
                pairs += [(q, call.kv_heads[i // share]) for i, q in enumerate(query)]
            assert pairs == [(q, q // (heads // kv_heads)) for q in now.query_heads]


def test_llama3_8b_over_8_ranks_brings_k_and_v_once():
    schedule = head_schedule(32, 8, 8, 8)
    assert [bool(chunk[3].kv_to_load) for chunk in schedule.chunks] == [True, False, False, False]
    assert schedule.chunks[2][3].query_heads == range(14, 15)
    assert schedule.chunks[0][3].kv_to_load == range(3, 4)
    assert not schedule.shares_kv_heads
    sizes = Sizes(schedule=schedule, rank=3, n=1, b=1, d=1, dtype=torch.bfloat16)
    assert sizes.sums_kv


def test_one_exchange_is_one_kernel_call():
    schedule = head_schedule(32, 8, 2, "all")
    assert len(schedule.chunks) == 1
    assert [len(now.kernel_calls) for now in schedule.chunks[0]] == [1, 1]


@pytest.mark.parametrize("chunk", [3, 6, 40, 0])
def test_rejects_a_chunk_size_and_lists_the_legal_ones(chunk):
    with pytest.raises(ValueError, match=r"use one of 8, 16, 24, 32 or all"):
        head_schedule(32, 8, 8, chunk)


def test_rejects_kv_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="num-query-groups a divisor of 32"):
        head_schedule(32, 5, 8)
