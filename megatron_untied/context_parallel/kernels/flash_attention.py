"""FlashAttention on CUDA: versions 4, 3 and 2, and PyTorch's own build of version 2.

All of them take a batch [b, s, heads, d], or the segments of one sample [tokens, heads, d] with
cumulative lengths; the log-sum-exp is then [h, tokens]. All of them count a window without the
query itself, one less than :class:`.Mask`.
"""

import importlib
import inspect
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron_untied.context_parallel.kernels.kernel import (
    AMPERE,
    AttentionKernel,
    Platform,
)
from megatron_untied.context_parallel.kernels.split_calls import Call, Limits
from megatron_untied.context_parallel.kernels.tensors import Attended, Qkv, QkvGrads

_HALF = torch.bfloat16, torch.float16

ALL_HEADS_IN_32_BITS = Limits(
    dtypes=_HALF,
    head_width_multiple=8,
    max_head_width=256,
    head_width_padding=64,
    alignment_bytes=16,
    joins_segments=True,
    indexes_calls_in_32_bits=True,
)
"""Of kernels that address all heads of a call together in 32 bits."""
ONE_HEAD_IN_32_BITS = replace(
    ALL_HEADS_IN_32_BITS, indexes_calls_in_32_bits=False, indexes_heads_in_32_bits=True
)
"""Of kernels whose heads have 64-bit addresses, with 32-bit offsets in a head."""


