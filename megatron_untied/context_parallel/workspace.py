"""Device memory that is made once and used again by every chunk, layer and step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_untied.context_parallel.buffer_plan import Buffer, Sizes
from megatron_untied.phases import allocating


class Workspace:
    """Flat device memory that grows to the largest buffer asked of it and then stays.

    One belongs to one model: all its layers share it, since only one of them computes at a time.
    A buffer handed out again is the same memory, so what it held is over.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self.num_allocations = 0

    def take(self, buffer: Buffer, device: torch.device) -> Tensor:
        """The buffer's memory, uninitialized: flat, ``buffer.numel`` elements."""
        held = self._held.get(buffer.memory)
        wanted = buffer.dtype, device
        if held is None or held.numel() < buffer.numel or (held.dtype, held.device) != wanted:
            held = None
            self._held.pop(buffer.memory, None)  # freed before its successor is made
            with allocating(f"workspace: {buffer.memory}"):
                held = torch.empty(buffer.numel, dtype=buffer.dtype, device=device)
            self.num_allocations += 1
        self._held[buffer.memory] = held
        return held[: buffer.numel]

    @property
    def num_bytes(self) -> int:
        """Bytes held by all buffers."""
        return sum(x.nbytes for x in self._held.values())

    def release(self) -> None:
        """Give all memory back."""
        self._held.clear()


@dataclass(frozen=True, slots=True)
class Memory:
    """A workspace as one attention call sees it: its buffers in the shapes of that call."""

    workspace: Workspace
    sizes: Sizes
    device: torch.device

    def head_sharded(self, buffer: Buffer, heads: int) -> Tensor:
        """Some heads of all tokens that the Ulysses ranks share: [s/r, b, heads, d]."""
        shape = torch.Size(
            (self.sizes.num_ulysses * self.sizes.n, self.sizes.b, heads, self.sizes.d)
        )
        return self.workspace.take(buffer, self.device)[: shape.numel()].view(shape)

    def sequence_sharded(self, buffer: Buffer, heads: int) -> Tensor:
        """Some heads of this rank's own tokens, as they travel: flat, n * b * heads * d."""
        numel = self.sizes.n * self.sizes.b * heads * self.sizes.d
        return self.workspace.take(buffer, self.device)[:numel]
