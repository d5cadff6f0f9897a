import os
import struct

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_untied.data.indexed_files import fingerprint_of, open_indexed_files
from megatron_untied.data.indexed_writer import IndexedWriter
from tests.data.test_datasets import build
from tests.support.corpus import write_token_files

DOCUMENTS = [[1, 2, 3], [4], [5, 6]]


@pytest.fixture
def prefix(tmp_path):
    return write_token_files(tmp_path / "data", DOCUMENTS)


def overwrite(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_reads_what_was_written(tmp_path, dtype):
    files = open_indexed_files(write_token_files(tmp_path / "x", DOCUMENTS, dtype), vocab_size=7)
    assert files.lengths.tolist() == [3, 1, 2]
    assert files.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert files.tokens.dtype == dtype


def test_fingerprint_follows_document_lengths_only(tmp_path):
    first, same, other = (
        fingerprint_of(open_indexed_files(write_token_files(tmp_path / name, documents)).lengths)
        for name, documents in (("a", DOCUMENTS), ("b", [[9, 9, 9], [9], [9, 9]]), ("c", [[1]]))
    )
    assert first == same != other


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_rejects_a_missing_file(prefix, ending):
    os.remove(prefix + ending)
    with pytest.raises(FileNotFoundError, match=f"there is no .*data{ending}; give the name"):
        open_indexed_files(prefix)


def test_rejects_a_truncated_bin(prefix):
    os.truncate(prefix + ".bin", 10)
    with pytest.raises(ValueError, match=r"is 10 bytes; .* 6 tokens, 12 bytes: cut short"):
        open_indexed_files(prefix)


def test_rejects_an_oversized_bin(prefix):
    overwrite(prefix + ".bin", 12, b"xx")
    with pytest.raises(ValueError, match=r"is 14 bytes; .* 12 bytes: not the pair of this .idx"):
        open_indexed_files(prefix)


@pytest.mark.parametrize("size", [0, 33])
def test_rejects_an_idx_shorter_than_its_header(prefix, size):
    os.truncate(prefix + ".idx", size)
    with pytest.raises(ValueError, match=f"is {size} bytes, shorter than its header"):
        open_indexed_files(prefix)


@pytest.mark.parametrize(("offset", "data"), [(0, b"X"), (9, b"\x02"), (17, b"\x07")])
def test_rejects_another_format_version_or_dtype(prefix, offset, data):
    overwrite(prefix + ".idx", offset, data)
    with pytest.raises(ValueError, match="is not a Megatron index of integer tokens"):
        open_indexed_files(prefix)


def test_rejects_an_idx_of_the_wrong_size(prefix):
    os.truncate(prefix + ".idx", os.path.getsize(prefix + ".idx") - 1)
    with pytest.raises(ValueError, match="3 documents need 102: it is incomplete or damaged"):
        open_indexed_files(prefix)


@pytest.mark.parametrize(
    ("offset", "data"), [(34, struct.pack("<i", -3)), (102 - 8, struct.pack("<q", 4))]
)
def test_rejects_impossible_lengths_and_bounds(prefix, offset, data):
    overwrite(prefix + ".idx", offset, data)
    with pytest.raises(ValueError, match="has impossible document bounds"):
        open_indexed_files(prefix)


@pytest.mark.parametrize(
    ("offset", "data"), [(34 + 12 + 8, struct.pack("<q", 2)), (102 - 24, struct.pack("<q", 2))]
)
def test_rejects_documents_in_another_place(prefix, offset, data):
    """Megatron-core would read the tokens of another document there."""
    overwrite(prefix + ".idx", offset, data)
    with pytest.raises(ValueError, match=r"data.idx places document 1 elsewhere than behind"):
        open_indexed_files(prefix)


def test_rejects_an_index_of_no_documents(prefix):
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 0, 1)
    with open(prefix + ".idx", "wb") as file:
        file.write(header + struct.pack("<q", 0))
    with pytest.raises(ValueError, match="holds no documents"):
        open_indexed_files(prefix)


def test_rejects_documents_of_several_sequences(tmp_path):
    """Sentences, say: samples are made of sequences in another order, which would scatter them."""
    builder = IndexedDatasetBuilder(str(tmp_path / "data.bin"), dtype=np.uint16)
    builder.add_document(np.arange(6), [3, 1, 2])
    builder.add_document(np.arange(4), [4])
    builder.finalize(str(tmp_path / "data.idx"))
    with pytest.raises(ValueError, match="has 4 sequences in 2 documents"):
        open_indexed_files(str(tmp_path / "data"))


def test_rejects_tokens_outside_the_vocabulary(prefix):
    with pytest.raises(ValueError, match="holds token 6, the tokenizer has 6: preprocess again"):
        open_indexed_files(prefix, vocab_size=6)


def test_rejects_negative_tokens(tmp_path):
    prefix = write_token_files(tmp_path / "negative", [[1, -2]], np.int32)
    with pytest.raises(ValueError, match="holds token -2"):
        open_indexed_files(prefix, vocab_size=6)


def test_more_tokens_than_32_bits_count(tmp_path):
    """In a sparse file: three documents of zeros, then one that begins after 3 Gi tokens."""
    prefix, tail = str(tmp_path / "sparse"), np.arange(1, 5000, dtype=np.uint16) % 97 + 1
    writer = IndexedWriter(prefix, np.uint16)
    builder = writer._builder
    for length in [1 << 30] * 3:
        builder.data_file.seek(2 * length, os.SEEK_CUR)
        builder.sequence_lengths.append(length)
        builder.document_indices.append(len(builder.sequence_lengths))
        writer.num_documents += 1
    writer.add(tail)
    writer.finish()
    writer.publish()
    files = open_indexed_files(prefix, vocab_size=101)
    assert len(files.tokens) == (3 << 30) + len(tail)
    length = 1 << 20
    train = build(prefix, split="1", num_samples=(1, 0, 0), seq_length=length).train
    assert len(train) == 3 << 10
    rows = train.sample_index.astype(np.int64)
    starts = np.concatenate([[0], files.lengths[train.document_index].cumsum(dtype=np.int64)])
    places = starts[rows[:, 0]] + rows[:, 1]
    assert places.tolist() == [length * n for n in range((3 << 10) + 1)]
    # The sample that the last document begins in, wherever the shuffle has put both.
    nth = train.document_index.tolist().index(3)
    first = int(np.searchsorted(places, starts[nth], side="right")) - 1
    sample = train[train.shuffle_index.tolist().index(min(first, len(train) - 1))]
    at = int(starts[nth] - places[min(first, len(train) - 1)])
    found = np.concatenate([sample["tokens"].numpy(), sample["labels"].numpy()[-1:]])
    count = min(len(tail), length + 1 - at)
    assert count > 1000
    assert (found[at : at + count] == tail[:count]).all()
    assert not found[:at].any()
