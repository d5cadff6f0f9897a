"""Samples of packed chats, from files of every format that --sft reads."""

import gzip
import json
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import zstandard

from megatron_untied.config.data import DataConfig
from megatron_untied.data import chat_datasets
from megatron_untied.data.chat_datasets import PADDING_DOCUMENT
from megatron_untied.data.datasets import build_datasets
from megatron_untied.data.loader import MicroBatchSampler
from megatron_untied.data.tokenizers import build_tokenizer
from tests.support.chats import CHATS, said, write_chats, write_tokenizer

S = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def chat(number, length=3):
    question, answer = f"question {number}", "word " * length + str(number)
    return {"messages": [said("user", question), said("assistant", answer)]}


def config(folder, *paths, **changes):
    fields = {"split": "1", "num_workers": 0} | changes
    return DataConfig(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=folder,
        data_path=tuple(map(str, paths)),
        sft=True,
        **fields,
    )


def build(folder, *paths, num_samples=(1, 0, 0), seq_length=S, **changes):
    data = config(folder, *paths, **changes)
    tokenizer = build_tokenizer(
        "HuggingFaceTokenizer", model=folder, parse_special_tokens=True, quiet=True
    )
    return build_datasets(
        data, tokenizer, seq_length=seq_length, num_samples=num_samples, seed=1234
    )


def documents_of(sample) -> list[dict[str, torch.Tensor]]:
    """A sample cut where positions restart."""
    starts = (sample["positions"] == 0).nonzero()[:, 0].tolist()
    bounds = [*starts, len(sample["positions"])]
    return [
        {name: x[a:b] for name, x in sample.items()}
        for a, b in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def trained_texts(datasets, folder) -> list[str]:
    """The trained text of every chat of the first epoch."""
    decode = build_tokenizer(
        "HuggingFaceTokenizer", model=folder, quiet=True
    )._tokenizer.tokenizer.decode
    return [
        decode(document["labels"][document["loss_mask"] > 0])
        for i in range(len(datasets.train))
        for document in documents_of(datasets.train[i])
        if document["loss_mask"].any()
    ]


ANSWERS = sorted(f"<think>\n\n</think>\n\n{'word ' * 3}{i}<|im_end|>" for i in range(20))


def write_gz(path, records):
    path.write_bytes(gzip.compress("".join(json.dumps(x) + "\n" for x in records).encode()))


def write_zst(path, records):
    text = "".join(json.dumps(x) + "\n" for x in records).encode()
    path.write_bytes(zstandard.ZstdCompressor().compress(text))


def write_parquet(path, records):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)


def write_saved(path, records):
    """What datasets.save_to_disk leaves."""
    path.mkdir()
    table = pyarrow.Table.from_pylist(records)
    half = len(records) // 2
    files = []
    for number, part in enumerate((table[:half], table[half:])):
        files.append({"filename": f"data-{number:05d}-of-00002.arrow"})
        with pyarrow.OSFile(str(path / files[-1]["filename"]), "wb") as sink:
            with pyarrow.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(part)
    (path / "dataset_info.json").write_text("{}")
    (path / "state.json").write_text(json.dumps({"_data_files": files}))


def write_hub_folder(path, records):
    (path / "data").mkdir(parents=True)
    (path / "README.md").write_text("# Chats")
    write_parquet(path / "data" / "train-00000-of-00001.parquet", records)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("chats.jsonl", write_chats),
        ("chats.jsonl.gz", write_gz),
        ("chats.json.zst", write_zst),
        ("chats.parquet", write_parquet),
        ("saved", write_saved),
        ("hub", write_hub_folder),
    ],
)
def test_every_format_gives_the_same_chats(folder, tmp_path, name, write):
    write(tmp_path / name, [chat(i) for i in range(20)])
    datasets = build(folder, tmp_path / name)
    assert sorted(trained_texts(datasets, folder)) == ANSWERS
    again = build(folder, tmp_path / name)  # from the cache
    for field, x in again.train[0].items():
        assert torch.equal(x, datasets.train[0][field])


def test_columns_that_a_row_does_not_have_are_absent(folder, tmp_path):
    """In Parquet, messages without tool calls and calls of other tools have nulls."""
    records = [CHATS["tools"], chat(0)]
    write_parquet(tmp_path / "chats.parquet", records)
    write_chats(tmp_path / "chats.jsonl", records)
    expected = trained_texts(build(folder, tmp_path / "chats.jsonl", seq_length=512), folder)
    found = trained_texts(build(folder, tmp_path / "chats.parquet", seq_length=512), folder)
    assert found == expected


