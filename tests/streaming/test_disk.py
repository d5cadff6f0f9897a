"""Saved activations on disks: bit for bit, in any order of completion, and failures that are found.

Requests to the disk run late and in random order (:class:`LateThreads`), copies late
(:class:`LateStreams`).
"""

import contextlib
import errno
import fcntl
import os
import random
import re
from unittest import mock

import pytest
import torch

from megatron_untied.config import MemoryConfig
from megatron_untied.streaming import disk as disk_module
from megatron_untied.streaming.activation_policy import ActivationPolicy
from megatron_untied.streaming.copy_engine import CopyEngine
from megatron_untied.streaming.disk import ActivationDisk, require_folders
from megatron_untied.streaming.host_arena import (
    PAGE_BYTES,
    HostArena,
    HostSlot,
    _Segment,
    allocate_pageable,
)
from tests.support.full_disks import full_after, mounted
from tests.support.late_threads import LateThreads
from tests.support.simulated_streams import LateStreams

STRIPE = 2 * PAGE_BYTES


@pytest.fixture(autouse=True)
def small_stripes(monkeypatch):
    monkeypatch.setattr(disk_module, "STRIPE_BYTES", STRIPE)


def arena_on(*folders, seed: int = 0, **options) -> HostArena:
    """Everything that waits for something comes as late as it may."""
    disk = ActivationDisk(list(map(str, folders)), threads=LateThreads(seed), **options)
    return HostArena(CopyEngine(LateStreams()), allocate_pageable, disk)


def random_values(number: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(256, (size,), dtype=torch.uint8, generator=generator)


def stored(arena: HostArena, values: torch.Tensor) -> HostSlot:
    """A slot that only the disk has."""
    slot = arena.reserve(values.shape, values.dtype)
    slot.write(values).wait()
    slot.to_disk()
    slot.leave()
    return slot


def contents(slot: HostSlot) -> torch.Tensor:
    out = torch.empty(slot.shape, dtype=slot.dtype)
    slot.read(out).wait()
    return out


def corrupt(arena: HostArena, at: int) -> None:
    """Flip one bit of the first file."""
    path = f"/proc/self/fd/{arena.disk.open()._files[0].fileno()}"
    with open(path, "r+b", buffering=0) as file:  # not O_DIRECT, which takes whole pages only
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 4]), at)
        os.fsync(file.fileno())


@pytest.mark.parametrize("num_folders", [1, 2, 3])
def test_what_went_to_the_disks_comes_back_bit_for_bit(tmp_path, num_folders):
    folders = [tmp_path / str(i) for i in range(num_folders)]
    for folder in folders:
        folder.mkdir()
    arena = arena_on(*folders)
    values = [random_values(i, size) for i, size in enumerate((1, 4096, 5000, 40_000, 8192, 3))]
    slots = [stored(arena, each) for each in values]
    assert arena.used_bytes == 0
    for slot, expected in reversed(list(zip(slots, values, strict=True))):
        assert torch.equal(contents(slot), expected)
        slot.release()
    assert arena.disk.written_bytes == arena.disk.read_bytes == arena.disk.reserved_bytes
    assert [list(folder.iterdir()) for folder in folders] == [[]] * num_folders  # no names


class RandomProgram:
    """Slots that are written, sent to the disk, fetched, read and released in a random order."""

    def __init__(self, folder, seed: int):
        self.random = random.Random(seed)
        self.arena = arena_on(folder, seed=seed, capacity_bytes=6 * PAGE_BYTES)
        self.arena.disk.postpones_failures = True
        self.slots, self.values, self.wrong = {}, {}, 0

    def run(self, num_operations: int = 60) -> int:
        """Reads that saw other bytes than those written."""
        for number in range(num_operations):
            chosen = self.random.randrange(4)
            if chosen not in self.slots:
                self.values[chosen] = random_values(number, self.random.choice([4096, 8192]))
                slot = self.arena.reserve(self.values[chosen].shape, torch.uint8)
                passing = self.values[chosen].clone()
                slot.write(passing).wait()
                passing.fill_(0)  # the device's memory is used again
                self.slots[chosen] = slot
                if self.random.random() < 0.8:
                    slot.to_disk()
                continue
            slot = self.slots[chosen]
            match self.random.choice(["leave", "fetch", "read", "release"]):
                case "leave":
                    slot.leave()
                case "fetch":
                    slot.fetch()
                case "read":
                    self.wrong += not torch.equal(contents(slot), self.values[chosen])
                case "release":
                    self.slots.pop(chosen).release()
        return self.wrong


@pytest.mark.parametrize("seed", range(30))
def test_no_order_of_completion_changes_what_is_read(tmp_path, seed):
    program = RandomProgram(tmp_path, seed)
    assert program.run() == 0
    program.arena.disk.require_no_failure()
    assert program.arena.disk.reserved_bytes <= 6 * PAGE_BYTES


LEFT_OUT = {
    "the disk has written before memory is given away": (HostSlot, "leave"),
    "the disk has read before memory is used": (HostSlot, "read"),
    "the disk has written before its space is given away": (HostSlot, "release"),
}


