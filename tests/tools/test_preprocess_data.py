import os

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_untied.data.tokenizers import build_tokenizer
from tests.data.corpus import NASTY_TEXTS, write_jsonl
from tools import preprocess_data


@pytest.fixture
def run(tmp_path, tokenizer_model):
    """Calls the tool on a corpus; the prefix of what it wrote under ``name``."""

    def run_tool(name, *flags, corpus):
        preprocess_data.main(
            ["--input", str(corpus), "--output-prefix", str(tmp_path / name)]
            + ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tokenizer_model]
            + list(flags)
        )
        return str(tmp_path / f"{name}_text_document")

    return run_tool


@pytest.fixture
def corpus(tmp_path):
    return write_jsonl(tmp_path / "corpus.jsonl", [*NASTY_TEXTS, ""] * 30)


def contents(prefix):
    files = []
    for ending in (".bin", ".idx"):
        with open(prefix + ending, "rb") as file:
            files.append(file.read())
    return files


def test_megatron_core_reads_back_the_texts(run, corpus, tokenizer_model, capsys):
    dataset = IndexedDataset(run("out", "--append-eod", corpus=corpus))
    tokenizer = build_tokenizer("SentencePieceTokenizer", model=tokenizer_model)
    assert {dataset[i][-1] for i in range(len(dataset))} == {tokenizer.eod}
    texts = [tokenizer.detokenize(dataset[i][:-1].tolist()) for i in range(len(dataset))]
    assert texts == [*NASTY_TEXTS] * 30
    assert "240 documents (30 empty ones left out)" in capsys.readouterr().out


def test_number_of_workers_and_kind_of_input_change_no_byte(run, corpus, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for number, text in enumerate([*NASTY_TEXTS, ""] * 30):
        (folder / f"{number:04}.txt").write_bytes(text.encode())
    one = contents(run("one", corpus=corpus))
    assert one == contents(run("three", "--workers", "3", corpus=corpus))
    assert one == contents(run("text", "--workers", "2", corpus=folder))


def test_one_output_for_each_json_key(run, tmp_path):
    corpus = tmp_path / "qa.jsonl"
    corpus.write_text('{"q": "what", "a": "this"}\n{"q": "who", "a": ""}\n')
    run("out", "--json-keys", "q", "a", corpus=corpus)
    assert len(IndexedDataset(str(tmp_path / "out_q_document"))) == 2
    assert len(IndexedDataset(str(tmp_path / "out_a_document"))) == 1


def test_a_run_that_fails_leaves_the_former_files(run, corpus, tmp_path):
    before = contents(run("out", corpus=corpus))
    listing = sorted(os.listdir(tmp_path))
    with open(corpus, "a") as file:
        file.write("not json\n")
    with pytest.raises(SystemExit, match=r"preprocess_data: .*corpus.jsonl:271: not a line"):
        run("out", "--workers", "2", corpus=corpus)
    assert sorted(os.listdir(tmp_path)) == listing
    assert contents(str(tmp_path / "out_text_document")) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vocab-size", "32000"], "--vocab-size 32000 does not match"),
        (["--tokenizer-model", "absent.model"], "absent.model: no such file"),
        (["--input", "absent.jsonl"], "--input absent.jsonl: no such file"),
    ],
)
def test_ends_with_one_line_for_bad_flags(run, corpus, flags, message):
    with pytest.raises(SystemExit, match=f"preprocess_data: .*{message}"):
        run("out", *flags, corpus=corpus)


def test_rejects_no_workers(run, corpus, capsys):
    with pytest.raises(SystemExit):
        run("out", "--workers", "0", corpus=corpus)
    assert "--workers 0: at least one process must tokenize" in capsys.readouterr().err
