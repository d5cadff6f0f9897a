import collections

import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron_untied.config.data import DataConfig
from megatron_untied.data.datasets import build_datasets
from megatron_untied.data.tokenizers import build_tokenizer
from tests.support.corpus import random_documents, write_token_files
from tests.support.ranks import run_on_ranks

SEQ_LENGTH = 37
TOKENIZER = build_tokenizer("NullTokenizer", vocab_size=100)


def build(*data_path, num_samples=(20, 0, 0), seq_length=SEQ_LENGTH, seed=1, lengths=(), **fields):
    """``lengths``: further arguments of a run with several sequence lengths."""
    data = DataConfig(tokenizer_type="NullTokenizer", vocab_size=100, data_path=data_path, **fields)
    return build_datasets(
        data,
        TOKENIZER,
        seq_length=seq_length,
        num_samples=num_samples,
        seed=seed,
        **dict(lengths),
    )


@pytest.fixture
def prefix(tmp_path):
    documents = random_documents(60, vocab_size=100, eod=TOKENIZER.eod)
    return write_token_files(tmp_path / "data", documents)


def equal(sample, other):
    return sample.keys() == other.keys() and all(torch.equal(sample[k], other[k]) for k in sample)


@pytest.mark.parametrize("eod_mask_loss", [False, True])
@pytest.mark.parametrize("reset_position_ids", [False, True])
def test_samples_are_megatron_cores(prefix, reset_position_ids, eod_mask_loss):
    flags = {"reset_position_ids": reset_position_ids, "eod_mask_loss": eod_mask_loss}
    ours = build(prefix, split="80,20", num_samples=(20, 5, 0), **flags)  # of one epoch
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQ_LENGTH,
        blend=([prefix], None),
        split="80,20",
        tokenizer=TOKENIZER,
        reset_attention_mask=False,
        create_attention_mask=False,
        **flags,
    )
    stock = BlendedMegatronDatasetBuilder(GPTDataset, [20, 5, 0], lambda: True, config).build()
    for dataset, reference in ((ours.train, stock[0]), (ours.valid, stock[1])):
        assert len(dataset) == len(reference) > 0
        for index in range(len(dataset)):
            expected = dict(reference[index])
            expected["positions"] = expected.pop("position_ids")
            assert equal(dataset[index], expected)
    assert ours.test is None


def test_labels_positions_and_loss_mask_by_hand(tmp_path):
    prefix = write_token_files(tmp_path / "data", [[1, 2, 100, 100, 3, 4, 5, 100, *range(40)]])
    flags = {"reset_position_ids": True, "document_boundaries": "eod", "eod_mask_loss": True}
    sample = build(prefix, split="1", num_samples=(1, 0, 0), **flags).train[0]
    assert sample["tokens"][:9].tolist() == [1, 2, 100, 100, 3, 4, 5, 100, 0]
    assert sample["labels"][:9].tolist() == [2, 100, 100, 3, 4, 5, 100, 0, 1]
    assert sample["positions"][:10].tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 0, 1]
    # Masked where the input, not the label, is the end of document: as Megatron does.
    assert sample["loss_mask"][:9].tolist() == [1, 1, 0, 0, 1, 1, 1, 0, 1]
    assert [tensor.dtype for tensor in sample.values()] == 2 * [torch.int64] + [
        torch.float32,
        torch.int64,
    ]
    assert all(tensor.shape == (SEQ_LENGTH,) for tensor in sample.values())


def test_the_seed_decides_the_order(prefix):
    first, again, other = (build(prefix, seed=seed).train for seed in (1, 1, 2))
    assert all(equal(first[i], again[i]) for i in range(20))
    assert not all(equal(first[i], other[i]) for i in range(20))


def test_splits_share_no_document(tmp_path):
    # Document i consists of the token i alone, so that a sample shows what it is made of.
    prefix = write_token_files(tmp_path / "data", [[i] * 25 for i in range(100)])
    datasets = build(prefix, split="80,15,5", num_samples=(100, 10, 3))
    seen = [
        {token for i in range(len(split)) for token in split[i]["tokens"].tolist()}
        for split in (datasets.train, datasets.valid, datasets.test)
    ]
    assert max(seen[0]) < 80 <= min(seen[1]) <= max(seen[1]) < 95 <= min(seen[2])


def token_shares(dataset, num_samples):
    counts = collections.Counter(
        token for i in range(num_samples) for token in dataset[i]["tokens"].tolist()
    )
    return {token: count / counts.total() for token, count in counts.items()}


