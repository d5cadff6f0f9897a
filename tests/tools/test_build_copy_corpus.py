import numpy as np
import pytest

from megatron_untied.data.indexed_files import open_indexed_files
from tools import build_copy_corpus


def test_documents_are_spans_that_repeat(tmp_path, capsys):
    prefix = str(tmp_path / "new folder" / "copy")
    flags = ["--output-prefix", prefix, "--num-documents", "20", "--document-tokens", "64"]
    build_copy_corpus.main([*flags, "--vocab-size", "1000", "--min-distance", "4"])
    assert "20 documents, spans of up to 32 tokens" in capsys.readouterr().out
    files = open_indexed_files(prefix, vocab_size=1000)
    documents = files.tokens.reshape(20, 64)
    periods = [
        next(n for n in range(1, 64) if np.array_equal(document[n:], document[:-n]))
        for document in documents
    ]
    assert periods[:10] == periods[10:]
    assert (periods[0], periods[9]) == (4, 32)
    assert sorted(periods[:10]) == periods[:10]


def test_spans_that_do_not_repeat_are_refused(tmp_path):
    flags = ["--output-prefix", str(tmp_path / "copy"), "--num-documents", "2"]
    with pytest.raises(SystemExit, match="^error: spans of 16 to 15 tokens in documents of 30"):
        build_copy_corpus.main([*flags, "--document-tokens", "30", "--vocab-size", "10"])