@pytest.mark.parametrize("edge", LEFT_OUT)
def test_every_wait_for_the_disk_is_needed(tmp_path, edge):
    owner, name = LEFT_OUT[edge]
    method = getattr(owner, name)

    def without_wait(self, *args, **kwargs):
        with mock.patch.object(ActivationDisk, "wait", return_value=None):
            return method(self, *args, **kwargs)

    def failed_or_wrong(seed: int) -> bool:
        program = RandomProgram(tmp_path, seed)
        # What is read before it was written has no checksum yet.
        return program.run() > 0 or program.arena.disk._failure is not None

    with mock.patch.object(owner, name, without_wait):
        assert any(map(failed_or_wrong, range(60)))


def test_a_late_request_counts_in_the_phase_that_waits(tmp_path, monkeypatch):
    """Not in the one that started it, and not where it is over by then."""
    arena, phase = arena_on(tmp_path), "forward"
    arena.engine.waits.phase = lambda: phase
    streams, read = arena.engine.streams, os.preadv

    def late(*args):
        streams.clock += 100
        return read(*args)

    monkeypatch.setattr(os, "preadv", late)
    slot = stored(arena, random_values(0, PAGE_BYTES))
    assert arena.engine.waits.take() == {("host", "forward"): 1.0, ("disk", "forward"): 0.0}
    slot.fetch()
    phase = "backward"
    contents(slot)
    contents(slot)
    slot.release()
    assert arena.engine.waits.take() == {("host", "backward"): 2.0, ("disk", "backward"): 100.0}


@pytest.mark.parametrize("copy", ["the copy out", "the copy in"])
def test_the_disk_waits_for_copies(tmp_path, copy):
    """Before it reads the memory of a copy from the device, or overwrites that of one to it."""
    arena = arena_on(tmp_path)

    def is_right(number: int) -> bool:
        values = random_values(number, PAGE_BYTES)
        if copy == "the copy out":  # compute does not wait for it
            slot = arena.reserve(values.shape, torch.uint8)
            slot.write(values)
            slot.to_disk()
            slot.leave()
            return torch.equal(contents(slot), values)
        on_disk = stored(arena, random_values(number + 1, PAGE_BYTES))
        slot, out = arena.reserve(values.shape, torch.uint8), torch.empty_like(values)
        slot.write(values).wait()
        arriving = slot.read(out)
        slot.release()
        contents(on_disk)  # into the same memory
        arriving.wait()
        return torch.equal(out, values)

    assert is_right(0)
    with mock.patch.object(_Segment, "after", return_value=[]):
        assert not is_right(2)


def test_a_full_disk_leaves_the_rest_on_the_host(tmp_path):
    arena = arena_on(tmp_path, capacity_bytes=3 * PAGE_BYTES)
    slots = [stored(arena, random_values(i, PAGE_BYTES)) for i in range(5)]
    assert arena.disk.reserved_bytes == 3 * PAGE_BYTES
    assert arena.used_bytes == 2 * PAGE_BYTES
    assert all(
        torch.equal(contents(slot), random_values(i, PAGE_BYTES)) for i, slot in enumerate(slots)
    )


def test_space_is_used_again(tmp_path):
    arena = arena_on(tmp_path)
    for _ in range(10):
        slots = [stored(arena, random_values(i, PAGE_BYTES)) for i in range(3)]
        slots.pop().release()
        del slots  # a graph that is dropped releases them
    assert arena.disk.reserved_bytes == 3 * PAGE_BYTES
    arena.trim()
    assert arena.disk.reserved_bytes == 0
    assert os.fstat(arena.disk.open()._files[0].fileno()).st_size == 3 * PAGE_BYTES


def test_a_bit_that_flipped_is_found(tmp_path):
    arena = arena_on(tmp_path)
    values = random_values(0, 5 * PAGE_BYTES)
    slot = stored(arena, values)
    corrupt(arena, at=3 * PAGE_BYTES + 7)
    with pytest.raises(OSError, match=rf"--activation-disk {tmp_path}: .*crc32 differs"):
        contents(slot)
    arena.disk.postpones_failures = True
    # The request that failed is NaN; the first failure is kept, and nothing is read after it.
    assert contents(slot).view(torch.bfloat16).isnan().all()
    with pytest.raises(OSError, match="crc32 differs"):
        arena.disk.require_no_failure()


def test_without_checksums_it_is_not(tmp_path):
    arena = arena_on(tmp_path, checksums=False)
    values = random_values(0, PAGE_BYTES)
    slot = stored(arena, values)
    corrupt(arena, at=7)
    assert (contents(slot) != values).sum() == 1


def test_a_file_that_is_too_short_is_found(tmp_path):
    arena = arena_on(tmp_path)
    slot = stored(arena, random_values(0, 3 * PAGE_BYTES))
    os.ftruncate(arena.disk.open()._files[0].fileno(), 2 * PAGE_BYTES)
    with pytest.raises(OSError, match="failed to read saved activations: the file ends after 0 of"):
        contents(slot)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_an_error_of_the_device_is_found(tmp_path, call, monkeypatch):
    arena = arena_on(tmp_path)

    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, failing)
    verb = "write" if call == "pwritev" else "read"
    with pytest.raises(OSError, match=f"failed to {verb} saved activations: Input/output error"):
        contents(stored(arena, random_values(0, PAGE_BYTES)))


