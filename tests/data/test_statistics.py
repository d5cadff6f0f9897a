import math

import numpy as np
import pytest

from megatron_untied.data import indexed_files
from megatron_untied.data.indexed_files import dataset_statistics, entropy, open_indexed_files
from tests.support.corpus import write_token_files


def test_entropy_of_known_distributions():
    assert entropy(np.array([3, 0, 3, 3, 3])) == pytest.approx(math.log(4))
    assert entropy(np.array([0, 7])) == 0.0


@pytest.mark.parametrize("tokens_at_a_time", [2, 1000])
def test_counts_documents_and_tokens(tmp_path, monkeypatch, tokens_at_a_time):
    monkeypatch.setattr(indexed_files, "_TOKENS_AT_A_TIME", tokens_at_a_time)
    prefix = write_token_files(tmp_path / "data", [[5, 5, 5], [9], [0, 9]])
    found = dataset_statistics(open_indexed_files(prefix))
    assert (found.num_documents, found.num_tokens, found.num_distinct_tokens) == (3, 6, 3)
    expected = -(3 * math.log(3 / 6) + 2 * math.log(2 / 6) + math.log(1 / 6)) / 6
    assert found.unigram_entropy == pytest.approx(expected)
    assert (found.document_tokens[0], found.document_tokens[50]) == (1, 2)
    assert found.document_tokens[100] == 3
