"""The contract of all attention kernels."""

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_untied.context_parallel.kernels.mask import Mask
from megatron_untied.context_parallel.kernels.split_calls import Call, Limits, Shape, split_calls
from megatron_untied.context_parallel.kernels.tensors import Attended, Qkv, QkvGrads
from megatron_untied.dtypes import accumulation_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """The device and the package that a kernel needs."""

    device_type: str | None = None
    """Of torch; None is any."""
    name: str = ""
    """The device in an error message."""
    majors: range | None = None
    """Major compute capabilities of the GPUs that it runs on."""
    module: str | None = None
    """What it calls; that must import, as packages of one name have different modules."""
    package: str = ""
    """What provides ``module``, in an error message."""


AMPERE = Platform(device_type="cuda", name="an Ampere or newer GPU", majors=range(8, 100))


@dataclass(slots=True)
class KernelCounter:
    """Work of a kernel so far; read by benchmarks, the memory tracer and tests."""

    forward_calls: int = 0
    backward_calls: int = 0
    flops: int = 0
    """Of its matrix products, with a multiply and an add counted as two: two products per forward,
    five per backward, over the pairs of a query and a key that it sees."""


class AttentionKernel(ABC):
    """Exact softmax attention of q [s_q, b, h, d] over k, v [s_k, b, g, d] in one dtype.

    Queries that see no key get 0, a log-sum-exp of -inf and no gradient, and keys that no query
    sees get no gradient. Kernels differ there, so such rows are never passed to one.
    """

    name: ClassVar[str]
    platform: ClassVar[Platform] = Platform()
    limits: Limits
    """Of a class those of the versions that it is tested with; of a kernel those of its package."""
    passed_over: tuple[str, ...] = ()
    """Kernels that were preferred when this one was chosen, each with the reason against it."""

    def __init__(self) -> None:
        self.counter = KernelCounter()

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """The first thing it would need to run on ``device``; None if it runs there."""
        needs = cls.platform
        if needs.device_type not in (None, device.type):
            return needs.name
        if needs.majors and torch.cuda.get_device_capability(device)[0] not in needs.majors:
            return needs.name
        if needs.module is None:
            return None
        try:
            importlib.import_module(needs.module)
        # A package that was built for another torch or CUDA is found and fails while it loads, with
        # whatever its loader raises. The caller reports the reason.
        except Exception as error:
            return f"the package {needs.package} ({str(error).partition(chr(10))[0]})"
        return None

    def forward(self, x: Qkv, *, out: Tensor, mask: Mask) -> Tensor:
        """Write softmax(scale q k^T) v into ``out`` [s_q, b, h, d]; returns lse [b, h, s_q].

        Raises:
            ValueError: for a layout or size beyond the kernel's limits.
        """
        self.limits.check_layout(**x._asdict(), out=out)
        shape = Shape.of(x)
        self.counter.forward_calls += 1
        calls, leaves_rows = self._counted_calls(shape, mask, num_products=2)
        if len(calls) == 1 and not leaves_rows:
            # The kernel's own log-sum-exp, without a copy.
            return self._forward(x, out, calls[0])
        if leaves_rows:
            out.zero_()  # no call writes the rows of queries that see no key
        lse_dtype = accumulation_dtype(x.q.dtype)
        lse = x.q.new_full((shape.b, shape.h, shape.num_queries), -torch.inf, dtype=lse_dtype)
        for call in calls:
            part = lse[call.samples, call.heads, call.queries]
            part.copy_(self._forward(call.of(x), call.of_queries(out), call))
        return lse

    def backward(self, d_out: Tensor, x: Qkv, y: Attended, *, into: QkvGrads, mask: Mask) -> None:
        """Write the gradients of q, k, v into ``into``, given that of the output [s_q, b, h, d].

        ``into.dq`` may be ``d_out``. ``y`` is the result over all keys that the queries see. If
        ``x`` holds only some of them, the gradients are their part of a sum.

        Raises:
            ValueError: for a layout or size beyond the kernel's limits.
        """
        self.limits.check_layout(**x._asdict(), d_out=d_out, out=y.out, **into._asdict())
        shape = Shape.of(x)
        self.counter.backward_calls += 1
        calls, leaves_rows = self._counted_calls(shape, mask, num_products=5)
        if leaves_rows:  # no call writes keys that nothing sees
            into.dk.zero_()
            into.dv.zero_()
        for call in calls:
            # Kernels take no strides of the log-sum-exp. Only segments of a sample make a copy.
            lse = y.lse[call.samples, call.heads, call.queries].contiguous()
            call_y = Attended(call.of_queries(y.out), lse)
            self._backward(call.of_queries(d_out), call.of(x), call_y, call.of(into), call)
        if leaves_rows:  # nor queries that see nothing; afterwards, as calls may read dO there
            sees_none = torch.ones(shape.num_queries, shape.b, 1, 1, dtype=torch.bool)
            for call in calls:
                sees_none[call.queries, call.samples] = False
            into.dq.masked_fill_(sees_none.to(into.dq.device), 0)

    def _counted_calls(
        self, shape: Shape, mask: Mask, *, num_products: int
    ) -> tuple[list[Call], bool]:
        """The calls, whose work is counted, and whether some queries or keys are in none of them.

        ``num_products``: matrix products over each pair of a query and a key that it sees.
        """
        pairs = mask.num_pairs(shape.num_queries, shape.num_keys, shape.b)
        self.counter.flops += 2 * num_products * shape.h * shape.d * pairs
        calls = split_calls(shape, mask, self.limits)
        queries, keys = shape.b * shape.h * shape.num_queries, shape.b * shape.g * shape.num_keys
        for call in calls:  # they never overlap
            part = call.shape(shape.d)
            queries -= part.b * part.h * part.num_queries
            keys -= part.b * part.g * part.num_keys
        return calls, (queries, keys) != (0, 0)

    @abstractmethod
    def _forward(self, x: Qkv, out: Tensor, call: Call) -> Tensor:
        """One call on its parts of the tensors; returns its log-sum-exp [b, h, s_q]."""

    @abstractmethod
    def _backward(self, d_out: Tensor, x: Qkv, y: Attended, into: QkvGrads, call: Call) -> None:
        """The backward of one call. ``into.dq`` may be ``d_out``: write it last."""
