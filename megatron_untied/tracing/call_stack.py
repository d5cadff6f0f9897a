"""What the Python stack says about an operation: which code it is for, and in which phase."""

import sys
from collections.abc import Iterator
from functools import cache
from types import FrameType

import torch

PHASES = {
    ("streaming/layer.py", "attend"): "attention forward",
    ("streaming/layer.py", "finish"): "tiles forward",
    ("streaming/layer.py", "_after_attention_backward"): "tiles backward, down to attention",
    ("context_parallel/ulysses.py", "backward"): "attention backward",
    ("streaming/layer.py", "_before_attention_backward"): "tiles backward, from attention",
    ("loss/chunked_cross_entropy.py", "chunked_cross_entropy"): "loss",
    ("model.py", "forward"): "between layers, forward",
    ("training/full_sharding.py", "step"): "optimizer step",
    ("megatron-core: optimizer/optimizer.py", "prepare_grads"): "optimizer step",
    ("megatron-core: optimizer/optimizer.py", "step_with_ready_grads"): "optimizer step",
}
"""By file and function; the innermost on the stack counts."""

BACKWARD = torch.Tensor.backward.__code__
"""What runs inside it and in none of ``PHASES`` is between the layers, on the way back."""

REBUILD = "streaming/recompute.py", "recompute"
"""What runs inside it is a forward again, for a backward."""

_ROOTS = (
    ("/megatron_untied/", ""),
    ("/megatron/core/", "megatron-core: "),
    ("/torch/distributed/fsdp/", "fsdp: "),
    ("/torch/optim/", "optimizer: "),
)
"""Folders whose code is a cause, and what comes before a file's name in them."""


def cause() -> str | None:
    """File, line and function of the innermost frame whose code somebody here answers for.

    A buffer of the workspace is named instead, as it is taken from many places. None for what is
    nobody's memory: tensors with which DTensor works out shapes.
    """
    for frame in _frames():
        code = frame.f_code
        if code.co_filename.endswith("/torch/distributed/tensor/_sharding_prop.py"):
            return None
        if code.co_name == "take" and code.co_filename.endswith("buffer_plan.py"):
            return f"workspace: {frame.f_locals['buffer'].memory}"
        place = _place(code.co_filename)
        if place is not None and not code.co_name.startswith("<"):  # of a function, as its part
            return f"{place}:{frame.f_lineno} {code.co_name}"
    return "elsewhere"


def phase() -> str:
    """The innermost function of ``PHASES`` on the stack."""
    found = None
    for frame in _frames():
        key = _place(frame.f_code.co_filename), frame.f_code.co_name
        if found is None:
            found = PHASES.get(key)
        if key == REBUILD and found:
            return f"{found}, again"
        if frame.f_code is BACKWARD:
            return found or "between layers, backward"
    return found or "set-up"


@cache
def _place(path: str) -> str | None:
    """A file's name within its root; None outside of all roots."""
    for folder, prefix in _ROOTS:
        _, found, name = path.rpartition(folder)
        if found:
            return None if name.startswith("tracing/") else prefix + name
    return None


def _frames() -> Iterator[FrameType]:
    """Innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
