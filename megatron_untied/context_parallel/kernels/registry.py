"""The table of kernels, and the choice that ``--attention-backend`` makes among them."""

from collections.abc import Sequence

import torch

from megatron_untied.config.run import AttentionBackend
from megatron_untied.context_parallel.kernels.cpu_flash import CpuFlash
from megatron_untied.context_parallel.kernels.cudnn import Cudnn
from megatron_untied.context_parallel.kernels.flash_attention import (
    FlashAttention2,
    FlashAttention3,
    FlashAttention4,
    TorchFlash,
)
from megatron_untied.context_parallel.kernels.kernel import AttentionKernel
from megatron_untied.context_parallel.kernels.matrix_products import MatrixProducts
from megatron_untied.context_parallel.kernels.split_calls import Shape

# None materializes scores; the fastest first.
_FLASH = FlashAttention4, FlashAttention3, FlashAttention2, TorchFlash, CpuFlash

KERNELS: dict[str, tuple[type[AttentionKernel], ...]] = {
    "auto": (*_FLASH, MatrixProducts),
    "flash": _FLASH,
    "fused": (Cudnn,),
    "local": (MatrixProducts,),
    **{kernel.name: (kernel,) for kernel in (*_FLASH[:4], Cudnn)},
}
"""By backend, in order of preference."""


def choose_kernel(
    backend: AttentionBackend,
    device: torch.device,
    *,
    dtype: torch.dtype,
    head_width: int,
    window: int | None = None,
    documents: bool = False,
    shapes: Sequence[Shape] = (),
) -> AttentionKernel:
    """The first kernel of ``backend`` that runs on ``device`` and fits the model.

    Args:
        backend: Megatron's name of a family of kernels, or the name of one.
        device: of its tensors.
        dtype: of q, k and v.
        head_width: channels per head (d).
        window: keys that a query sees; None if they are not limited.
        documents: whether attention stays inside documents.
        shapes: those of all calls, where they are known: a kernel that cannot index one of them is
            not chosen.

    Raises:
        ValueError: if there is none, with the reason for each.
    """
    needs = {"dtype": dtype, "head_width": head_width, "window": window, "documents": documents}
    reasons, is_too_long = [], False
    for kind in KERNELS[backend]:
        if missing := kind.missing(device):
            reasons.append(f"{kind.name} needs {missing}")
            continue
        kernel = kind()  # limits may depend on the version that is installed
        problems = list(kernel.limits.problems(**needs))
        if not problems:
            problems = list(kernel.limits.problems(**needs, shapes=shapes))
            is_too_long |= bool(problems)
        if kernel.limits.materializes_scores and is_too_long:
            problems.append("would materialize scores for a sequence of this length")
        if not problems:
            kernel.passed_over = tuple(reasons)
            return kernel
        reasons.append(f"{kind.name} {' and '.join(problems)}")
    raise ValueError(
        f"--attention-backend {backend} has no kernel here: {'; '.join(reasons)}"
        + ("" if is_too_long else ". --attention-backend auto takes one that works.")
    )
