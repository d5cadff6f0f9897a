"""Caches sample indices in a folder: one rank computes and writes them, the others map the files.

Nodes need not share the folder. Ranks build their datasets in turns (:func:`in_turns`) and each one
computes what it does not find. So rank 0 writes to a folder that all nodes share, and the first
rank of a node to a folder of that node. Every rank verifies the checksums kept with the indices.
"""

import contextlib
import os
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from megatron_untied.checkpoint.collective_errors import gather_rare, raise_on_all_ranks
from megatron_untied.config.problems import in_one_line

T = TypeVar("T")
Arrays = tuple[np.ndarray, ...]

NUM_TURNS = 3


def in_turns(build: Callable[[], T]) -> T:
    """``build()``: on rank 0, then on the first rank of each other node, then on all others.

    Collective over all ranks, which all raise the error of the first that failed.
    ``build`` itself must not call collectives. It may take hours: the others wait for it outside
    of collectives, which have a timeout.
    """
    own_turn, result = 0, None
    if dist.is_initialized() and dist.get_rank() > 0:
        # Without LOCAL_RANK of a launcher, each rank may be alone on its node.
        own_turn = 1 if dist.get_node_local_rank(fallback_rank=0) == 0 else 2
    for turn in range(NUM_TURNS if dist.is_initialized() else 1):
        # Also a barrier between turns: the files of one turn are complete before the next looks.
        built = raise_on_all_ranks(build if turn == own_turn else lambda: None, _gather_at_leisure)
        if turn == own_turn:
            result = built
    return result


def _gather_at_leisure(value: Any) -> list[Any]:
    """A ``Gather`` that begins when all ranks have come to it, however long that takes."""
    if dist.is_initialized():
        store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        # All ranks count their turns in the same order, also those of several runs of a process.
        turn, pause = store.add(f"turns of rank {rank}", 1), 0.01
        store.add(f"ranks in turn {turn}", 1)
        # Asked again and again, as the store's own wait has a timeout too. Adding 0 asks.
        while store.add(f"ranks in turn {turn}", 0) < dist.get_world_size():
            time.sleep(pause)
            pause = min(1.0, 2 * pause)
    return gather_rare(value)


def cached_arrays(
    folder: Path | None, key: str, names: Sequence[str], make: Callable[[], Arrays]
) -> Arrays:
    """The arrays in ``folder/{key}-{name}.npy``, memory-mapped; ``make()`` computes missing ones.

    With ``folder`` None they are computed every time and stay in memory. Indices without
    ``folder/{key}-checksums.npy``, as earlier versions wrote them, are computed again.

    Raises:
        OSError: if the folder or a file cannot be written.
        ValueError: if a file is damaged or was changed after it was made.
    """
    if folder is None:
        return make()
    paths = [folder / f"{key}-{name}.npy" for name in (*names, "checksums")]
    try:
        # Listing makes a network file system look again for what another node has written.
        found = set(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        found = set()
    if not {path.name for path in paths} <= found:
        with _explain_errors(folder):  # first: the arrays take minutes to compute
            folder.mkdir(parents=True, exist_ok=True)
        arrays = make()
        with _explain_errors(folder):
            checksums = np.array(list(map(_checksum, paths[:-1], arrays)), np.uint32)
            # The checksums last: without their file the others count as missing.
            for path, array in zip(paths, (*arrays, checksums), strict=True):
                _write(path, array)
    maps = []
    for path in paths:
        try:
            maps.append(np.load(path, mmap_mode="r", allow_pickle=False))
        except Exception as error:  # numpy reads a damaged header as it would read Python
            raise _damaged(path, in_one_line(error)) from error
    # Also of arrays that this rank wrote: the file system may have stored something else.
    *arrays, checksums = maps
    for path, array in zip(paths[:-1], arrays, strict=True):
        if _checksum(path, array) not in checksums:
            raise _damaged(path, f"its content is not what {paths[-1].name} records")
    return tuple(arrays)


def _checksum(path: Path, array: np.ndarray) -> int:
    """Of name, type, shape and content: reads all of it, at 1 to 3 GB/s."""
    described = zlib.crc32(f"{path.name} {array.dtype.str} {array.shape}".encode())
    return zlib.crc32(np.ascontiguousarray(array), described)


@contextlib.contextmanager
def _explain_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            f"--data-cache-path: the sample indices cannot be written to {folder} "
            f"({error.strerror or error}); give --data-cache-path FOLDER, one that can be written "
            "to and has room for them"
        ) from error


def _write(path: Path, array: np.ndarray) -> None:
    """Write atomically; other ranks may write the same file at the same time."""
    # A unique name: two writers of one partial file would mix their content.
    partial = path.with_suffix(f".{uuid.uuid4().hex}.partial")
    try:
        with partial.open("xb") as file:
            np.save(file, array)
            file.flush()
            os.fsync(file)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _damaged(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"--data-cache-path: the sample index {path} is damaged or cannot be read ({reason}); "
        "delete it, and the next start writes it again"
    )