def test_blend_mixes_by_weight(tmp_path):
    ones = write_token_files(tmp_path / "ones", [[1] * 50] * 20)
    twos = write_token_files(tmp_path / "twos", [[2] * 50] * 100)
    train = build("3", ones, "1", twos, split="1", num_samples=(80, 0, 0)).train
    assert token_shares(train, 80) == {1: 0.75, 2: 0.25}


def test_blend_without_weights_mixes_by_length_and_reads_once(tmp_path):
    ones = write_token_files(tmp_path / "ones", [[1] * SEQ_LENGTH] * 31)
    twos = write_token_files(tmp_path / "twos", [[2] * SEQ_LENGTH] * 11)
    train = build(ones, twos, split="1", num_samples=(40, 0, 0)).train
    assert len(train) == 40
    assert token_shares(train, 40) == {1: 0.75, 2: 0.25}
    with pytest.raises(ValueError, match="is read once: 40 train samples, the run needs 41"):
        build(ones, twos, split="1", num_samples=(41, 0, 0))


def test_mock_data_is_the_same_every_time(caplog):
    first, again = (
        build(mock_data=True, num_samples=(20, 4, 0), reset_position_ids=True) for _ in range(2)
    )
    for one, other in ((first.train, again.train), (first.valid, again.valid)):
        assert all(equal(one[i], other[i]) for i in range(4))
    assert first.test is None
    assert max(first.train[i]["tokens"].max() for i in range(20)) <= TOKENIZER.eod
    assert not caplog.records


@pytest.mark.parametrize("cache", [None, "cache"])
def test_cached_indices_do_not_outlive_the_token_files(tmp_path, prefix, cache):
    cache = cache and str(tmp_path / cache)
    build(prefix, split="1", data_cache_path=cache)
    write_token_files(prefix, [[7] * 300])
    train = build(prefix, split="1", data_cache_path=cache).train
    assert train[0]["tokens"].unique().tolist() == [7]


@pytest.mark.parametrize(
    ("split", "num_samples", "message"),
    [
        ("1,0,0", (1, 1, 0), "--split 1,0,0 leaves valid 0 of 60 documents, 0 tokens"),
        ("99.9,0.1", (1, 1, 0), "--split 99.9,0.1 leaves valid 0 of 60 documents, 0 tokens"),
        ("98,1,1", (1, 0, 1), r"leaves test 1 of 60 documents, \d+ tokens; one sample takes 38"),
    ],
)
def test_rejects_a_split_without_one_sample(prefix, split, num_samples, message):
    with pytest.raises(ValueError, match=message):
        build(prefix, split=split, num_samples=num_samples)


def test_allows_an_empty_split_of_which_no_samples_are_asked(prefix):
    datasets = build(prefix, split="99.9,0.1", num_samples=(5, 0, 0))
    assert (datasets.valid, datasets.test) == (None, None)


def test_rejects_a_bad_split_and_a_bad_blend(prefix):
    with pytest.raises(ValueError, match="--split '98;2' is not"):
        build(prefix, split="98;2")
    with pytest.raises(ValueError, match="'0.x' stands where a weight"):
        build("0.x", prefix, "1", prefix)


def check_every_rank_raises(group, data, error, message):
    with pytest.raises(error, match=message):
        build_datasets(data, TOKENIZER, seq_length=8, num_samples=(1, 0, 0), seed=0)


def test_bad_input_is_an_error_on_every_rank(tmp_path, prefix):
    def data(*data_path):
        return DataConfig(tokenizer_type="NullTokenizer", vocab_size=100, data_path=data_path)

    absent = str(tmp_path / "absent")
    run_on_ranks(check_every_rank_raises, 2, data(absent), FileNotFoundError, "there is no")
    with open(prefix + ".bin", "ab") as file:
        file.write(b"x")
    run_on_ranks(check_every_rank_raises, 2, data(prefix), ValueError, "not the pair")


def samples_on_rank(group, data, num_samples):
    train = build_datasets(
        data, TOKENIZER, seq_length=SEQ_LENGTH, num_samples=(num_samples, 0, 0), seed=3
    ).train
    return [train[i]["tokens"] for i in range(num_samples)]


def test_every_rank_reads_the_same_blend_through_a_cache(tmp_path, prefix):
    other = write_token_files(tmp_path / "other", [[2] * 50] * 10)
    data = DataConfig(
        tokenizer_type="NullTokenizer",
        vocab_size=100,
        data_path=("1", prefix, "2", other),
        split="1",
        data_cache_path=str(tmp_path / "cache"),
    )
    first, second = run_on_ranks(samples_on_rank, 2, data, 30)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
