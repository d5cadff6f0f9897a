"""Tensors in the form that PyTorch's distributed checkpoint (DCP) reads and writes: global slices.

A :class:`GlobalTensor` is one tensor of the whole model with this rank's slices of it.
:func:`write_tensors` and :class:`TensorReader` move them to and from files; the classes below adapt
DCP's planners, reader and writer to slices that are neither DTensors nor copied as a whole.
"""

import io
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_plan,
)
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from megatron_untied.checkpoint.checksums import ChecksummedFile, Checksums, Part
from megatron_untied.checkpoint.collective_errors import raise_on_all_ranks
from megatron_untied.checkpoint.index import read_index
from megatron_untied.sharding.parameter_layout import GlobalSlice
from megatron_untied.sharding.tensor_slice import TensorSlice

BLOCK_ELEMENTS = 1 << 24
"""Largest slice in a file, 64 MiB in fp32: to read a part of a slice, DCP reads all of it."""


class GlobalTensor:
    """One tensor of the whole model and the slices of it that this rank holds.

    Several ranks may offer the same slice: DCP chooses the rank with the least to write.
    """

    def __init__(self, shape: tuple[int, ...], slices: Iterable[GlobalSlice]):
        self.shape = torch.Size(shape)
        self.slices = {torch.Size(part.offsets): part.tensor for part in slices}

    def size(self) -> torch.Size:
        """The global shape.

        DCP compares it with the file's, for objects that have a method of this name.
        """
        return self.shape

    def to_write(self, offsets: torch.Size) -> Tensor:
        """The slice at ``offsets``; called once, immediately before it is written.

        Subclasses may read or convert it here, so that one slice at a time is in memory.
        """
        return self.slices[offsets]

    # DCP's protocol for tensors of other libraries: what to write, and what to read into.
    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets, part.size()),
                    properties=TensorProperties.create_from_tensor(part),
                    size=self.shape,
                ),
            )
            for offsets, part in self.slices.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, part.size()) for offsets, part in self.slices.items()]


def in_blocks(slices: Iterable[GlobalSlice]) -> Iterator[GlobalSlice]:
    """The same slices, split by :func:`row_blocks`, as views."""
    for part in slices:
        for tensor_slice in row_blocks(TensorSlice(part.offsets, tuple(part.tensor.shape))):
            inside = tensor_slice.shifted([-offset for offset in part.offsets])
            yield GlobalSlice(tensor_slice.offsets, inside.view(part.tensor))


