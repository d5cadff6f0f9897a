"""Reads the index of a checkpoint's tensors, DCP's ``.metadata``, as data and nothing else.

The file is a pickle: read as DCP reads it, it could call any function of any module. Here it can
make the few classes of an index, and what it says must hold together: every tensor is covered once,
by slices in files of the checkpoint's own folder that do not overlap.
"""

import io
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout
from typing_extensions import override

from megatron_untied.checkpoint.directory import damaged, require_content
from megatron_untied.config.problems import in_one_line

INDEX = ".metadata"

# BytesStorageMetadata is not among them: DCP unpickles the files of such entries.
_CLASSES: dict[tuple[str, str], Callable] = {
    (made.__module__, made.__name__): made
    for made in (
        *(Metadata, StorageMeta, MetadataIndex, _StorageInfo, _MEM_FORMAT_ENCODING, _get_layout),
        *(TensorStorageMetadata, TensorProperties, ChunkStorageMetadata, torch.Size),
    )
}
# Where it was saved; the module depends on Python's version.
_CLASSES |= {(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")}


class _IndexUnpickler(pickle._Unpickler):
    # The one in Python, at about 1 us for each step: that in C reserves as much memory as a damaged
    # number in the file asks for.
    @override
    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        found = _CLASSES.get((module, name), dtype if isinstance(dtype, torch.dtype) else None)
        if found is None:
            raise pickle.UnpicklingError(f"it names {f'{module}.{name}'!r}, which no index has")
        return found


def read_index(folder: Path) -> Metadata:
    """The index of the checkpoint in ``folder``.

    Raises:
        ValueError: it is missing or a Git LFS pointer; it holds other objects than an index does,
            or places a slice outside of the folder; its slices do not make up its tensors.
    """
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(damaged(folder, f"{INDEX} is missing"))
    require_content(path)
    try:
        index = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
        problem = next(_problems(index), None)
    except Exception as error:  # a damaged pickle can raise any exception
        reason = f"{INDEX}: {type(error).__name__} {in_one_line(error)}"
        raise ValueError(damaged(folder, reason)) from error
    if problem is not None:
        raise ValueError(damaged(folder, f"{INDEX}: {problem}"))
    return index


def _problems(index: Metadata) -> Iterator[str]:
    """What does not hold together; whatever has another type than it should raises something."""
    places: list[tuple[str, int, int]] = []
    for key, stored in index.storage_data.items():
        name, start, length = stored.relative_path, stored.offset, stored.length
        if Path(name).name != name or not isinstance(key, MetadataIndex):
            yield f"it places a slice in {name!r}, which is not a file of the folder"
        if type(start) is not int or type(length) is not int or start < 0 or length < 1:
            yield f"it places {key.fqn!r} at {start!r}, {length!r} bytes"
        if stored.transform_descriptors:
            yield f"{key.fqn!r} is stored in a way that is not read here"
        places.append((name, start, start + length))
    # Two entries of one place would give a tensor the values of another.
    places.sort()
    for (name, _, end), (following, start, _) in zip(places, places[1:], strict=False):
        if name == following and start < end:
            yield f"two slices overlap in {name}, at {start}"
    slices = {(key.fqn, tuple(key.offset)) for key in index.storage_data}
    for name, tensor in index.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata) or not isinstance(name, str):
            yield f"{name!r} is no tensor"
        # DCP would leave what no slice covers as it is in memory, without an error.
        if not _is_covered_once(tensor):
            stored = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            yield f"{name!r} has {stored} of {math.prod(tensor.size)} elements, or not each once"
        if any((name, tuple(chunk.offsets)) not in slices for chunk in tensor.chunks):
            yield f"a slice of {name!r} is in no file"


def _is_covered_once(tensor: TensorStorageMetadata) -> bool:
    """Whether the slices of a tensor make it up: counted in the grid that their edges form."""
    shape = tuple(tensor.size)
    boxes = [list(zip(c.offsets, c.sizes, strict=True)) for c in tensor.chunks]
    if math.prod(shape) == 0 or any(len(box) != len(shape) for box in boxes):
        return math.prod(shape) == 0
    edges = [
        sorted({0, shape[dim]} | {at for box in boxes for at in (box[dim][0], sum(box[dim]))})
        for dim in range(len(shape))
    ]
    if any((own[0], own[-1]) != (0, size) for own, size in zip(edges, shape, strict=True)):
        return False
    places = [{edge: place for place, edge in enumerate(own)} for own in edges]
    counts = np.zeros([len(own) - 1 for own in edges], np.int32)
    for box in boxes:
        inside = zip(box, places, strict=True)
        counts[tuple(slice(at[start], at[start + size]) for (start, size), at in inside)] += 1
    return bool((counts == 1).all())
