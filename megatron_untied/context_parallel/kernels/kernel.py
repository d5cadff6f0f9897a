"""The contract of all attention kernels."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_untied.context_parallel.kernels.mask import Mask
from megatron_untied.context_parallel.kernels.split_calls import Call, Limits, Shape, split_calls
from megatron_untied.context_parallel.kernels.tensors import Attended, Qkv, QkvGrads
from megatron_untied.dtypes import accumulation_dtype


@dataclass(slots=True)
class KernelCounter:
    """What was asked of a kernel so far; read by benchmarks, the memory tracer and tests."""

    forward_calls: int = 0
    backward_calls: int = 0
    flops: int = 0
    """Of its matrix products, a multiply and an add counted as two: two products in a forward,
    five in a backward, over the pairs of queries and keys that see each other."""


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

    def forward(self, x: Qkv, *, out: Tensor, mask: Mask) -> Tensor:
        """Write softmax(scale q k^T) v into ``out`` [s_q, b, h, d]; returns lse [b, h, s_q].

        Raises:
            ValueError: for layouts and sizes that the kernel cannot take.
        """
        self.limits.check_layout(**x._asdict(), out=out)
        shape = Shape.of(x)
        self.counter.forward_calls += 1
        self.counter.flops += _product_flops(shape, mask, products=2)
        calls = split_calls(shape, mask, self.limits)
        leaves_rows = _leaves_rows(calls, shape)
        if len(calls) == 1 and not leaves_rows:
            return self._forward(x, out, calls[0])
        if leaves_rows:
            out.zero_()  # no call writes the rows of queries that see no key
        lse_dtype = accumulation_dtype(x.q.dtype)
        lse = x.q.new_full((shape.b, shape.h, shape.num_queries), -torch.inf, dtype=lse_dtype)
        for call in calls:
            call.of_lse(lse).copy_(self._forward(call.of(x), call.of_queries(out), call))
        return lse

    def backward(self, d_out: Tensor, x: Qkv, y: Attended, *, into: QkvGrads, mask: Mask) -> None:
        """Write the gradients of q, k, v into ``into``, given that of the output [s_q, b, h, d].

        ``into.dq`` may be ``d_out``, if every query sees a key. ``y`` is of all keys that the
        queries see, which may be more than those of ``x``: then the gradients are this call's
        part of a sum.

        Raises:
            ValueError: for layouts and sizes that the kernel cannot take.
        """
        self.limits.check_layout(**x._asdict(), d_out=d_out, out=y.out, **into._asdict())
        shape = Shape.of(x)
        self.counter.backward_calls += 1
        self.counter.flops += _product_flops(shape, mask, products=5)
        calls = split_calls(shape, mask, self.limits)
        if _leaves_rows(calls, shape):
            assert not torch._C._is_alias_of(into.dq, d_out), "dO would be gone before it is read"
            for gradient in into:
                gradient.zero_()  # no call writes rows that see nothing or that nothing sees
        for call in calls:
            call_y = Attended(call.of_queries(y.out), call.of_lse(y.lse).contiguous())
            self._backward(call.of_queries(d_out), call.of(x), call_y, call.of(into), call)

    @abstractmethod
    def _forward(self, x: Qkv, out: Tensor, call: Call) -> Tensor:
        """One call on its parts of the tensors; returns its log-sum-exp [b, h, s_q]."""

    @abstractmethod
    def _backward(self, d_out: Tensor, x: Qkv, y: Attended, into: QkvGrads, call: Call) -> None:
        """The backward of one call. ``into.dq`` may be ``d_out``: write it last."""


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
