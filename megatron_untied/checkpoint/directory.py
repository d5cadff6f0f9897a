"""Folders of checkpoints in Megatron's layout, updated so that a crash never loses the last one.

``iter_0000100/`` is complete as soon as it has that name. It is filled under another name first,
and ``latest_checkpointed_iteration.txt`` names it only after everything is on the disk. That other
name has the id of the run, so runs that save into one directory leave each other's alone. The small
files of a checkpoint are written and read here too, durably and as strict JSON.
"""

import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from megatron_untied.config.problems import first_few

TRACKER = "latest_checkpointed_iteration.txt"
INCOMPLETE = ".incomplete"
REPLACED = ".replaced"
LFS_POINTER = b"version https://git-lfs.github.com/spec/"

logger = logging.getLogger(__name__)


def find_checkpoint(directory: Path, iteration: int | None = None) -> Path | None:
    """The folder of ``iteration``, or of the latest; None if nothing was ever saved here.

    Raises:
        ValueError: the iteration is not there, the tracker file does not name one that is, or
            ``directory`` is a file or one checkpoint itself.
    """
    if directory.is_file():
        raise ValueError(
            f"{directory} is a file; give the folder with {TRACKER}, {directory.parent}"
        )
    name = directory.resolve().name  # also of a link, or of "."
    if re.fullmatch(r"iter_\d+", name) and not (directory / TRACKER).exists():
        raise ValueError(
            f"{directory} is one checkpoint; give the folder that it is in, {directory.parent}, "
            f"with --ckpt-step {int(name[5:])} to choose it"
        )
    source = "--ckpt-step"
    if iteration is None:
        source = str(directory / TRACKER)
        if (iteration := latest_iteration(directory)) is None:
            if iterations(directory):
                raise ValueError(
                    f"{directory} has no {TRACKER} to name the latest checkpoint; "
                    f"{_available(directory)}"
                )
            return None
    # A crash inside publish() can leave the earlier checkpoint of this iteration alone.
    for ending in ("", REPLACED):
        if (folder := iteration_folder(directory, iteration, ending)).is_dir():
            return folder
    raise ValueError(f"{source} names iteration {iteration}; {_available(directory)}")


def latest_iteration(directory: Path) -> int | None:
    """The iteration in the tracker file; None without one.

    Raises:
        ValueError: it does not hold an iteration.
    """
    tracker = directory / TRACKER
    if not tracker.is_file():
        return None
    # A damaged file may hold any bytes; and str.isdigit() accepts digits that int() does not.
    text = tracker.read_bytes().decode(errors="replace").strip()
    if not (text.isascii() and text.isdigit()):
        raise ValueError(
            f"{tracker} holds {text[:40]!r}, not an iteration; {_available(directory)}"
        )
    return int(text)


def iteration_folder(directory: Path, iteration: int, ending: str = "") -> Path:
    """The folder of the checkpoint of an iteration.

    With the ending ``REPLACED`` that of a checkpoint while another of the same iteration takes its
    place.
    """
    return directory / f"iter_{iteration:07d}{ending}"


def staging_folder(directory: Path, iteration: int, run_id: str | None = None) -> Path:
    """The folder in which a run assembles the checkpoint of an iteration."""
    return iteration_folder(directory, iteration, _staging_ending(run_id))


def _staging_ending(run_id: str | None) -> str:
    return f".{run_id}{INCOMPLETE}" if run_id else INCOMPLETE


def make_writable(directory: Path, flag: str) -> None:
    """Create ``directory``, the value of ``flag``, if it does not exist.

    Raises:
        ValueError: it cannot be created, is no folder, or is not writable.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # A file: permission bits do not tell of read-only mounts, quotas or root squashing.
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise ValueError(
            f"{flag} {directory}: {error.strerror}; give a folder that can be written to"
        ) from error


def start(directory: Path, iteration: int, run_id: str | None = None) -> None:
    """Create an empty staging folder; removes those that a crash of this run has left.

    Those of other runs stay, with a warning: such a run may be saving now.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # `.replaced.<run>.incomplete` is what retire() left when it was killed while deleting.
    own = re.compile(rf"iter_\d+({re.escape(REPLACED)})?{re.escape(_staging_ending(run_id))}")
    for leftover in sorted(directory.glob(f"iter_*{INCOMPLETE}")):
        if own.fullmatch(leftover.name):
            shutil.rmtree(leftover)
        else:
            logger.warning(
                "%s was not written by this run and stays; delete it if no other run is saving it",
                leftover,
            )
    # Without exist_ok: another process with this run's id would write into the same folder.
    staging_folder(directory, iteration, run_id).mkdir()


def discard(directory: Path, iteration: int, run_id: str | None = None) -> None:
    """Delete the staging folder of a save that failed, and give its space back, if possible."""
    shutil.rmtree(staging_folder(directory, iteration, run_id), ignore_errors=True)


