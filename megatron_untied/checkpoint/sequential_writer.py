"""The writer behind PyTorch's distributed checkpoints, with one tensor on the host at a time."""

import os
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class SequentialWriter(dcp.FileSystemWriter):
    """Asks the planner for a tensor, writes it and lets it go before it asks for the next.

    The writer it inherits from (torch 2.13) keeps the host copy of every tensor until its file is
    complete: a second copy of the weights and moments of a rank, or of a whole model that is
    converted. The files are the same.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items, in their order, to one file."""
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        with open(Path(self.path) / name, "wb") as file:
            results = [_write(item, planner.resolve_data(item), file, name) for item in plan.items]
            file.flush()
            os.fsync(file.fileno())
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def _write(item: WriteItem, tensor: Tensor, file: BinaryIO, name: str) -> WriteResult:
    start = file.tell()
    tensor = tensor.detach().cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # torch.save writes the whole storage
    torch.save(tensor, file)
    length = file.tell() - start
    return WriteResult(
        index=item.index, size_in_bytes=length, storage_data=_StorageInfo(name, start, length)
    )
