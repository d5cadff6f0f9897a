"""Finds numbers gone wrong before they change a weight, and where they came from.

A step computes its gradients, then all ranks learn from one all-reduce whether any of them has a
loss or a gradient that is not finite (:class:`StepGuard`), and only then are weights updated.
What names the place is recorded on the way: the loss of each micro-batch, and the norm of each
parameter's gradient on this rank before it is summed over others (:class:`GradientWatch`).
"""

import functools
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_untied.checkpoint.collective_errors import gather_objects
from megatron_untied.config.problems import first_few
from megatron_untied.config.run import LoopConfig
from megatron_untied.platform import device
from megatron_untied.residual import Rows
from megatron_untied.streaming.replay import ReplayCheck
from megatron_untied.training.liveness import listed_ranks

REMEDIES = (
    "No weight was changed and nothing was saved; resume with --rerun-on-nan to tell a flaky "
    "device from bad data, with a lower --lr, or with --no-check-for-nan-in-loss-and-grad to skip "
    "such steps"
)


class GradientWatch:
    """The norm of each parameter's gradient on this rank, before any reduction.

    Costs a read of each gradient per micro-batch. A hook on each parameter takes the gradient where
    autograd passes it on: with full sharding that is the gathered parameter, which exists from the
    first forward on.
    """

    def __init__(self, model: nn.Module):
        """``model``: bare, with its hooks of full sharding if it has them."""
        self._model, self.names = model, [name for name, _ in model.named_parameters()]
        self._not_hooked = {
            index for index, (_, p) in enumerate(model.named_parameters()) if p.requires_grad
        }
        self.norms: list[Tensor] = []
        """Of each micro-batch since :meth:`begin`, fp32 [parameters]."""
        for module in model.modules():
            if module is model or isinstance(module, FSDPModule):
                module.register_forward_pre_hook(self._before_forward)

    def begin(self) -> None:
        """Forget the step before."""
        self.norms = []

    def _before_forward(self, module: nn.Module, inputs: tuple) -> None:
        if not torch.is_grad_enabled():
            return
        if module is self._model:
            self.norms.append(torch.zeros(len(self.names), device=device.current_device()))
        if not self._not_hooked:
            return
        for index, (_, parameter) in enumerate(self._model.named_parameters()):
            # A DTensor is a shard whose unit is not gathered yet.
            if index in self._not_hooked and not isinstance(parameter, DTensor):
                parameter.register_hook(functools.partial(self._record, index))
                self._not_hooked.remove(index)

    def _record(self, index: int, gradient: Tensor) -> None:
        norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)
        self.norms[-1][index] += norm


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """The first number of a step on one rank that is not finite, in the order of computation."""

    micro_batch: int
    """Counted from 1."""
    place: tuple[int, int]
    """Kind (layer's output, loss, gradient) and its place in the order of the step."""
    what: str
    samples: tuple[int, ...]
    """Numbers of the micro-batch's samples in the dataset."""
    host: str

    @property
    def key(self) -> tuple[int, tuple[int, int]]:
        """Sort key: the earlier one is the cause."""
        return self.micro_batch, self.place


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepNumbers:
    """What a forward and backward of one step gave, before any update."""

    losses: Sequence[Tensor]
    """This rank's part of the loss, of each micro-batch; fp64 []."""
    lm_loss: float
    grad_norm: float | Tensor
    """Before clipping."""
    is_finite: bool
    """Whether loss and gradients are on every rank."""
    replays_equal: bool
    """Whether on every rank all that was recomputed and verified is as in forward."""


