import pytest

from tests.data.corpus import train_small_tokenizer


@pytest.fixture(scope="session")
def tokenizer_model(tmp_path_factory):
    return str(train_small_tokenizer(tmp_path_factory.mktemp("tokenizer")))
