"""Device memory that is made once and used again by every chunk, layer and step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_untied.context_parallel.buffer_plan import Buffer
from megatron_untied.phases import allocating


@dataclass(slots=True, eq=False)
class Workspace:
    """Flat device memory that grows to the largest buffer asked of it and then stays.

    One belongs to one model: all its layers share it, since only one of them computes at a time.
    A buffer handed out again is the same memory, so what it held is over.
    """

    held: dict[str, Tensor] = field(default_factory=dict)
    """By name of the memory."""
    num_allocations: int = 0

    def take(
        self, buffer: Buffer, device: torch.device, shape: Sequence[int] | None = None
    ) -> Tensor:
        """The buffer, uninitialized: flat, or of ``shape``, which may be smaller than planned."""
        memory = self.held.get(buffer.memory)
        fits = memory is not None and memory.numel() >= buffer.numel
        if not fits or (memory.dtype, memory.device) != (buffer.dtype, device):
            memory = None
            self.held.pop(buffer.memory, None)  # freed before its successor is made
            with allocating(f"workspace: {buffer.memory}"):
                memory = torch.empty(buffer.numel, dtype=buffer.dtype, device=device)
            self.num_allocations += 1
        self.held[buffer.memory] = memory
        if shape is None:
            return memory[: buffer.numel]
        return memory[: torch.Size(shape).numel()].view(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes held by all buffers."""
        return sum(x.nbytes for x in self.held.values())

    def release(self) -> None:
        """Give all memory back to torch's allocator, which reuses it for the rest of the layer."""
        self.held.clear()