def describe_skipped(directory: Path) -> list[str]:
    """Lines about what is in ``directory`` and is not loaded, although it is later than what is."""
    lines = []
    if partial := sorted(path.name for path in directory.glob(f"iter_*{INCOMPLETE}")):
        lines.append(
            f"{directory}: {first_few(partial, 3)} was not saved completely, and is skipped"
        )
    latest = latest_iteration(directory)
    # Left by a crash or a full disk before the tracker was written, or by --ckpt-step.
    later = [found for found in iterations(directory) if latest is not None and found > latest]
    if later:
        lines.append(
            f"{directory}: {TRACKER} names iteration {latest}, so {first_few(map(str, later), 3)} "
            f"is skipped; --ckpt-step {later[-1]} loads it"
        )
    return lines


def checkpoint_names(directory: Path) -> list[str]:
    """Names in ``directory`` of checkpoints and of the tracker, whichever run wrote them."""
    folders = (path.name for path in directory.glob("iter_*"))
    found = [name for name in folders if name[5:].removesuffix(REPLACED).isdigit()]
    return sorted(found) + [TRACKER] * (directory / TRACKER).exists()


def publish(directory: Path, iteration: int, run_id: str | None = None) -> None:
    """Give the filled folder its name, then move the tracker to it.

    Called by one rank, after all ranks have written and flushed their files.
    """
    folder = iteration_folder(directory, iteration)
    replaced = iteration_folder(directory, iteration, REPLACED)
    staging = staging_folder(directory, iteration, run_id)
    flush_folder(staging)  # before the rename: a complete name must mean complete content
    if folder.exists():
        # An earlier checkpoint of this iteration: until the next rename readers use `replaced`.
        # POSIX replaces a folder by rename only if it is empty, so there is no single step.
        retire(replaced, run_id)
        folder.rename(replaced)
    staging.rename(folder)
    flush_folder(directory)  # the new name must be on the disk before the tracker points to it
    write_durably(directory / TRACKER, f"{iteration}\n".encode())
    retire(replaced, run_id)  # last: until here it is what a crash would fall back to


def retire(folder: Path, run_id: str | None = None) -> None:
    """Delete the folder of a checkpoint, if it is there.

    It is renamed first: a crash meanwhile leaves no folder under a complete name, and the next
    :func:`start` of this run removes the rest.
    """
    if folder.exists():
        shutil.rmtree(folder.rename(folder.with_name(folder.name + _staging_ending(run_id))))


def write_durably(path: Path, data: bytes) -> None:
    """Write a file atomically: after a crash it is complete or absent, never partial."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # before the rename, which may reach the disk earlier
        partial.replace(path)  # atomic within a file system
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write ``values`` as indented JSON, durably.

    Other types than JSON's, such as dtypes and paths, are written as their text.
    """
    write_durably(path, (json.dumps(values, indent=2, default=str) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file, which must be an object without repeated keys.

    Raises:
        ValueError: the file is missing or not such an object.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing: {path.parent} is not a whole checkpoint")
    return read_object(path, "choose another with --ckpt-step")


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The object in any file of JSON that a user may have made or damaged.

    Raises:
        ValueError: it is no object, or has a key twice; the message ends with ``remedy``.
    """
    require_content(path)
    try:
        values = json.loads(path.read_bytes(), object_pairs_hook=_require_unique_keys)
    except (ValueError, RecursionError) as error:  # values nested by thousands
        raise ValueError(f"{path} is not JSON: {error}; {remedy}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object; {remedy}")
    return values


def require_content(path: Path) -> None:
    """Check that a file is there with its content: no broken link, and no Git LFS pointer to it.

    Raises:
        OSError: the file, or what it is a link to, is not there.
        ValueError: a pointer, with the command that downloads the content.
    """
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(
            f"{path} is a link to {path.readlink()}, which is not there; copy such a folder with "
            "the files that it links to (cp -L), or download it again"
        )
    # A clone without Git LFS has text of three lines in place of each large file.
    with open(path, "rb") as file:
        start = file.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        raise ValueError(
            f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in {path.parent}"
        )


def damaged(folder: Path, what: str, *, also: str = "") -> str:
    """The message for a checkpoint that cannot be used, with the remedy; ``also`` is another."""
    return f"{folder} is not a whole checkpoint: {what}. Choose another with --ckpt-step" + (
        f", or {also}." if also else "."
    )


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk: fsync of a file leaves out its name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json.loads would keep the last of several values without an error.
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in values if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} is there more than once; remove all but one")
    return values


def iterations(directory: Path) -> list[int]:
    """Iterations of the complete checkpoints in ``directory``, ascending."""
    names = (path.name.removeprefix("iter_") for path in directory.glob("iter_*"))
    return sorted(int(name) for name in names if name.isdigit())  # complete ones alone


def _available(directory: Path) -> str:
    found = iterations(directory)
    if not found:
        return f"{directory} has no checkpoint at all"
    listed = ", ".join(map(str, found))
    return f"{directory} has {listed}: choose with --ckpt-step {found[-1]}"
