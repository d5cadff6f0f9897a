"""The attention kernel of a plan: which one runs on a GPU, and what a faster one would bring."""

from functools import cache

import torch

from megatron_untied.config.run import RunConfig
from megatron_untied.context_parallel.kernels import AttentionKernel
from megatron_untied.context_parallel.kernels.registry import KERNELS
from megatron_untied.context_parallel.kernels.split_calls import Limits, Shape
from megatron_untied.context_parallel.kernels.traced import SCRATCH, TracedKernel
from megatron_untied.planner.machine import Gpu

_traced = cache(TracedKernel)


def planned_kernel(
    config: RunConfig, gpu: Gpu, shapes: list[Shape], installed: dict[str, Limits] | None = None
) -> TracedKernel:
    """The kernel that ``--attention-backend`` takes on ``gpu``, as one that only allocates.

    If every kernel that fits the model refuses one of ``shapes``, it is the first of them, whose
    plan then raises the reason. Kernels without fp32 and "local", for short sequences on machines
    without flash attention, are planned as if for bf16 and "auto".

    Args:
        config: the run.
        gpu: the kind of GPU.
        shapes: of all kernel calls of all ranks.
        installed: limits by name of the kernels that are installed; None: all may be.

    Raises:
        ValueError: if no kernel fits the model and the GPU, with the reason for each.
    """
    backend = "auto" if config.attention_backend == "local" else config.attention_backend
    half, model = torch.bfloat16, config.model
    needs = {"dtype": half, "head_width": model.kv_channels, "window": model.window_size}
    needs["documents"] = config.data.dataloader_inter_document_masking
    fitting, reasons = [], []
    for kind in KERNELS[backend]:
        if kind not in SCRATCH:
            continue
        if gpu.compute_capability not in kind.platform.majors:
            reasons.append(f"{kind.name} needs {kind.platform.name}, and {gpu.title} is none")
            continue
        if installed is not None and kind.name not in installed:
            reasons.append(f"{kind.name} is not installed")
            continue
        limits = kind.limits if installed is None else installed[kind.name]
        problems = list(limits.problems(**needs))
        if not problems:
            fitting.append(_traced(kind, limits))
        reasons += [f"{kind.name} {problem}" for problem in problems]
    if not fitting:
        raise ValueError(
            f"--attention-backend {config.attention_backend} has no kernel for this plan: "
            f"{'; '.join(reasons)}"
        )
    accepting = (k for k in fitting if not list(k.limits.problems(**needs, shapes=shapes)))
    return next(accepting, fitting[0])


def is_planned(kernel: AttentionKernel) -> bool:
    """Whether plans know what ``kernel`` allocates."""
    return type(kernel) in SCRATCH


def describe_kernel(kernel: AttentionKernel, gpu: Gpu | None) -> str:
    """One line: the kernel that runs, and what each faster one would bring, or why it does not.

    ``gpu``: this rank's, None without one.
    """
    said = f"attention: {kernel.name}"
    if gpu is None:
        return said
    said += f" on {gpu.title}"
    mine = gpu.attention_fractions.get(kernel.name)
    for kind in SCRATCH:
        other = gpu.attention_fractions.get(kind.name)
        if kind.name == kernel.name or other is None or mine is None:
            continue
        if (share := attention_units(other) / attention_units(mine)) > 0.95:
            continue
        name = f"{kind.name} "
        reasons = (r.removeprefix(name) for r in kernel.passed_over if r.startswith(name))
        reason = next(reasons, f"--attention-backend {kind.name} asks for it")
        said += f"; {kind.name} would take about {share:.0%} of its time ({reason})"
    return said


def attention_units(fractions: tuple[float, float], num_forwards: float = 1.0) -> float:
    """Time of a step's attention in units of a forward at the peak.

    A forward has two matrix products and a backward five. ``fractions`` of the peak are those that
    the kernel reaches in its forward and its backward.
    """
    forward, backward = fractions
    return num_forwards / forward + 2.5 / backward
