"""Where documents begin in samples, and tokens that are not in the vocabulary."""

import gc
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_untied.data import indexed_files
from megatron_untied.data.loader import micro_batches
from megatron_untied.platform.device import fields_of
from tests.data.test_datasets import SEQ_LENGTH, TOKENIZER, build
from tests.support.corpus import write_token_files

EOD = TOKENIZER.eod
RESET = {"reset_position_ids": True}


def numbered_documents(numbers) -> list[list[int]]:
    """Document i is the token i, 1 to 90 times: a sample shows by itself what it is made of."""
    rng = np.random.default_rng(5)
    return [[i] * int(rng.integers(1, 90)) for i in numbers]


def positions_by_token(tokens: torch.Tensor) -> list[int]:
    """Positions that start again where the token is another."""
    positions = [0]
    for last, token in zip(tokens[:-1], tokens[1:], strict=True):
        positions.append(positions[-1] + 1 if token == last else 0)
    return positions


def test_documents_of_files_without_an_end_of_document_are_those_of_the_idx(tmp_path):
    """Whatever is cut at the borders of a sample, in every split, over several epochs."""
    prefix = write_token_files(tmp_path / "data", numbered_documents(range(60)))
    datasets = build(prefix, split="80,20", num_samples=(150, 20, 0), **RESET)
    spanning = 0
    for split, count in ((datasets.train, 150), (datasets.valid, 20)):
        for i in range(count):
            tokens, positions = split[i]["tokens"], split[i]["positions"]
            assert positions.tolist() == positions_by_token(tokens)
            spanning += int(positions[-1] == SEQ_LENGTH - 1)
    assert spanning > 10  # documents longer than a sample
    assert all(build(prefix, split="1").train[0]["positions"] == torch.arange(SEQ_LENGTH))


def test_documents_in_a_blend_are_those_of_each_idx(tmp_path):
    first, second = (
        write_token_files(tmp_path / name, numbered_documents(numbers), np.int32)
        for name, numbers in (("a", range(40)), ("b", range(40, 90)))
    )
    train = build("1", first, "2", second, split="1", num_samples=(90, 0, 0), **RESET).train
    files = set()
    for i in range(90):
        sample = train[i]
        files.add(int(sample["dataset_id"]))
        assert sample["positions"].tolist() == positions_by_token(sample["tokens"])
    assert files == {0, 1}


def test_an_end_of_document_inside_a_document_is_a_boundary_only_where_asked_for(tmp_path, caplog):
    prefix = write_token_files(tmp_path / "data", [[1, 2, EOD, 3, 4], [7] * 40])
    by_idx, by_id = (
        build(prefix, split="1", num_samples=(1, 0, 0), document_boundaries=kind, **RESET).train[0]
        for kind in ("idx", "eod")
    )
    tokens = by_idx["tokens"]
    assert torch.equal(tokens, by_id["tokens"])
    start = tokens.tolist().index(1)
    assert by_idx["positions"][start : start + 5].tolist() == [0, 1, 2, 3, 4]
    ends = (tokens[:-1] == EOD).nonzero()[:, 0] + 1
    assert (by_id["positions"] == 0).nonzero()[:, 0].tolist() == [0, *ends.tolist()]
    (record,) = [each for each in caplog.records if each.name.endswith("datasets")]
    assert "inside documents, the first at place 2 of the .bin" in record.getMessage()
    assert "--document-boundaries eod" in record.getMessage()


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"eod_mask_loss": True}, "--eod-mask-loss"),
        ({"document_boundaries": "eod", **RESET}, "--document-boundaries eod"),
    ],
)
def test_flags_by_id_are_refused_for_files_without_the_token(tmp_path, monkeypatch, flags, flag):
    monkeypatch.setattr(indexed_files, "_TOKENS_CHECKED", 10)
    without = write_token_files(tmp_path / "without", numbered_documents(range(30)))
    with pytest.raises(ValueError, match=f"^{flag} goes by .* token 100 .*{without} holds none"):
        build(without, split="1", **flags)
    late = write_token_files(tmp_path / "late", [*numbered_documents(range(30)), [1, EOD]])
    assert build(late, split="1", **flags).train is not None


@pytest.fixture
def few_checked(monkeypatch):
    monkeypatch.setattr(indexed_files, "_TOKENS_CHECKED", 10)


@pytest.mark.parametrize("bad", [EOD + 1, 5000, -1, -(2**31)])
def test_a_token_out_of_the_vocabulary_is_named_by_every_sample_that_has_it(
    tmp_path, few_checked, bad
):
    """One more than the vocabulary is a row of padding; as a label it counts as well."""
    documents = numbered_documents(range(30))
    documents[17][len(documents[17]) // 2] = bad
    prefix = write_token_files(tmp_path / "data", documents, np.int32)
    train = build(prefix, split="1", eod_mask_loss=False, num_samples=(1, 0, 0)).train
    where = f"token {len(documents[17]) // 2} of document 17 of {prefix}.bin"
    num_refused = 0
    for i in range(len(train)):
        raw, _ = train._query_document_sample_shuffle_indices(i)
        if bad in raw:
            num_refused += 1
            with pytest.raises(ValueError, match=f"token {bad}, the tokenizer has 101: .*{where}"):
                train[i]
        else:
            assert train[i]["tokens"].max() <= EOD
    assert num_refused in (1, 2)  # the last token of a sample is the first of another


def test_the_first_tokens_are_checked_before_training(tmp_path):
    prefix = write_token_files(tmp_path / "data", [[1, 2, 3], [4, 101, 6], [7] * 50])
    with pytest.raises(ValueError, match=r"holds token 101.* token 1 of document 1 of .*data\.bin"):
        build(prefix, split="1")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_worker_is_the_error_itself(tmp_path, few_checked, num_workers):
    prefix = write_token_files(tmp_path / "data", [*numbered_documents(range(3)), [101] * 99])
    batches = micro_batches(
        build(prefix, split="1", num_samples=(20, 0, 0)).train,
        consumed_samples=0,
        micro_batch_size=2,
        data_parallel_rank=0,
        data_parallel_size=1,
        num_workers=num_workers,
    )
    with pytest.raises(ValueError, match=r"^--data-path .* holds token 101[^\n]*$"):
        list(itertools.islice(batches, 10))


def peak_above_now(action) -> int:
    """Bytes by which the peak of resident memory during ``action`` is above that before it."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is resident now
    before = fields_of(Path("/proc/self/status"))["VmRSS:"]
    action()
    return 1024 * (int(fields_of(Path("/proc/self/status"))["VmHWM:"]) - int(before))


@pytest.mark.parametrize("masked", [False, True])
def test_a_sample_takes_memory_in_proportion_to_its_tokens(tmp_path, masked):
    """At 5 Mi and at 10 Mi tokens of many documents: 20 bytes each are returned."""
    length = 10 << 20
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 2000, 2 * length // 1000)
    tokens = rng.integers(0, 100, int(lengths.sum()), dtype=np.uint16)
    prefix = write_token_files(tmp_path / "data", np.split(tokens, lengths.cumsum()[:-1]))
    flags = RESET if masked else {}
    for size in (length // 2, length):
        train = build(prefix, split="1", num_samples=(1, 0, 0), seq_length=size, **flags).train
        assert 15 * size < peak_above_now(lambda data=train: data[0]) < 60 * size