def test_a_sample_is_whole_chats_with_positions_of_their_own_and_padding(folder, tmp_path):
    path = write_chats(tmp_path / "chats.jsonl", [chat(i) for i in range(20)])
    datasets = build(folder, path)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", model=folder, quiet=True)
    for i in range(len(datasets.train)):
        sample = datasets.train[i]
        *chats, padding = documents_of(sample)
        for document in chats:
            assert document["positions"].tolist() == list(range(len(document["tokens"])))
            assert torch.equal(document["tokens"][1:], document["labels"][:-1])
            assert set(document["loss_mask"].tolist()) == {0.0, 1.0}
        assert (padding["tokens"] == tokenizer.eod).all()
        assert not padding["loss_mask"].any()
    assert "20 chats | 0 longer than 256 tokens | 0 without trained tokens" in datasets.description


def test_padding_is_short_documents(folder, tmp_path):
    path = write_chats(tmp_path / "chats.jsonl", [chat(0)])
    sample = build(folder, path, seq_length=4 * PADDING_DOCUMENT).train[0]
    first, *padding = (len(document["tokens"]) for document in documents_of(sample))
    assert max(padding) == PADDING_DOCUMENT
    assert first + sum(padding) == 4 * PADDING_DOCUMENT


def test_weights_by_sample_add_up_to_one_for_each_chat(folder, tmp_path):
    path = write_chats(tmp_path / "chats.jsonl", [chat(i, length=i + 1) for i in range(10)])
    datasets = build(folder, path, loss_weighting="sample")
    sums = [
        float(document["loss_mask"].sum())
        for i in range(len(datasets.train))
        for document in documents_of(datasets.train[i])
        if document["loss_mask"].any()
    ]
    assert sums == pytest.approx([1.0] * 10, rel=1e-6)


MIXED = [chat(0), chat(1, length=1000), CHATS["without a turn"], chat(2)]


def test_long_chats_end_the_run_or_are_dropped_or_truncated_and_counted(folder, tmp_path):
    path = write_chats(tmp_path / "chats.jsonl", MIXED)
    with pytest.raises(ValueError, match=r"1 of 4 chats are longer than --seq-length 256 .* numb"):
        build(folder, path)
    dropped = build(folder, path, long_samples="drop")
    assert len(trained_texts(dropped, folder)) == 2
    assert "1 longer than 256 tokens dropped | 1 without trained tokens" in dropped.description
    truncated = build(folder, path, long_samples="truncate")
    texts = trained_texts(truncated, folder)
    assert len(texts) == 3
    assert [text.endswith("<|im_end|>") for text in sorted(texts, key=len)] == [True, True, False]
    assert "1 longer than 256 tokens truncated | 1 without trained" in truncated.description


def test_a_chat_that_just_fits_is_not_long(folder, tmp_path):
    path = write_chats(tmp_path / "chats.jsonl", [chat(0)])
    tokens = len(documents_of(build(folder, path).train[0])[0]["tokens"])
    assert len(build(folder, path, seq_length=tokens).train) == 1
    with pytest.raises(ValueError, match=f"the longest takes {tokens},"):
        build(folder, path, seq_length=tokens - 1)


def test_splits_are_of_chats_in_the_order_of_the_file(folder, tmp_path):
    path = write_chats(tmp_path / "chats.jsonl", [chat(i) for i in range(20)])
    datasets = build(folder, path, split="75,25,0", num_samples=(1, 1, 0))
    assert len(trained_texts(datasets, folder)) == 15
    assert datasets.test is None
    with pytest.raises(ValueError, match="--split 1 leaves valid 0 of 20 chats"):
        build(folder, path, num_samples=(1, 1, 0))


@pytest.mark.parametrize(
    ("records", "changes", "message"),
    [
        ([chat(0), {"text": "a"}], {}, r"chats.jsonl:2: no chat: it needs messages"),
        ([chat(0), {"messages": [said("bot", "a")]}], {}, r"chats.jsonl:2: .*unknown role 'bot'"),
        ([chat(0) | {"tools": 3}], {}, r"chats.jsonl:1: tools is no list of objects"),
        ([chat(0) | {"chat_template_kwargs": [1]}], {}, r":1: chat_template_kwargs is not an obj"),
        ([{"messages": [said("user", ["a"])]}], {}, r":1: the content of message 1 is a list; it"),
        (
            [{"messages": [said("assistant", "", tool_calls=[{"function": "f"}])]}],
            {},
            r":1: tool_calls of message 1 are no list of calls with names",
        ),
        ([], {}, r"chats.jsonl holds no chats"),
        ([CHATS["without a turn"]], {}, "no trained tokens in 1 chats under --loss-on completion"),
        (
            [chat(0, length=1000)],
            {"long_samples": "drop"},
            "all 1 chats are longer than --seq-length 256 and dropped",
        ),
    ],
)
def test_what_cannot_be_trained_on_is_refused(folder, tmp_path, records, changes, message):
    path = write_chats(tmp_path / "chats.jsonl", records)
    with pytest.raises(ValueError, match=message):
        build(folder, path, **changes)


