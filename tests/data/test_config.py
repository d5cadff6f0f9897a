import pytest

from megatron_untied.config.data import DataConfig


@pytest.mark.parametrize("source", [{}, {"mock_data": True, "data_path": ("a",)}])
def test_rejects_no_source_and_two_sources(source):
    with pytest.raises(ValueError, match="either --data-path or --mock-data"):
        DataConfig(tokenizer_type="NullTokenizer", vocab_size=8, **source)


def test_rejects_negative_workers():
    with pytest.raises(ValueError, match="--num-workers -1 is negative"):
        DataConfig(tokenizer_type="NullTokenizer", mock_data=True, num_workers=-1)