class StepGuard:
    """The checks of a run's steps. One object for the whole run; all ranks make the same calls."""

    def __init__(
        self,
        model: nn.Module,
        loop: LoopConfig,
        describe_sample: Callable[[int], str] = "sample {}".format,
    ):
        """Install the hooks that ``loop`` asks for.

        Args:
            model: to train, wrapped or not.
            loop: which checks to do.
            describe_sample: names a sample of the training data by its number.
        """
        self._loop, self._model, self._describe = loop, unwrap_model(model), describe_sample
        self._watch = GradientWatch(self._model) if loop.check_for_nan else None
        streaming = getattr(self._model.decoder.layers[0], "streaming", None)
        self._replay = ReplayCheck() if streaming is None else streaming.replay
        self.checks_nan, self.rerun_on_nan = loop.check_for_nan, loop.rerun_on_nan
        self._outputs: dict[int, list[Tensor]] = {}

    def begin(self, iteration: int) -> None:
        """Prepare for the forward of ``iteration``."""
        every = self._loop.verify_recompute
        self._replay.begin(active=every is not None and iteration % every == 0)
        if self._watch is not None:
            self._watch.begin()

    def flags(self, losses: Sequence[Tensor], norm: float | Tensor) -> Tensor:
        """Whether this rank has numbers that are not finite or replays that differ: fp64 [2].

        Args:
            losses: of the micro-batches.
            norm: of the gradient of all ranks.
        """
        here = device.current_device()
        parts = [torch.stack(losses).sum(), torch.as_tensor(norm, device=here)]
        if self._watch is not None:
            parts.append(torch.stack(self._watch.norms).sum())
        # One not finite makes a sum so; overflow of these few does too, and is as wrong.
        total = torch.stack([part.double().to(here) for part in parts]).sum()
        return torch.stack([~total.isfinite(), self._replay.differs(here)]).double()

    def fault(self, losses: Sequence[Tensor], samples: Sequence[tuple[int, ...]]) -> Fault | None:
        """The first number on this rank that is not finite; None if there is none.

        Args:
            losses: as in :class:`StepNumbers`.
            samples: numbers of the samples of each micro-batch.
        """
        norms = torch.stack(self._watch.norms).tolist() if self._watch is not None else []
        values = torch.stack(losses).tolist()
        for index, value in enumerate(values):
            bad = [place for place, norm in enumerate(norms[index]) if not math.isfinite(norm)]
            if self._outputs and not all(finite := torch.stack(self._outputs[index]).tolist()):
                layer = finite.index(False)
                place, what = (0, layer), f"the output of layer {layer + 1} of {len(finite)}"
            elif not math.isfinite(value):
                place, what = (1, 0), f"the loss, {value}"
            elif bad:  # backward runs from the last parameter to the first
                what = f"the gradient of {self._watch.names[bad[-1]]}"
                place = (2, -bad[-1])
            else:
                continue
            if len(values) > 1:
                what += f" in micro-batch {index + 1} of {len(values)}"
            return Fault(
                micro_batch=index + 1,
                place=place,
                what=what,
                samples=samples[index],
                host=socket.gethostname(),
            )
        return None

    def message(self, numbers: StepNumbers, samples: Sequence[tuple[int, ...]]) -> str:
        """What is wrong with ``numbers`` and where it began; collective over all ranks."""
        if numbers.is_finite:
            differing = gather_objects(self._replay.differences())
            places = [
                f"{', '.join(names)} on rank {rank}"
                for rank, names in enumerate(differing)
                if names
            ]
            return (
                f"recomputed values differ from those of forward: {'; '.join(places)}. Both come "
                "from the same kernels on the same inputs: suspect the device or its memory, or "
                "the host's for what is offloaded; no weight was changed and nothing was saved"
            )
        found = gather_objects(self.fault(numbers.losses, samples))
        return f"{_values(numbers)}. {self._origin(found)}. {REMEDIES}"

    def verdict(
        self,
        first: StepNumbers,
        again: Callable[[], StepNumbers],
        samples: Sequence[tuple[int, ...]],
    ) -> str:
        """Repeat a step that failed, and tell a flaky device from bad data.

        Collective over all ranks. The layers' outputs are read too, so that the place is exact.

        Args:
            first: numbers of the step.
            again: repeats it.
            samples: numbers of the samples of each micro-batch.
        """
        before = gather_objects(self.fault(first.losses, samples))
        self._watch.begin()
        self._replay.begin(active=False)
        hooks = [
            layer.register_forward_hook(functools.partial(self._after_layer, index))
            for index, layer in enumerate(self._model.decoder.layers)
        ]
        second = again()
        for hook in hooks:
            hook.remove()
        exact = gather_objects(self.fault(second.losses, samples))
        self._outputs = {}
        after = gather_objects(self.fault(second.losses, samples))
        if second.is_finite:
            conclusion = "it did not repeat: suspect a device, not the data"
        elif [fault and fault.key for fault in before] != [fault and fault.key for fault in after]:
            conclusion = f"it began elsewhere ({self._origin(exact)}): suspect a device"
        else:
            conclusion = "it repeated at the same place: the data or the weights are the cause"
            before = exact
        return (
            f"{_values(first)}. {self._origin(before)}. The step was run again, with "
            f"{_values(second)}: {conclusion}"
        )

    def _after_layer(self, index: int, layer: nn.Module, inputs: tuple, output: tuple) -> None:
        rows = Rows.of(output[0])
        tiles = layer.tiles(rows.shape[0]) if hasattr(layer, "streaming") else None
        parts = [output[0]] if tiles is None else rows.tiles(tiles)
        finite = torch.stack([part.isfinite().all() for part in parts]).all()
        self._outputs.setdefault(len(self._watch.norms) - 1, []).append(finite)

    def _origin(self, faults: Sequence[Fault | None]) -> str:
        """Where the earliest of all ranks' ``faults`` began, in words."""
        found = {rank: fault for rank, fault in enumerate(faults) if fault is not None}
        if not found:
            return (
                "Every rank's own part is finite: the sum over ranks is too large, or was damaged"
            )
        first = min(fault.key for fault in found.values())
        ranks = [rank for rank, fault in found.items() if fault.key == first]
        numbers = sorted({number for rank in ranks for number in found[rank].samples})
        hosts = ", ".join(dict.fromkeys(found[rank].host for rank in ranks))
        listed = first_few([self._describe(number) for number in numbers], 4)
        return f"It began on {listed_ranks(ranks)} ({hosts}) with {found[ranks[0]].what}: {listed}"


def _values(numbers: StepNumbers) -> str:
    return f"lm loss {numbers.lm_loss}, grad norm {float(numbers.grad_norm)}"