def test_parts_of_a_request_are_put_together(tmp_path, monkeypatch):
    """The kernel may write or read less than was asked for."""
    for call in ("pwritev", "preadv"):
        whole = getattr(os, call)
        monkeypatch.setattr(
            os, call, lambda fd, parts, at, whole=whole: whole(fd, [parts[0][:PAGE_BYTES]], at)
        )
    values = random_values(0, 2 * STRIPE)
    assert torch.equal(contents(stored(arena_on(tmp_path), values)), values)


def test_no_room_is_said_with_what_is_free(tmp_path):
    arena = arena_on(tmp_path)
    with full_after(10 * PAGE_BYTES):
        with pytest.raises(OSError, match=r"has no room for 0\.00 GiB .* give a smaller --activ"):
            arena.disk.open(20 * PAGE_BYTES)
        # Later in a run it is the first failure, which ends the step.
        stored(arena, random_values(0, PAGE_BYTES))
        arena.disk.postpones_failures = True
        stored(arena, random_values(0, 20 * PAGE_BYTES))
    with pytest.raises(OSError, match="has no room"):
        arena.disk.require_no_failure()


def test_no_room_on_a_small_file_system_is_found_at_the_start(tmp_path):
    with mounted("tmpfs", tmp_path, 16 * PAGE_BYTES):
        arena_on(tmp_path).disk.open(16 * PAGE_BYTES)
        with pytest.raises(OSError, match=r"has no room for .*No space left on device"):
            arena_on(tmp_path).disk.open(17 * PAGE_BYTES)


@pytest.mark.parametrize("kind", ["ext2", "double"])
def test_where_space_cannot_be_reserved_a_full_disk_is_found_at_a_write(tmp_path, kind):
    folder, values = tmp_path / "disk", [random_values(i, 20 * PAGE_BYTES) for i in range(15)]
    folder.mkdir()
    refused = mock.patch.object(os, "posix_fallocate", side_effect=OSError(errno.EOPNOTSUPP, ""))
    with contextlib.ExitStack() as stack:
        if kind == "ext2":
            stack.enter_context(mounted(kind, folder, 1 << 20))
        else:
            stack.enter_context(refused)
            stack.enter_context(full_after(250 * PAGE_BYTES))
        arena = arena_on(folder)
        arena.disk.open(300 * PAGE_BYTES)  # more than there is
        assert f"; {folder} cannot reserve space: if it is full," in arena.disk.describe()
        arena.disk.postpones_failures = True
        slots = [stored(arena, each) for each in values]
        assert all((contents(slot) == disk_module.POISON).all() for slot in slots)
    what = "No space left on device" if kind == "ext2" else "File too large"
    with pytest.raises(OSError, match=f"{folder} failed to write saved activations: {what}"):
        arena.disk.require_no_failure()


def test_a_file_system_without_direct_access_is_named(tmp_path, monkeypatch):
    real = fcntl.fcntl

    def refusing(descriptor, command, *flags):
        if command == fcntl.F_SETFL and flags[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, command, *flags)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    arena, values = arena_on(tmp_path), random_values(0, PAGE_BYTES)
    assert torch.equal(contents(stored(arena, values)), values)
    assert arena.disk.describe().endswith(
        f"in {tmp_path}; no O_DIRECT in {tmp_path}: data passes the page cache"
    )


def test_folders_are_checked(tmp_path):
    require_folders([str(tmp_path)])
    missing = tmp_path / "missing"
    with pytest.raises(ValueError, match=f"{re.escape(str(missing))} is not a folder on this node"):
        require_folders([str(tmp_path), str(missing)])


def test_threads_read_and_write_at_once(tmp_path):
    """The real ones, on copies that are done at once."""
    memory = MemoryConfig(activation_disk=(str(tmp_path),))
    arena = HostArena.for_device(torch.device("cpu"), memory)
    values = [random_values(i, 50 * PAGE_BYTES) for i in range(8)]
    slots = []
    for each in values:
        slots.append(arena.reserve(each.shape, each.dtype))
        slots[-1].write(each).wait()
        slots[-1].to_disk()
    for slot in slots:
        slot.leave()
    for slot in slots:
        slot.fetch()
    assert all(map(torch.equal, map(contents, slots), values))


def test_the_first_layers_go_to_the_disk():
    def on_disk(kind: str, every: int, host: int) -> list[int]:
        memory = MemoryConfig(
            recompute_granularity=kind,
            recompute_num_layers=every,
            cpu_offloading_num_layers=host,
            activation_disk=("a",),
        )
        layers = ActivationPolicy.of(memory, 8).layers
        return [index for index, layer in enumerate(layers) if layer.goes_to_disk]

    assert on_disk("selective", 1, 8) == [0, 1, 2, 3, 4, 5]
    assert on_disk("selective", 4, 6) == [0, 1, 2, 3]
    assert on_disk("full", 2, 8) == [0, 2]
    assert on_disk("full", 1, 2) == []
