import pytest

from megatron_untied.config.data import Blend, check_split, parse_blend


@pytest.mark.parametrize(
    ("words", "prefixes", "weights"),
    [
        (["a"], ("a",), None),
        (["a", "b"], ("a", "b"), None),
        (["a", "b", "c"], ("a", "b", "c"), None),
        (["0.3", "a", "7e-1", "b"], ("a", "b"), (0.3, 0.7)),
        (["30", "a", "70", "b"], ("a", "b"), (30.0, 70.0)),
        (["1", "a"], ("a",), None),
    ],
)
def test_reads_prefixes_with_and_without_weights(words, prefixes, weights):
    assert parse_blend(tuple(words)) == Blend(prefixes=prefixes, weights=weights)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["0.x", "a", "0.7", "b"], "'0.x' stands where a weight is expected"),
        (["0.3", "a", "b"], "'b' stands where a weight is expected"),
        (["0", "a", "1", "b"], "'0' stands where a weight is expected"),
        (["nan", "a", "1", "b"], "'nan' stands where a weight is expected"),
        (["inf", "a", "1", "b"], "'inf' stands where a weight is expected"),
        (["-1", "a", "1", "b"], "'-1' stands where a weight is expected"),
        (["1", "2", "1", "b"], "'2' stands where a prefix is expected"),
        (["1", "a", "2"], "no prefix follows the last weight, 2"),
    ],
)
def test_rejects_what_does_not_alternate(words, message):
    with pytest.raises(ValueError, match=message):
        parse_blend(tuple(words))


@pytest.mark.parametrize("split", ["100", "98,2", "969, 30, 1", ".5,.5,0", "0,1,0"])
def test_accepts_shares(split):
    check_split(split)


@pytest.mark.parametrize("split", ["", "98,-2", "98;2", "a,b", "1e-3,1", "0,0,0", "1,1,1,1", "nan"])
def test_rejects_what_is_no_split(split):
    with pytest.raises(ValueError, match="is not up to three shares"):
        check_split(split)
