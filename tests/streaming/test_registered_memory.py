"""Registration with CUDA, by a stand-in for ``torch.cuda.cudart()``."""

import os
from pathlib import Path

import pytest
import torch

from megatron_untied.streaming.host_arena import PAGE_BYTES, RegisteredMemory, allocate_pageable

CPU = torch.device("cpu")


class Cudart:
    """Registers memory, or refuses with ``error``; unregistering what is not registered fails."""

    def __init__(self, error: int = 0):
        self.error = error
        self.num_calls, self.registered = 0, {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.num_calls += 1
        if self.error == 0:
            self.registered[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return "out of memory"


def test_registers_exactly_its_pages_for_as_long_as_it_lives():
    cudart = Cudart()
    memory = RegisteredMemory(cudart, CPU)(3 * PAGE_BYTES)
    assert cudart.registered == {memory.data_ptr(): 3 * PAGE_BYTES}
    assert memory.data_ptr() % PAGE_BYTES == 0
    del memory
    assert not cudart.registered


def test_refusal_warns_once_and_leaves_usable_memory():
    cudart = Cudart(error=2)
    allocate = RegisteredMemory(cudart, CPU)
    with pytest.warns(UserWarning, match="could not register") as caught:
        memories = [allocate(3 * PAGE_BYTES) for _ in range(3)]
    message = str(caught[0].message)
    assert "12288 bytes (0.0 GiB) of pinned host memory" in message
    assert "out of memory" in message
    assert "ulimit -l" in message
    assert (len(caught), cudart.num_calls, cudart.registered) == (1, 1, {})
    for memory in memories:
        assert memory.fill_(1).sum() == 3 * PAGE_BYTES


def test_refusal_leaves_no_error_for_a_later_launch(monkeypatch):
    """CUDA's last error is raised by the next launch: one of ours, and not for the user."""
    launches = []

    def launch(*args, device: torch.device):
        launches.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "ones", launch)
    with pytest.warns(UserWarning, match="pinned"):
        RegisteredMemory(Cudart(error=2), CPU)(PAGE_BYTES)
    assert launches == [CPU]


def test_a_forked_worker_does_not_get_the_memory():
    """So none of its pages is copied on write, which would move it while it is registered."""
    memory = allocate_pageable(1 << 22)
    memory.fill_(7)
    address = memory.data_ptr()

    def is_mapped() -> bool:
        ranges = (line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines())
        bounds = ([int(end, 16) for end in each.split("-")] for each in ranges)
        return any(start <= address < stop for start, stop in bounds)

    assert is_mapped()
    child = os.fork()
    if child == 0:
        os._exit(is_mapped())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert memory.eq(7).all()


def test_huge_pages_are_asked_for():
    memory = allocate_pageable(1 << 23)
    flags = huge_page_flags(memory.data_ptr())
    if flags is None:
        pytest.skip("this kernel does not tell flags of mappings")
    assert "hg" in flags
    assert "dc" in flags  # not copied on fork


def huge_page_flags(address: int) -> list[str] | None:
    """``VmFlags`` of the mapping that holds ``address``."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, stop = (int(bound, 16) for bound in first.split("-"))
            is_inside = start <= address < stop
        elif is_inside and first == "VmFlags:":
            return line.split()[1:]
    return None


def test_the_allocator_knows_the_settings_that_a_run_makes():
    """libc10 reads them by name, and an unknown one ends a run only where a GPU is used."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    for name in (b"expandable_segments", b"pinned_max_round_threshold_mb"):
        assert name in library.read_bytes()