class FlashAttention4(AttentionKernel):
    """FlashAttention-4 for Blackwell's data center GPUs.

    Called with the arguments that torch's own registration of it uses, which are the part of its
    interface that is relied on elsewhere; so its backward allocates the gradients: one copy.
    """

    name = "flash-attention-4"
    platform = Platform(
        device_type="cuda",
        name="a Blackwell data center GPU",
        majors=range(10, 12),
        module="flash_attn.cute.interface",
        package="flash-attn-4",
    )
    # Offsets are row x stride in dynamic CuTe layouts, 64-bit (NVIDIA/cutlass issue 3604; cut to 32
    # by CuTe DSL 4.5.0, issue 3208, and 4.0.0b36 requires 4.6.2). The fp32 dq of a head is a single
    # dimension, indexed in 32 bits (flash_attn/cute/interface.py, seqlen_info.py). No GPU ran this.
    limits = replace(ONE_HEAD_IN_32_BITS, max_head_width=128)

    def __init__(self, module: Any = None):
        """``module``: by default ``flash_attn.cute.interface``."""
        super().__init__()
        self.module = module or importlib.import_module("flash_attn.cute.interface")

    @override
    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        if missing := super().missing(device):
            return missing
        # flash-attn up to 2.8.3.post2 has an older flash_attn/cute of its own, and overwrites this.
        forward = sys.modules[cls.platform.module]._flash_attn_fwd
        if {"out", "return_lse", "num_splits"} <= inspect.signature(forward).parameters.keys():
            return None
        return (
            f"the package {cls.platform.package} (flash_attn/cute is flash-attn's; pip install "
            f"--force-reinstall --no-deps {cls.platform.package})"
        )

    @override
    def _forward(self, x: Qkv, out: Tensor, call: Call) -> Tensor:
        q, k, v, out = (_flat(y, call) for y in (*x, out))
        options = self._options(call) | _segments(call, q.device)
        # By default it may split the keys and allocate an fp32 output for each part.
        options |= {"return_lse": True, "num_splits": 1, "out": out}
        # 4.0.0b36 returns three more, None here; torch 2.13 expects a pair, as older ones return.
        _, lse, *_ = self.module._flash_attn_fwd(q, k, v, **options)
        return lse.view(-1, x.q.shape[2], len(x.q))  # [h, tokens] -> [1, h, s_q]

    @override
    def _backward(self, d_out: Tensor, x: Qkv, y: Attended, into: QkvGrads, call: Call) -> None:
        d_out, q, k, v, out, lse = _flat_reads(d_out, x, y, call)
        options = self._options(call) | {"deterministic": False}
        lengths = _segments(call, q.device)
        options |= {name: lengths[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
        gradients = self.module._flash_attn_bwd(q, k, v, out, d_out, lse, **options)
        for result, gradient in zip(into, gradients, strict=True):
            _flat(result, call).copy_(gradient)  # dq may be the memory of dO

    @staticmethod
    def _options(call: Call) -> dict[str, Any]:
        # Here None is all keys, not -1.
        window = {side: None if size < 0 else size for side, size in _window(call).items()}
        return window | {"causal": call.causal, "softmax_scale": call.scale}


class FlashAttention3(AttentionKernel):
    """FlashAttention-3 for Hopper GPUs.

    The operators are called below their Python wrappers, which do not accept output buffers.
    """

    name = "flash-attention-3"
    platform = Platform(
        device_type="cuda",
        name="a Hopper GPU",
        majors=range(9, 10),
        module="flash_attn_interface",
        package="FlashAttention-3",
    )
    # Addresses are 64-bit, but rows x width of a head in its fp32 dq is computed in 32 bits, and
    # so is the step from one sample to the next (hopper/flash_api_stable.cpp). Sources from before
    # pull request 1841, August 2025, also compute the bytes of a head's keys and values in 32 bits
    # (hopper/tile_scheduler.hpp): 0 at 4 Mi tokens of width 128, and they divide by it.
    limits = ONE_HEAD_IN_32_BITS

    def __init__(self, operators: Any = None):
        """``operators`` has ``fwd`` and ``bwd``; by default those of ``flash_attn_interface``."""
        super().__init__()
        if operators is None:
            importlib.import_module("flash_attn_interface")  # registers them
            operators = torch.ops.flash_attn_3
        self.operators = operators

    @override
    def _forward(self, x: Qkv, out: Tensor, call: Call) -> Tensor:
        q, k, v, out = (_flat(y, call) for y in (*x, out))
        options = _segments(call, q.device) | _window(call)
        options |= {"is_causal": call.causal, "softmax_scale": call.scale}
        # By default it may split the keys and allocate an fp32 output for each part.
        _, lse, *_ = self.operators.fwd(q, k, v, out=out, num_splits=1, **options)
        return lse.view(-1, x.q.shape[2], len(x.q))  # [h, tokens] -> [1, h, s_q]

    @override
    def _backward(self, d_out: Tensor, x: Qkv, y: Attended, into: QkvGrads, call: Call) -> None:
        reads, (dq, dk, dv) = _flat_reads(d_out, x, y, call), (_flat(g, call) for g in into)
        options = _segments(call, dq.device) | _window(call)
        options |= {"is_causal": call.causal, "softmax_scale": call.scale}
        options |= {"seqused_q": None, "seqused_k": None}
        self.operators.bwd(*reads, dq=dq, dk=dk, dv=dv, **options)


class FlashAttention2(AttentionKernel):
    """FlashAttention-2 from the package ``flash-attn``, 2.7 or newer.

    Its entry points allocate the output: one copy.
    """

    name = "flash-attention-2"
    platform = replace(AMPERE, module="flash_attn.flash_attn_interface", package="flash-attn")
    # Rows have 64-bit offsets. The step to the next sample in the fp32 dq, of all heads, is 32-bit,
    # so samples are split (csrc/flash_attn/src/flash_bwd_kernel.h, 2.8.3.post1). No product over
    # the rows of one head was found that is 32-bit; the limit stays as a margin.
    limits = ONE_HEAD_IN_32_BITS

    def __init__(self, module: Any = None):
        """``module``: by default ``flash_attn.flash_attn_interface``."""
        super().__init__()
        self.module = module or importlib.import_module("flash_attn.flash_attn_interface")
        # Up to 2.7.4.post1 the row's offset in the fp32 dq of all heads is computed in 32 bits.
        version = getattr(sys.modules.get("flash_attn"), "__version__", "2.8.0")
        if module is None and tuple(map(int, version.split(".")[:2])) < (2, 8):
            self.limits = ALL_HEADS_IN_32_BITS

    @override
    def _forward(self, x: Qkv, out: Tensor, call: Call) -> Tensor:
        q, k, v, out = (_flat(y, call) for y in (*x, out))
        options = self._options(call) | {"return_softmax": False}
        if call.run is None:
            result, lse, *_ = self.module._wrapped_flash_attn_forward(q, k, v, **options)
        else:
            options |= _segments(call, q.device)
            result, lse, *_ = self.module._wrapped_flash_attn_varlen_forward(q, k, v, **options)
        out.copy_(result)
        return lse.view(-1, x.q.shape[2], len(x.q))  # [h, tokens] -> [1, h, s_q]

    @override
    def _backward(self, d_out: Tensor, x: Qkv, y: Attended, into: QkvGrads, call: Call) -> None:
        tensors = *_flat_reads(d_out, x, y, call), *(_flat(g, call) for g in into)
        options = self._options(call) | {"deterministic": False}
        if call.run is None:
            self.module._wrapped_flash_attn_backward(*tensors, **options)
        else:
            options |= _segments(call, x.q.device)
            self.module._wrapped_flash_attn_varlen_backward(*tensors, **options)

    @staticmethod
    def _options(call: Call) -> dict[str, Any]:
        return _window(call) | {
            "causal": call.causal,
            "softmax_scale": call.scale,
            "dropout_p": 0.0,
            "softcap": 0.0,
            "alibi_slopes": None,
        }


class TorchFlash(AttentionKernel):
    """FlashAttention-2 as PyTorch ships it. Its backward allocates the gradients: one copy."""

    name = "torch-flash"
    platform = AMPERE
    # torch 2.13 builds FlashAttention's sources of 2.8.3 or later: pytorch issue 173953, and its
    # wheel's licenses name flash_attn/cute, which 2.7.4 with its 32-bit offsets did not have.
    limits = ONE_HEAD_IN_32_BITS

    def __init__(self, operators: Any = None):
        """``operators``: by default ``torch.ops.aten``."""
        super().__init__()
        self.operators = operators or torch.ops.aten
        self._no_dropout: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @override
    def _forward(self, x: Qkv, out: Tensor, call: Call) -> Tensor:
        q, k, v, out = (_flat(y, call) for y in (*x, out))
        lengths, window = tuple(_segments(call, q.device).values()), _window(call)
        if call.run is None:  # here the longest is that of a sample
            lengths = None, None, len(x.q), len(x.k)
        lse = self.operators._flash_attention_forward_no_dropout_inplace(
            out, q, k, v, *lengths, 0.0, call.causal, False, scale=call.scale, **window
        )
        return lse.view(-1, x.q.shape[2], len(x.q))  # [h, tokens] -> [1, h, s_q]

    @override
    def _backward(self, d_out: Tensor, x: Qkv, y: Attended, into: QkvGrads, call: Call) -> None:
        reads = _flat_reads(d_out, x, y, call)
        lengths, window = tuple(_segments(call, x.q.device).values()), _window(call)
        if call.run is None:
            lengths = None, None, len(x.q), len(x.k)
        # The operator requires a random state and an unused tensor, though dropout is 0 and neither
        # is read. One of each serves all calls: a new state is a memset on the stream.
        device = x.q.device
        if device not in self._no_dropout:
            state = torch.zeros(2, dtype=torch.uint64, device=device)
            self._no_dropout[device] = state, state.new_empty(0)
        gradients = self.operators._flash_attention_backward(
            *reads,
            *lengths,
            0.0,
            call.causal,
            *self._no_dropout[device],
            scale=call.scale,
            **window,
        )
        for result, gradient in zip(into, gradients, strict=True):
            _flat(result, call).copy_(gradient)  # dq may be the memory of dO


def _flat(x: Tensor, call: Call) -> Tensor:
    """[s, b, heads, d] -> [b, s, heads, d], or [tokens, heads, d] of one sample's segments."""
    return x.transpose(0, 1) if call.run is None else x.squeeze(1)


def _flat_reads(d_out: Tensor, x: Qkv, y: Attended, call: Call) -> list[Tensor]:
    """dO, q, k, v, out and the log-sum-exp, in the order that backwards take them."""
    lse = y.lse if call.run is None else y.lse.squeeze(0)  # [b, h, s] or [h, tokens]
    return [*(_flat(z, call) for z in (d_out, *x, y.out)), lse]


def _segments(call: Call, device: torch.device) -> dict[str, Tensor | int | None]:
    """Cumulative lengths of the segments of q and of k and the longest of each, or all None."""
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    if call.run is None:
        return dict.fromkeys(names)
    return dict(zip(names, (*call.run.cumulative(device), *call.run.longest), strict=True))


def _window(call: Call) -> dict[str, int]:
    """Keys to the left and right of a query, itself not counted; -1 is all."""
    return {
        "window_size_left": -1 if call.window is None else call.window - 1,
        "window_size_right": 0 if call.causal else -1,
    }
