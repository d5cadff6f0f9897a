"""The table of kernels, and the choice that ``--attention-backend`` makes among them."""

import torch

from megatron_untied.config.run import AttentionBackend
from megatron_untied.context_parallel.kernels.cpu_flash import CpuFlash
from megatron_untied.context_parallel.kernels.cudnn import Cudnn
from megatron_untied.context_parallel.kernels.flash_attention import (
    FlashAttention2,
    FlashAttention3,
    TorchFlash,
)
from megatron_untied.context_parallel.kernels.kernel import AttentionKernel
from megatron_untied.context_parallel.kernels.matrix_products import MatrixProducts

# None materializes scores; the fastest first.
_FLASH = FlashAttention3, FlashAttention2, TorchFlash, CpuFlash

KERNELS: dict[str, tuple[type[AttentionKernel], ...]] = {
    "auto": (*_FLASH, MatrixProducts),
    "flash": _FLASH,
    "fused": (Cudnn,),
    "local": (MatrixProducts,),
    **{kernel.name: (kernel,) for kernel in (*_FLASH[:3], Cudnn)},
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
) -> AttentionKernel:
    """The first kernel of ``backend`` that runs on ``device`` and fits the model.

    Args:
        backend: Megatron's name of a family of kernels, or the name of one.
        device: of its tensors.
        dtype: of q, k and v.
        head_width: channels per head (d).
        window: keys that a query sees; None if they are not limited.
        documents: whether attention stays inside documents.

    Raises:
        ValueError: if there is none, with the reason for each.
    """
    needs = {"dtype": dtype, "head_width": head_width, "window": window, "documents": documents}
    reasons = []
    for kernel in KERNELS[backend]:
        missing = kernel.missing(device)
        problems = [f"needs {missing}"] if missing else list(kernel.limits.problems(**needs))
        if not problems:
            return kernel()
        reasons.append(f"{kernel.name} {' and '.join(problems)}")
    raise ValueError(
        f"--attention-backend {backend} has no kernel here: {'; '.join(reasons)}. "
        "--attention-backend auto takes one that works."
    )
