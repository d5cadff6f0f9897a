"""The contract of all attention kernels."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron_untied.context_parallel.kernels.cut import Call, Limits, Shape, cut
from megatron_untied.context_parallel.kernels.mask import Mask


@dataclass(slots=True)
class KernelCounter:
    """What was asked of a kernel so far; read by benchmarks, the memory tracer and tests."""

    forward_calls: int = 0
    backward_calls: int = 0
    flops: int = 0
    """Of its matrix products, a multiply and an add counted as two: two products in a forward,
    five in a backward, over the pairs of queries and keys that see each other."""


class ForwardTensors(NamedTuple):
    """What one call reads, and where it writes."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


class BackwardTensors(NamedTuple):
    """What the backward of one call reads, and where it writes. ``lse`` is contiguous."""

    d_out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class AttentionKernel(ABC):
    """Exact softmax attention. Shapes and dtypes are in the package's docstring.

    Queries that see no key get 0, a log-sum-exp of -inf and no gradient, and keys that no query
    sees get no gradient: whatever the kernel itself would do with them, it never gets them.
    """

    name: ClassVar[str]
    limits: ClassVar[Limits]

    def __init__(self) -> None:
        self.counter = KernelCounter()

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """What there would have to be for it to run on ``device``; None if it is all there."""
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, mask: Mask, scale: float
    ) -> Tensor:
        """Write softmax(scale q k^T) v into ``out``; returns the log-sum-exp [b, h, s_q].

        Raises:
            ValueError: for layouts and sizes that the kernel cannot take.
        """
        self.limits.check_layout(q=q, k=k, v=v, out=out)
        shape = Shape.of(q, k)
        self.counter.forward_calls += 1
        self.counter.flops += _product_flops(shape, mask, products=2)
        calls = cut(shape, mask, self.limits)
        leaves_rows = _leaves_rows(calls, shape)
        if len(calls) == 1 and not leaves_rows:
            return self._forward(ForwardTensors(q, k, v, out), calls[0], scale)
        if leaves_rows:
            out.zero_()
        lse_dtype = torch.promote_types(q.dtype, torch.float32)
        lse = q.new_full((shape.b, shape.h, shape.num_queries), -torch.inf, dtype=lse_dtype)
        for call in calls:
            its_q, its_out = map(call.of_queries, (q, out))
            tensors = ForwardTensors(its_q, *map(call.of_keys, (k, v)), its_out)
            call.of_lse(lse).copy_(self._forward(tensors, call, scale))
        return lse

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
        dk: Tensor,
        dv: Tensor,
        mask: Mask,
        scale: float,
    ) -> None:
        """Write the gradients into ``dq``, ``dk``, ``dv``.

        ``dq`` may be ``d_out``, if every query sees a key.

        ``out`` and ``lse`` are those of all keys that the queries see, which may be more than the
        ``k`` of this call: then the gradients are this call's part of a sum.

        Raises:
            ValueError: for layouts and sizes that the kernel cannot take.
        """
        self.limits.check_layout(d_out=d_out, q=q, k=k, v=v, out=out, dq=dq, dk=dk, dv=dv)
        shape = Shape.of(q, k)
        self.counter.backward_calls += 1
        self.counter.flops += _product_flops(shape, mask, products=5)
        calls = cut(shape, mask, self.limits)
        if _leaves_rows(calls, shape):
            assert not torch._C._is_alias_of(dq, d_out), "dO would be gone before it is read"
            for gradient in (dq, dk, dv):
                gradient.zero_()
        for call in calls:
            its_d_out, its_q, its_out, its_dq = map(call.of_queries, (d_out, q, out, dq))
            its_k, its_v, its_dk, its_dv = map(call.of_keys, (k, v, dk, dv))
            its_lse = call.of_lse(lse).contiguous()
            reads = its_d_out, its_q, its_k, its_v, its_out, its_lse
            self._backward(BackwardTensors(*reads, its_dq, its_dk, its_dv), call, scale)

    @abstractmethod
    def _forward(self, x: ForwardTensors, call: Call, scale: float) -> Tensor:
        """One call: ``x`` are its parts of the tensors; returns its [b, h, s_q]."""

    @abstractmethod
    def _backward(self, x: BackwardTensors, call: Call, scale: float) -> None:
        """The backward of one call. ``x.dq`` may be ``x.d_out``: it is written last."""


def _product_flops(shape: Shape, mask: Mask, *, products: int) -> int:
    pairs = mask.num_pairs(shape.num_queries, shape.num_keys, shape.b)
    return 2 * products * shape.h * shape.d * pairs


def _leaves_rows(calls: list[Call], shape: Shape) -> bool:
    """Whether some queries or keys are in no call."""
    queries = sum(_size(call.samples, call.heads, call.queries) for call in calls)
    keys = sum(_size(call.samples, call.kv_heads, call.keys) for call in calls)
    everything = shape.b * shape.h * shape.num_queries, shape.b * shape.g * shape.num_keys
    return (queries, keys) != everything


def _size(*slices: slice) -> int:
    return math.prod(each.stop - each.start for each in slices)
