"""Disks that fill up: file systems of a few pages, and a limit on the size of files."""

import contextlib
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def full_after(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def mounted(kind: str, folder: Path, num_bytes: int) -> Iterator[None]:
    """An empty file system of that size at ``folder``. Mounting takes root: else it skips.

    ``tmpfs`` reserves space for a file; ``ext2``, in an image beside the folder, cannot.
    """
    mount = ["mount", "-t", kind, "-o", f"size={num_bytes}", "none", str(folder)]
    if kind == "ext2":
        image = folder.with_suffix(".image")
        image.write_bytes(bytes(num_bytes))
        # Without reserved blocks, which root may use too; 16 inodes, or a small one has no room.
        subprocess.run(["mkfs.ext2", "-q", "-m", "0", "-N", "16", str(image)], check=True)
        mount[3:6] = ["-o", "loop", str(image)]
    made = subprocess.run(mount, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot mount {kind}: {made.stderr.strip()}")
    try:
        yield
    finally:
        # Lazily: a file of a rank that failed may be open until its memory is collected.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
