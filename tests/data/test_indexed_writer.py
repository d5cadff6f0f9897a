import multiprocessing
import os
import signal

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_untied.data.indexed_writer import IndexedWriter
from tests.support.corpus import write_token_files


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatron_core_reads_the_exact_tokens(tmp_path, dtype):
    documents = [[1, 2, 3], [65499], [7, 8]]
    dataset = IndexedDataset(write_token_files(tmp_path / "data", documents, dtype))
    assert [dataset[i].tolist() for i in range(len(dataset))] == documents
    assert dataset.document_indices.tolist() == [0, 1, 2, 3]
    assert dataset[0].dtype == dtype
    assert sorted(os.listdir(tmp_path)) == ["data.bin", "data.idx"]


def test_leaves_out_and_counts_empty_documents(tmp_path):
    writer = IndexedWriter(str(tmp_path / "data"), np.uint16)
    for ids in ([], [1, 2], []):
        writer.add(np.array(ids, dtype=np.uint16))
    assert (writer.num_documents, writer.num_empty, writer.num_tokens) == (1, 2, 2)


def test_a_discarded_run_leaves_nothing_and_the_former_files(tmp_path):
    prefix = write_token_files(tmp_path / "data", [[1]])
    writer = IndexedWriter(prefix, np.uint16)
    writer.add(np.array([2, 3], dtype=np.uint16))
    writer.discard()
    assert sorted(os.listdir(tmp_path)) == ["data.bin", "data.idx"]
    dataset = IndexedDataset(prefix)  # what it returns is unmapped with it
    assert dataset[0].tolist() == [1]


def write_and_be_killed(prefix):
    writer = IndexedWriter(prefix, np.uint16)
    writer.add(np.array([1], dtype=np.uint16))
    writer.finish()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_run_leaves_nothing_that_looks_complete(tmp_path):
    context = multiprocessing.get_context("fork")
    process = context.Process(target=write_and_be_killed, args=(str(tmp_path / "data"),))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == ["data.bin.partial", "data.idx.partial"]
    assert not IndexedDataset.exists(str(tmp_path / "data"))


def test_rejects_a_dataset_without_tokens(tmp_path):
    writer = IndexedWriter(str(tmp_path / "data"), np.uint16)
    writer.add(np.array([], dtype=np.uint16))
    with pytest.raises(ValueError, match="no document has a token"):
        writer.finish()
