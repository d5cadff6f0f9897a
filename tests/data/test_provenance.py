import json
import logging

import numpy as np
import pytest

from megatron_untied.config.data import DataConfig
from megatron_untied.data.datasets import build_datasets
from megatron_untied.data.indexed_files import open_indexed_files
from megatron_untied.data.indexed_writer import IndexedWriter
from megatron_untied.data.provenance import Provenance, check_provenance, read_provenance
from megatron_untied.data.tokenizers import build_tokenizer, tokenizer_hash
from tests.support.corpus import write_token_files


def provenance_of(tokenizer, **flags):
    return Provenance(
        **{
            "tokenizer_type": "NullTokenizer",
            "tokenizer_model": None,
            "tokenizer_hash": tokenizer_hash(tokenizer),
            "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod,
            "append_eod": False,
            "bos": None,
            "parse_special_tokens": False,
            **flags,
        }
    )


@pytest.fixture
def tokenizer():
    return build_tokenizer("NullTokenizer", vocab_size=100)


@pytest.fixture
def files(tmp_path, tokenizer):
    writer = IndexedWriter(str(tmp_path / "data"), np.uint16, provenance_of(tokenizer))
    for length in (30, 0, 50):
        writer.add(np.arange(length, dtype=np.uint16))
    writer.finish()
    writer.publish()
    return open_indexed_files(writer.prefix)


def test_is_stored_beside_the_files(files, tokenizer):
    assert read_provenance(files) == provenance_of(tokenizer)
    with open(files.prefix + ".provenance.json") as file:
        fields = json.load(file)
    counts = {name: fields[name] for name in ("num_documents", "num_tokens", "num_empty")}
    assert counts == {"num_documents": 2, "num_tokens": 80, "num_empty": 1}


@pytest.mark.parametrize("vocab_size", [99, 101])
def test_training_refuses_another_tokenizer(files, vocab_size):
    other = build_tokenizer("NullTokenizer", vocab_size=vocab_size)
    data = DataConfig(tokenizer_type="NullTokenizer", data_path=(files.prefix,), split="1,0,0")
    with pytest.raises(ValueError, match="was made with another tokenizer, NullTokenizer .*101 "):
        build_datasets(data, other, seq_length=8, num_samples=(1, 0, 0), seed=1)


def test_takes_the_tokenizer_that_made_the_files(files, tokenizer, caplog):
    check_provenance([files], tokenizer)
    assert not caplog.records


def test_one_line_counts_files_that_do_not_tell(tmp_path, files, tokenizer, caplog):
    others = [open_indexed_files(write_token_files(tmp_path / n, [[1]])) for n in ("x", "y")]
    with caplog.at_level(logging.WARNING):
        check_provenance([files, *others], tokenizer)
    (record,) = caplog.records
    assert f"{others[0].prefix} and 1 more: no .provenance.json" in record.getMessage()


def test_refuses_a_provenance_of_other_documents(files, tokenizer):
    writer = IndexedWriter(files.prefix + "2", np.uint16)
    writer.add(np.arange(5, dtype=np.uint16))
    writer.finish()
    writer.publish()
    for ending in (".bin", ".idx"):  # as another tool would write them over ours
        with open(files.prefix + "2" + ending, "rb") as a, open(files.prefix + ending, "wb") as b:
            b.write(a.read())
    with pytest.raises(ValueError, match="provenance.json describes other documents"):
        check_provenance([open_indexed_files(files.prefix)], tokenizer)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"tokenizer_type": "NullTokenizer"}'])
def test_refuses_a_damaged_provenance(files, tokenizer, content):
    with open(files.prefix + ".provenance.json", "w") as file:
        file.write(content)
    with pytest.raises(ValueError, match="provenance.json is damaged .*preprocess again, or dele"):
        check_provenance([files], tokenizer)


def test_files_that_do_not_tell_replace_those_that_do(files):
    write_token_files(files.prefix, [[1, 2]])
    assert read_provenance(open_indexed_files(files.prefix)) is None
