import json
import re

import pytest

from megatron_untied.commands import statistics
from tests.support.corpus import random_documents, write_token_files


def test_prints_for_readers_and_for_programs(tmp_path, capsys):
    prefix = write_token_files(tmp_path / "data", [[1, 2], [3, 4]])
    statistics.main([prefix])
    assert "unigram entropy  1.3863 nats per token" in capsys.readouterr().out
    statistics.main([prefix, "--json"])
    assert json.loads(capsys.readouterr().out)["num_tokens"] == 4


def test_measures_the_loader_of_training(tmp_path, capsys):
    documents = random_documents(50, vocab_size=20, eod=20)
    prefix = write_token_files(tmp_path / "data", documents)
    flags = ["--seq-length", "32", "--tokenizer-type", "NullTokenizer", "--vocab-size", "20"]
    statistics.main([prefix, *flags, "--micro-batches", "3", "--num-workers", "1"])
    said = capsys.readouterr().out
    assert re.search(r"loader +[1-9][\d,]* tokens/s: samples of 32 by 1 workers, the first", said)
    statistics.main([prefix, *flags, "--num-workers", "0", "--json"])
    loader = json.loads(capsys.readouterr().out)["loader"]
    assert (loader["seq_length"], loader["num_workers"]) == (32, 0)
    assert loader["tokens_per_second"] > 0
    with pytest.raises(SystemExit, match="error: unknown flag --seq-lenth"):
        statistics.main([prefix, "--seq-lenth", "32"])


def test_ends_with_one_line_for_a_missing_dataset():
    with pytest.raises(SystemExit, match="error: .*there is no absent.bin"):
        statistics.main(["absent"])