def row_blocks(tensor_slice: TensorSlice) -> Iterator[TensorSlice]:
    """``tensor_slice`` split along dimension 0 into at most ``BLOCK_ELEMENTS``, in order."""
    start, num_rows = tensor_slice.offsets[0], tensor_slice.sizes[0]
    # A row that is larger alone stays whole: rows are contiguous in files, parts of them are not.
    at_once = max(1, BLOCK_ELEMENTS // math.prod(tensor_slice.sizes[1:]))
    for row in range(0, num_rows, at_once):
        rows = min(at_once, num_rows - row)
        yield TensorSlice((start + row, *tensor_slice.offsets[1:]), (rows, *tensor_slice.sizes[1:]))


def write_tensors(folder: Path, tensors: Mapping[str, GlobalTensor]) -> dict[Part, int]:
    """Write every rank's slices to the disk; collective over all ranks.

    Returns:
        The checksums of what this rank has written.

    Raises:
        OSError: on every rank, if any of them could not write.
        CheckpointException: on every rank, if the slices of all ranks do not make up the tensors.
    """
    # The state dict is flat already, and its values are no tensors that torch could flatten.
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = SequentialWriter(folder)
    with _with_or_without_ranks(), _os_errors():
        dcp.save(dict(tensors), storage_writer=writer, planner=planner)
    return writer.checksums


class TensorReader(dcp.FileSystemReader):
    """Reads tensors of one checkpoint, all at once or in several calls that share one index.

    Each slice is compared with its checksum, if the checkpoint has checksums.
    """

    def __init__(self, folder: Path):
        """Raises ``ValueError`` if the index is damaged, or the checksums themselves."""
        super().__init__(folder)
        self._checksums = Checksums.read(Path(folder))
        # Not DCP's own way, which unpickles whatever the file names.
        self._index = read_index(Path(folder))
        self._index.storage_meta = StorageMeta(load_id=self.load_id)

    @override
    def read_metadata(self, *args, **kwargs) -> Metadata:
        """The index, read once: it has an entry for every slice, and DCP asks in every call."""
        return self._index

    @override
    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> IO[bytes]:
        if self._checksums is None:
            return super()._slice_file(file, sinfo)
        # One read, from which torch.load then takes the tensor: a slice at a time is in memory.
        file.seek(sinfo.offset)
        data = file.read(sinfo.length)
        self._checksums.require(Part(sinfo.relative_path, sinfo.offset, len(data)), data)
        return io.BytesIO(data)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor in the files."""
        return self.read_metadata().state_dict_metadata[name].properties.dtype

    def read(
        self,
        tensors: Mapping[str, GlobalTensor],
        advance: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """Fill every rank's slices in place, from any sharding and dtype; collective.

        ``advance`` is called with the bytes of each slice that has been filled.

        Raises:
            CheckpointException: on every rank, if any of them could not read, or read bytes that
                have changed since they were saved.
        """
        with _with_or_without_ranks():
            dcp.load(dict(tensors), storage_reader=self, planner=_LoadPlanner(advance))


class _SavePlanner(DefaultSavePlanner):
    @override
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        # Called by the writer's resolve_data, not while planning: a slice can be read here.
        return self.state_dict[index.fqn].to_write(index.offset)


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, advance: Callable[[int], None]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._advance = advance

    @override
    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False) -> None:
        # The inherited method replaces objects that are not tensors by None.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    @override
    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].slices[index.offset]

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        # `tensor` is the view that was filled: bytes in this run's dtype, not in the file's.
        self._advance(tensor.nbytes)


@contextmanager
def _with_or_without_ranks() -> Iterator[None]:
    """In a process without a process group, such as a converter: no warning, and plain errors."""
    if dist.is_initialized():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except CheckpointException as error:
            ((failure, _),) = error.failures.values()  # of the only rank
            raise failure from error


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise an ``OSError`` of a rank as such, with the number of that rank."""
    try:
        yield
    except CheckpointException as error:
        for rank, (failure, _) in sorted(error.failures.items()):
            if isinstance(failure, OSError):
                raise OSError(f"{failure} (rank {rank})") from error
        raise


class SequentialWriter(dcp.FileSystemWriter):
    """Obtains one tensor from the planner, writes it and releases it before the next.

    The base class (torch 2.13) holds the host copy of every tensor until its file is complete: a
    second copy of a rank's weights and moments, or of a whole model during conversion. The files
    are the same.
    """

    checksums: dict[Part, int]
    """Of the slices that this rank has written."""

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # DCP waits for a future; writing was synchronous, so it is complete.
        written: Future[list[WriteResult]] = Future()
        written.set_result(self._write_file(plan, planner.resolve_data))
        return written

    def _write_file(
        self, plan: SavePlan, resolve: Callable[[WriteItem], Tensor]
    ) -> list[WriteResult]:
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        with open(Path(self.path) / name, "wb") as file:
            summed = ChecksummedFile(file)
            # In a function, whose return releases the tensor before the next one is resolved.
            results = [_write(item, resolve(item), summed, name) for item in plan.items]
            file.flush()
            os.fsync(file.fileno())  # a checkpoint is published only when it is on the disk
        self.checksums = summed.parts
        return results


class StagingWriter(SequentialWriter):
    """Copies what this rank will write to the host, and writes the copies later.

    ``prepare_write_data`` is what megatron-core's planning of asynchronous saves calls. The files
    are those of :class:`SequentialWriter`.
    """

    results: list[WriteResult]
    """What :meth:`write` has written."""

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Copy every slice of ``plan``, in pageable memory; returns when the copies are there."""
        self._plan = plan
        self._staged = {
            item.index: planner.resolve_data(item).detach().to("cpu", copy=True)
            for item in plan.items
        }

    def write(self) -> None:
        """Write the file and release each copy after it is written; for any thread."""
        self.results = self._write_file(self._plan, lambda item: self._staged.pop(item.index))


class StagedTensors:
    """Tensors that were copied to the host, to be written while training goes on.

    In the order: construct and :meth:`finish` in the training thread of all ranks, and between them
    ``writer.write()`` in any thread.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, GlobalTensor]):
        """Agree on who writes what, and copy this rank's part; collective over all ranks.

        Raises:
            CheckpointException: on every rank, if the slices of all ranks do not make up the
                tensors.
        """
        self.writer = StagingWriter(folder)
        planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planned, *_ = save_state_dict_async_plan(dict(tensors), self.writer, planner=planner)
        _, self._index, self._ranks = planned

    def finish(self) -> dict[Part, int]:
        """Write the index after all ranks have written their files; collective over them.

        Returns:
            The checksums of what this rank has written.

        Raises:
            OSError: on every rank, if rank 0 could not write.
        """
        # Not megatron-core's save_state_dict_async_finalize: if rank 0 cannot write the index, the
        # other ranks wait there for its answer.
        results = self._ranks.gather_object(self.writer.results)
        raise_on_all_ranks(
            lambda: self._ranks.is_coordinator and self.writer.finish(self._index, results)
        )
        return self.writer.checksums


def _write(item: WriteItem, tensor: Tensor, file: ChecksummedFile, name: str) -> WriteResult:
    tensor = tensor.detach().cpu()  # blocks until the copy has arrived; no copy of a host tensor
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # torch.save writes the whole storage, here of a view
    try:
        torch.save(tensor, file)
    except RuntimeError as error:
        raise file.failure or error from error
    part = file.end_part(name)
    return WriteResult(
        index=item.index,
        size_in_bytes=part.num_bytes,
        storage_data=_StorageInfo(name, part.offset, part.num_bytes),
    )
