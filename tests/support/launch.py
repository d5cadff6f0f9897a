"""Start ranks as a launcher does: processes of their own, which are told their place alone."""

import os
import socket
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from tests.support.ranks import _context


def launch(
    function: Callable,
    world_size: int,
    folder: Path,
    *args: Any,
    wait_for: Collection[int] | None = None,
    timeout: float = 120,
) -> list[str]:
    """Call ``function(rank, *args)`` in ``world_size`` processes; what each has printed.

    The message of a ``SystemExit`` is printed too. Those that are not in ``wait_for`` (None: all)
    are ended once the others have.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [folder / f"rank{rank}.txt" for rank in range(world_size)]
    processes = [
        _context.Process(target=_run, args=(function, rank, world_size, port, str(path), args))
        for rank, path in enumerate(paths)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    for rank in range(world_size) if wait_for is None else wait_for:
        processes[rank].join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()
    return [path.read_text() for path in paths]


def _run(function: Callable, rank: int, world_size: int, port: int, path: str, args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ |= {  # noqa: TID251 - as torchrun tells a process its rank
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    sys.stdout = sys.stderr = open(path, "w", buffering=1)
    try:
        function(rank, *args)
    except SystemExit as exit_:
        sys.stdout.write(f"{exit_}\n")
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo may still wait for a rank that is gone
