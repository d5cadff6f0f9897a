"""Registration with CUDA, by a stand-in for ``torch.cuda.cudart()``."""

import pytest
import torch

from megatron_untied.streaming.host_arena import PAGE_BYTES, RegisteredMemory

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
