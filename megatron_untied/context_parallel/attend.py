"""Attention over what one rank holds after the head exchange."""

from torch import Tensor

from megatron_untied.context_parallel.kernels import AttentionKernel, Mask
from megatron_untied.context_parallel.key_value_gradients import GradientTarget


class LocalAttention:
    """The whole sequence of its heads is on this rank: one kernel call."""

    sums_gradients = False

    def __init__(self, kernel: AttentionKernel, mask: Mask, scale: float):
        self.kernel, self.mask, self.scale = kernel, mask, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> Tensor:
        """See :class:`.untied.Attend`."""
        return self.kernel.forward(q, k, v, out=out, mask=self.mask, scale=self.scale)

    def backward(
        self,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        dq: Tensor,
        target: GradientTarget,
    ) -> None:
        """See :class:`.untied.Attend`."""
        dk, dv = target.buffers()
        self.kernel.backward(
            d_out, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, mask=self.mask, scale=self.scale
        )
        target.add(dk, dv)
