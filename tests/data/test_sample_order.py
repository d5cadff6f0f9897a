"""What two runs must have in common to read the same samples."""

import shutil

import pytest

from megatron_untied.config.data import DataConfig
from megatron_untied.data.sample_order import describe_samples
from tests.support.corpus import random_documents, write_token_files


@pytest.fixture
def prefixes(tmp_path):
    return [
        write_token_files(
            tmp_path / str(seed), random_documents(20, vocab_size=250, eod=250, seed=seed)
        )
        for seed in range(2)
    ]


def described(*data_path, seed=1, seq_length=64, **changes):
    data = DataConfig(tokenizer_type="NullTokenizer", data_path=data_path, **changes)
    return describe_samples(data, seq_length=seq_length, seed=seed)


def test_seed_length_files_weights_and_split_are_the_order(prefixes):
    one, two = prefixes
    before = described("0.3", one, "0.7", two)
    for change in (
        described("0.3", one, "0.7", two, seed=2),
        described("0.3", one, "0.7", two, seq_length=32),
        described("0.4", one, "0.6", two),
        described("0.3", two, "0.7", one),
        described(one, two),
        described("0.3", one, "0.7", two, split="90,10"),
        described(mock_data=True),
    ):
        assert change.order != before.order
        assert change.content == before.content


def test_what_reads_the_same_samples_is_equal(prefixes, tmp_path):
    one, two = prefixes
    before = described("0.3", one, "0.7", two)
    assert described("3", one, "7", two) == before
    assert described("0.3", one, "0.7", two, split="96.9, 3.1") == before
    assert described("0.3", one, "0.7", two, num_workers=0, data_cache_path="x") == before
    for ending in (".bin", ".idx"):
        shutil.copy(one + ending, str(tmp_path / "moved") + ending)
    assert described("0.3", str(tmp_path / "moved"), "0.7", two) == before


def test_masks_change_how_samples_are_seen(prefixes):
    before = described(prefixes[0])
    masked = described(prefixes[0], eod_mask_loss=True)
    assert masked.order == before.order
    assert masked.content != before.content


def test_another_file_under_the_same_name_is_another_order(prefixes):
    before = described(prefixes[0])
    for ending in (".bin", ".idx"):
        shutil.copy(prefixes[1] + ending, prefixes[0] + ending)
    assert described(prefixes[0]).order["--data-path"] != before.order["--data-path"]
    assert "20 documents" in before.order["--data-path"]
