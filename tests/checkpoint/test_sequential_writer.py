"""Without a process group: one process writes and reads a checkpoint's tensors."""

import weakref

import pytest
import torch

from megatron_untied.checkpoint.global_tensor import GlobalTensor, TensorReader, write_tensors
from megatron_untied.sharding.parameter_layout import GlobalSlice


class MadeWhenWritten(GlobalTensor):
    """Rows that exist from when they are asked for."""

    def __init__(self, num_rows, made):
        rows = [GlobalSlice((row, 0), torch.empty(1, 4, device="meta")) for row in range(num_rows)]
        super().__init__((num_rows, 4), rows)
        self.made = made

    def to_write(self, offsets):
        assert not any(one() is not None for one in self.made), "an earlier row is still held"
        row = torch.full((1, 4), float(offsets[0]))
        self.made.append(weakref.ref(row))
        return row


def read(folder, shape):
    whole = torch.empty(shape)
    TensorReader(folder).read({"x": GlobalTensor(shape, [GlobalSlice((0, 0), whole)])})
    return whole


def test_a_tensor_is_let_go_before_the_next_is_made(tmp_path):
    made = []
    write_tensors(tmp_path, {name: MadeWhenWritten(3, made) for name in "xy"})
    assert len(made) == 6
    assert torch.equal(read(tmp_path, (3, 4)), torch.arange(3.0)[:, None].expand(3, 4))
    assert TensorReader(tmp_path).dtype("y") == torch.float32


def test_a_view_is_written_without_the_rest_of_its_storage(tmp_path):
    storage = torch.randn(1000, 100)
    write_tensors(tmp_path, {"x": GlobalTensor((5, 7), [GlobalSlice((0, 0), storage[3:8, 9:16])])})
    assert sum(path.stat().st_size for path in tmp_path.glob("*.distcp")) < 4000
    assert torch.equal(read(tmp_path, (5, 7)), storage[3:8, 9:16])


def test_the_index_is_read_once(tmp_path):
    write_tensors(tmp_path, {"x": GlobalTensor((5, 7), [GlobalSlice((0, 0), torch.ones(5, 7))])})
    reader = TensorReader(tmp_path)
    row = torch.zeros(1, 7)
    for number in range(3):
        reader.read({"x": GlobalTensor((5, 7), [GlobalSlice((number, 0), row)])})
        (tmp_path / ".metadata").unlink(missing_ok=True)
    assert torch.equal(row, torch.ones(1, 7))


def test_errors_stay_what_they_are(tmp_path):
    slices = [GlobalSlice((row, 0), torch.ones(4, 7)) for row in (0, 1)]
    with pytest.raises(ValueError, match="x has overlapping chunks"):
        write_tensors(tmp_path, {"x": GlobalTensor((5, 7), slices)})
