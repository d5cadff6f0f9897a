import json

import pytest

from megatron_untied.commands import statistics
from tests.support.corpus import write_token_files


def test_prints_for_readers_and_for_programs(tmp_path, capsys):
    prefix = write_token_files(tmp_path / "data", [[1, 2], [3, 4]])
    statistics.main([prefix])
    assert "unigram entropy  1.3863 nats per token" in capsys.readouterr().out
    statistics.main([prefix, "--json"])
    assert json.loads(capsys.readouterr().out)["num_tokens"] == 4


def test_ends_with_one_line_for_a_missing_dataset():
    with pytest.raises(SystemExit, match="error: .*there is no absent.bin"):
        statistics.main(["absent"])
