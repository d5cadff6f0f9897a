"""Phases of a training step and categories of memory, shared by every report.

The heartbeat reports phases, the profiler names its ranges by them, the tracer measures memory in
them and the planner predicts it. Code enters a phase with
:meth:`.step_progress.StepProgress.phase` and labels its allocations with :func:`allocating`.
"""

import contextlib
from collections.abc import Iterator
from enum import StrEnum

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack


class Phase(StrEnum):
    """A part of a training run. Phases nest; time and memory count for the innermost one.

    ``FORWARD`` and ``BACKWARD`` cover everything without a phase of its own: the embedding,
    residuals, gathered weights and, in layers without recomputation, everything but attention.
    """

    SETUP = "setup"
    DATASETS = "building datasets"
    DATA = "data loading"
    FORWARD = "forward"
    ATTENTION_FORWARD = "attention forward"
    MLP_FORWARD = "MLP forward tiles"
    """Includes the output projection of attention, which precedes the MLP."""
    LOSS = "loss"
    """Forward and backward: the loss computes its gradients in its forward."""
    BACKWARD = "backward"
    RECOMPUTE_ATTENTION = "recompute attention"
    RECOMPUTE_MLP = "recompute MLP tiles"
    MLP_BACKWARD = "MLP backward tiles"
    """Down to the gradient of attention's output."""
    ATTENTION_BACKWARD = "attention backward"
    QKV_BACKWARD = "QKV backward tiles"
    """From the gradients of q, k and v to the gradient of the layer's input."""
    OPTIMIZER = "optimizer step"
    LOADING = "loading"
    """Reading a checkpoint."""
    SAVING = "saving"
    """Writing a checkpoint."""


class MemoryCategory(StrEnum):
    """Purpose of an allocation; the rows of the planner's and the tracer's tables."""

    STATES = "weights and moments"
    GRADIENTS = "sharded gradients"
    GATHERED = "gathered weights"
    WEIGHT_GRADIENTS = "unreduced gradients"
    RESIDUAL = "residual"
    KEPT = "saved activations"
    SLOTS = "attention outputs, all heads"
    CHUNKS = "chunks of heads"
    KERNEL = "attention kernel"
    TILES = "tiles"
    LOGITS = "logits"
    INPUTS = "batch and rotary table"
    LOADER = "data loader"
    CHECKPOINT = "checkpoint being written"
    FILE_CACHE = "file cache"


class AllocationObserver(TorchDispatchMode):
    """A dispatch mode that attributes each allocation to a category; see :func:`allocating`."""

    category: str | None = None
    """The innermost category entered; None outside all of them."""


@contextlib.contextmanager
def allocating(category: str) -> Iterator[None]:
    """Label the tensors allocated inside with a :class:`MemoryCategory` or a buffer's name.

    The label reaches every observer on torch's stack of dispatch modes. The stack is per thread;
    autograd hands it on to the threads of its backward. Without an observer there is no effect.
    """
    observers = [
        mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, AllocationObserver)
    ]
    outer = [observer.category for observer in observers]
    for observer in observers:
        observer.category = category
    try:
        yield
    finally:
        for observer, before in zip(observers, outer, strict=True):
            observer.category = before
