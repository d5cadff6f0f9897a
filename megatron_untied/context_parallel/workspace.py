"""Buffers made once and used again by every chunk, layer and step."""

import torch
from torch import Tensor

from megatron_untied.phases import allocating


class Workspace:
    """Named flat buffers that grow to the largest size asked of them and then stay.

    One belongs to one model: all its layers share it, since only one of them computes at a time.
    A name is one buffer; asking for it again hands out the same memory, so what it held is over.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self.num_allocations = 0

    def take(
        self, name: str, *shape: int, like: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """An uninitialized [*shape] of ``like``'s device and of ``dtype``, or ``like``'s dtype."""
        dtype = dtype or like.dtype
        numel = torch.Size(shape).numel()
        held = self._buffers.get(name)
        if (
            held is None
            or held.numel() < numel
            or (held.dtype, held.device) != (dtype, like.device)
        ):
            held = None
            self._buffers.pop(name, None)  # freed before its successor is made
            with allocating(f"workspace: {name}"):
                held = torch.empty(numel, dtype=dtype, device=like.device)
            self.num_allocations += 1
        self._buffers[name] = held
        return held[:numel].view(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes held by all buffers."""
        return sum(x.numel() * x.element_size() for x in self._buffers.values())

    def release(self) -> None:
        """Give all buffers back."""
        self._buffers.clear()


class ChunkBuffers:
    """A workspace as one attention call sees it: buffers counted in heads of that call's tokens."""

    def __init__(
        self, workspace: Workspace, *, num_ranks: int, n: int, b: int, d: int, like: Tensor
    ):
        """``n`` tokens on this rank, ``num_ranks`` ranks, micro-batch ``b``, head width ``d``."""
        self.workspace, self.num_ranks, self.like = workspace, num_ranks, like
        self.n, self.b, self.d = n, b, d
        self.unit = n * b * d

    def head_side(self, name: str, heads: int, dtype: torch.dtype | None = None) -> Tensor:
        """Some heads of the whole sequence: [s, b, heads, d]."""
        shape = (self.n * self.num_ranks, self.b, heads, self.d)
        return self.workspace.take(name, *shape, like=self.like, dtype=dtype)

    def sequence_side(self, name: str, heads: int, dtype: torch.dtype | None = None) -> Tensor:
        """Heads of this rank's own tokens, as they travel: flat, n * b * heads * d elements."""
        return self.workspace.take(name, self.unit * heads, like=self.like, dtype=dtype)