def test_a_missing_template_is_refused_for_chats_only(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer", template=None)
    path = write_chats(tmp_path / "chats.jsonl", [chat(0)])
    with pytest.raises(ValueError, match=r"chats.jsonl:1: the tokenizer has no chat template"):
        build(folder, path)
    path = write_chats(tmp_path / "texts.jsonl", [{"prompt": "a", "completion": "b"}])
    assert trained_texts(build(folder, path), folder) == ["b<|im_end|>"]


def test_files_and_folders_without_chats_are_refused(folder, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"notes.txt is none of JSON lines .* which --sft reads"):
        build(folder, tmp_path / "notes.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="--data-path .*empty: no such file"):
        build(folder, tmp_path / "empty")
    saved = tmp_path / "dict"
    saved.mkdir()
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"several splits; name one of .*dict/train, .*dict/test"):
        build(folder, saved)
    with pytest.raises(FileNotFoundError, match="--data-path .*absent.jsonl: no such file"):
        build(folder, tmp_path / "absent.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mock_data": True}, "--sft reads chats from --data-path"),
        ({"tokenizer_type": "SentencePieceTokenizer"}, "--sft needs a chat template"),
        ({"eod_mask_loss": True}, "--eod-mask-loss has no effect with --sft"),
        ({"data_path": ("0.5", "a", "0.5", "b")}, "give --data-path no weights"),
    ],
)
def test_flags_that_contradict_are_refused(changes, message):
    fields = {"tokenizer_type": "HuggingFaceTokenizer", "data_path": ("a",), "sft": True}
    with pytest.raises(ValueError, match=re.escape(message)):
        DataConfig(**fields | changes)


def test_other_content_of_a_file_is_not_read_from_the_cache(folder, tmp_path):
    path = write_chats(tmp_path / "chats.jsonl", [chat(i) for i in range(20)])
    assert sorted(trained_texts(build(folder, path), folder)) == ANSWERS
    write_chats(tmp_path / "chats.jsonl", [chat(i) for i in range(19)])
    assert len(trained_texts(build(folder, path), folder)) == 19


@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_global_batch_is_the_same_samples_and_ranks_have_even_work(size, micro_batch_size):
    work = np.random.RandomState(0).lognormal(0, 1, 100)
    samplers = [
        iter(
            MicroBatchSampler(
                num_samples=100,
                consumed_samples=16,
                micro_batch_size=micro_batch_size,
                data_parallel_rank=rank,
                data_parallel_size=size,
                global_batch_size=16,
                attention_work=work,
            )
        )
        for rank in range(size)
    ]
    for batch in range(1, 4):
        num_micro_batches = 16 // (size * micro_batch_size)
        ranks = [[next(sampler) for _ in range(num_micro_batches)] for sampler in samplers]
        members = sorted(i for rank in ranks for samples in rank for i in samples)
        assert members == list(range(16 * batch, 16 * batch + 16))
        # At each time the ranks have neighbors in the order of work.
        by_work = sorted(members, key=lambda i: -work[i])
        for step in range(num_micro_batches):
            at_once = {i for rank in ranks for i in rank[step]}
            start = step * size * micro_batch_size
            assert at_once == set(by_work[start : start + size * micro_batch_size])


def test_tells_how_far_the_tokenizing_is(folder, tmp_path, monkeypatch, caplog):
    """The other ranks wait meanwhile, perhaps for hours."""
    monkeypatch.setattr(chat_datasets, "_SECONDS_BETWEEN_LINES", 0.0)
    paths = [
        write_chats(tmp_path / f"{n}.jsonl", [chat(3 * n + i) for i in range(3)]) for n in (0, 1)
    ]
    build(folder, *paths)
    said_lines = [line for line in caplog.messages if line.startswith("tokenizing chats: ")]
    assert said_lines[0] == f"tokenizing chats: 1 done, at {paths[0]}:1 (file 1 of 2)"
    assert said_lines[-1] == f"tokenizing chats: 6 done, at {paths[1]}:3 (file 2 of 2)"
