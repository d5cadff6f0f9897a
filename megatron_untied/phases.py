"""The phases of a training step, and what memory is for: one vocabulary for every report.

The heartbeat reports phases, the tracer measures memory in them and the planner predicts it.
Code states its phase with :meth:`.step_progress.StepProgress.phase` and what it allocates with
:func:`allocating`.
"""

import contextlib
from collections.abc import Iterator
from enum import StrEnum

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack


class Phase(StrEnum):
    """A part of a training run; phases nest, and the innermost one counts.

    ``FORWARD`` and ``BACKWARD`` cover all that has no phase of its own: the embedding, residuals,
    gathered weights, and in layers without recomputation everything but attention.
    """

    SETUP = "setup"
    DATASETS = "building datasets"
    DATA = "data loading"
    FORWARD = "forward"
    ATTENTION_FORWARD = "attention forward"
    MLP_FORWARD = "MLP forward tiles"
    """With the output projection before the MLP."""
    LOSS = "loss"
    """Forward and backward: the loss computes its gradients at once."""
    BACKWARD = "backward"
    RECOMPUTE_ATTENTION = "recompute attention"
    RECOMPUTE_MLP = "recompute MLP tiles"
    MLP_BACKWARD = "MLP backward tiles"
    """Down to the gradient of attention's output."""
    ATTENTION_BACKWARD = "attention backward"
    QKV_BACKWARD = "QKV backward tiles"
    """From the gradients of q, k and v to that of the layer's input."""
    OPTIMIZER = "optimizer step"
    LOADING = "loading"
    """Of a checkpoint, as the next."""
    SAVING = "saving"


class MemoryCategory(StrEnum):
    """What bytes are allocated for."""

    STATES = "weights and moments"
    GRADIENTS = "gradients at rest"
    GATHERED = "gathered weights"
    WEIGHT_GRADIENTS = "gradients on their way"
    RESIDUAL = "residual"
    KEPT = "kept for backward"
    SLOTS = "attention outputs, all heads"
    CHUNKS = "chunks of heads"
    KERNEL = "attention kernel"
    TILES = "tiles"
    LOGITS = "logits"
    INPUTS = "batch and rotary table"
    LOADER = "data loader"
    PARKED = "parked during attention"


class AllocationObserver(TorchDispatchMode):
    """A dispatch mode that attributes each allocation to a category; see :func:`allocating`."""

    category: str | None = None
    """The innermost category stated; None where there is none."""


@contextlib.contextmanager
def allocating(category: str) -> Iterator[None]:
    """State what the tensors made inside are for: a :class:`MemoryCategory` or a buffer's name.

    It reaches the observers on torch's stack of dispatch modes, which is per thread and which
    autograd passes on to the threads of its backward. Without an observer it does nothing.
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
