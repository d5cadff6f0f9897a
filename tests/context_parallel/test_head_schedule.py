import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    runs = [[head for chunk in schedule.chunks for head in chunk[r].query] for r in range(ranks)]
    assert [head for run in runs for head in run] == list(range(heads))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@given(geometries(), st.booleans())
def test_a_rank_holds_the_kv_heads_it_needs_and_loads_none_twice(geometry, overlap):
    heads, kv_heads, ranks, _ = geometry
    ratio = heads // kv_heads
    for turns in zip(*head_schedule(*geometry, overlap=overlap).chunks, strict=True):
        buffers, unfinished = {}, set()
        for before, turn in zip([None, *turns], turns, strict=False):
            held = {head for load in buffers.values() for head in load}
            assert not held & set(turn.load) & set(turn.kv)
            if turn.load:
                # The load arrives while the heads of this turn, with overlap also those of the
                # turn before, are in use.
                overwritten = set(buffers.get(turn.buffer, ()))
                assert not overwritten & set(turn.kv)
                assert not (overlap and before and overwritten & set(before.kv))
                buffers[turn.buffer] = turn.load
            assert set(turn.kv) == {head // ratio for head in turn.query}
            assert set(turn.kv) <= {head for load in buffers.values() for head in load}
            unfinished |= set(turn.kv)
            assert set(turn.done) <= unfinished
            unfinished -= set(turn.done)
            assert not before or not set(before.done) & set(turn.kv)
        assert not unfinished


@given(geometries())
def test_pieces_pair_each_query_head_with_its_kv_head(geometry):
    heads, kv_heads, _, _ = geometry
    for chunk in head_schedule(*geometry).chunks:
        for turn in chunk:
            pairs = []
            for piece in turn.pieces:
                query = turn.query[piece.query_columns]
                share, rest = divmod(len(query), len(piece.kv))
                assert rest == 0
                assert set(piece.kv) <= set(turn.load) or len(piece.kv) == 1
                pairs += [(q, piece.kv[i // share]) for i, q in enumerate(query)]
            assert pairs == [(q, q // (heads // kv_heads)) for q in turn.query]


def test_llama3_8b_over_8_ranks_brings_k_and_v_once():
    schedule = head_schedule(32, 8, 8, 8)
    assert [bool(chunk[3].load) for chunk in schedule.chunks] == [True, False, False, False]
    assert schedule.chunks[2][3].query == range(14, 15)
    assert schedule.chunks[0][3].load == range(3, 4)
    assert not schedule.shares_kv_heads
    assert schedule.kv_heads_in_many_chunks(3)


def test_one_exchange_is_one_kernel_call():
    schedule = head_schedule(32, 8, 2, "all")
    assert len(schedule.chunks) == 1
    assert [len(turn.pieces) for turn in schedule.chunks[0]] == [1, 1]


@pytest.mark.parametrize("chunk", [3, 6, 40, 0])
def test_rejects_a_chunk_size_and_lists_the_legal_ones(chunk):
    with pytest.raises(ValueError, match=r"use one of 8, 16, 24, 32 or all"):
        head_schedule(32, 8, 8, chunk)


def test_rejects_kv_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="num-query-groups a divisor of 32"):
        head_schedule(32, 5, 8)
