import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_untied.context_parallel.sequence import SequenceInfo, documents_of


def positions_of(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def test_documents_start_where_positions_do():
    positions = torch.stack([positions_of(1, 3, 1, 4), positions_of(9), positions_of(8, 1)])
    assert [each.queries for each in documents_of(positions)] == [
        (0, 1, 4, 5, 9), (0, 9), (0, 8, 9),
    ]  # fmt: skip
    assert all(each.queries == each.keys for each in documents_of(positions))


def test_an_empty_slot_is_plain():
    info = SequenceInfo(positions=torch.arange(3)[None])
    assert SequenceInfo.from_slot(None) == SequenceInfo(positions=None, documents=None)
    assert SequenceInfo.from_slot(info) is info


def test_rejects_packed_sequences_of_megatron_core():
    with pytest.raises(
        ValueError, match=r"packed_seq_params is a PackedSeqParams, .* SequenceInfo"
    ):
        SequenceInfo.from_slot(PackedSeqParams(qkv_format="thd"))
