"""Stand-ins for operators that need a GPU: the same arguments, computed plainly on a CPU.

Signatures are those of FlashAttention-3's operators, of ``flash_attn.flash_attn_interface`` 2.8,
and of PyTorch's operators, which are also called with meta tensors so that PyTorch checks them.
"""

import torch
from torch import Tensor

from megatron_untied.context_parallel.kernels import Mask, Segments
from tests.support import plain_attention


class Attention:
    """Attention of [b, s, heads, d], or of segments of [tokens, heads, d]."""

    def __init__(self, cu_q, cu_k, max_q, max_k, causal: bool, left: int, right: int, scale: float):
        assert right == (0 if causal else -1)
        segments = None
        if cu_q is not None:
            assert cu_q.dtype == cu_k.dtype == torch.int32
            assert (cu_q.diff().max(), cu_k.diff().max()) == (max_q, max_k)
            assert min(cu_q.diff().min(), cu_k.diff().min()) > 0, "no segment may be empty"
            segments = (Segments(queries=tuple(cu_q.tolist()), keys=tuple(cu_k.tolist())),)
        window = left + 1 if left >= 0 else None
        self.mask, self.scale = Mask(causal=causal, window=window, segments=segments), scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Out in q's layout; log-sum-exp [b, h, s] or [h, tokens]."""
        out, lse = plain_attention.attention(
            *(_sbhd(x).double() for x in (q, k, v)), self.mask, self.scale
        )
        return _like(out, q), lse.float() if q.dim() == 4 else lse[0].float()

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> list[Tensor]:
        """Gradients of q, k, v, each in its layout."""
        assert lse.is_contiguous()
        leaves = [_sbhd(x).double().requires_grad_() for x in (q, k, v)]
        expected, expected_lse = plain_attention.attention(*leaves, self.mask, self.scale)
        assert torch.allclose(_sbhd(out).double(), expected, atol=2e-2)
        expected_lse = expected_lse if q.dim() == 4 else expected_lse[0]
        assert torch.allclose(lse.double(), expected_lse, atol=1e-4)
        gradients = torch.autograd.grad(expected, leaves, _sbhd(d_out).double())
        return [_like(gradient, x) for gradient, x in zip(gradients, (q, k, v), strict=True)]


def _sbhd(x: Tensor) -> Tensor:
    return x.transpose(0, 1) if x.dim() == 4 else x[:, None]


def _like(x: Tensor, like: Tensor) -> Tensor:
    return (x.transpose(0, 1) if like.dim() == 4 else x[:, 0]).to(like.dtype)


class Flash4Module:
    """``flash_attn.cute.interface``, with the arguments by name that torch passes to it."""

    def _flash_attn_fwd(self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                        softmax_scale, causal, window_size_left, window_size_right, return_lse,
                        num_splits, out):  # fmt: skip
        assert (num_splits, return_lse) == (1, True)
        attention = Attention(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal,
                              *_none_is_all(window_size_left, window_size_right),
                              softmax_scale)  # fmt: skip
        result, lse = attention.forward(q, k, v)
        out.copy_(result)
        return out, lse, None, None, None  # as 4.0.0b36; what is None is of other attentions

    def _flash_attn_bwd(self, q, k, v, out, dout, lse, *, softmax_scale, causal, window_size_left,
                        window_size_right, cu_seqlens_q, cu_seqlens_k,
                        deterministic):  # fmt: skip
        assert deterministic is False
        longest = [None if cu is None else cu.diff().max() for cu in (cu_seqlens_q, cu_seqlens_k)]
        attention = Attention(cu_seqlens_q, cu_seqlens_k, *longest, causal,
                              *_none_is_all(window_size_left, window_size_right),
                              softmax_scale)  # fmt: skip
        return attention.backward(dout, q, k, v, out, lse)


def _none_is_all(left, right):
    assert -1 not in (left, right)
    return (-1 if left is None else left), (-1 if right is None else right)


class Flash3Operators:
    """``torch.ops.flash_attn_3``."""

    def fwd(self, q, k, v, k_new=None, v_new=None, q_v=None, out=None, cu_seqlens_q=None,
            cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None,
            max_seqlen_q=None, max_seqlen_k=None, *, softmax_scale=None, is_causal=False,
            window_size_left=-1, window_size_right=-1, num_splits=0):  # fmt: skip
        assert num_splits == 1
        attention = Attention(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal,
                              window_size_left, window_size_right, softmax_scale)  # fmt: skip
        result, lse = attention.forward(q, k, v)
        out.copy_(result)
        return out, lse, None, None

    def bwd(self, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k,
            seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale, is_causal,
            window_size_left=-1, window_size_right=-1, softcap=0.0):  # fmt: skip
        attention = Attention(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal,
                              window_size_left, window_size_right, softmax_scale)  # fmt: skip
        gradients = attention.backward(dout, q, k, v, out, softmax_lse)
        for result, gradient in zip((dq, dk, dv), gradients, strict=True):
            result.copy_(gradient)
        return dq, dk, dv, None, None


class Flash2Module:
    """``flash_attn.flash_attn_interface``."""

    def _wrapped_flash_attn_forward(self, q, k, v, dropout_p, softmax_scale, causal,
                                    window_size_left, window_size_right, softcap, alibi_slopes,
                                    return_softmax):  # fmt: skip
        return self._wrapped_flash_attn_varlen_forward(
            q, k, v, None, None, None, None, dropout_p, softmax_scale, causal, window_size_left,
            window_size_right, softcap, alibi_slopes, return_softmax)  # fmt: skip

    def _wrapped_flash_attn_varlen_forward(self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                           max_seqlen_k, dropout_p, softmax_scale, causal,
                                           window_size_left=-1, window_size_right=-1, softcap=0.0,
                                           alibi_slopes=None, return_softmax=False):  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
        attention = Attention(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal,
                              window_size_left, window_size_right, softmax_scale)  # fmt: skip
        return *attention.forward(q, k, v), None, None

    def _wrapped_flash_attn_backward(self, dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p,
                                     softmax_scale, causal, window_size_left, window_size_right,
                                     softcap, alibi_slopes, deterministic,
                                     rng_state=None):  # fmt: skip
        return self._wrapped_flash_attn_varlen_backward(
            dout, q, k, v, out, softmax_lse, dq, dk, dv, None, None, None, None, dropout_p,
            softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
            deterministic, rng_state)  # fmt: skip

    def _wrapped_flash_attn_varlen_backward(self, dout, q, k, v, out, softmax_lse, dq, dk, dv,
                                            cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                            dropout_p, softmax_scale, causal, window_size_left,
                                            window_size_right, softcap, alibi_slopes, deterministic,
                                            rng_state=None):  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, deterministic) == (0.0, 0.0, None, False)
        attention = Attention(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal,
                              window_size_left, window_size_right, softmax_scale)  # fmt: skip
        gradients = attention.backward(dout, q, k, v, out, softmax_lse)
        for result, gradient in zip((dq, dk, dv), gradients, strict=True):
            result.copy_(gradient)


class TorchOperators:
    """``torch.ops.aten``, as far as attention on CUDA goes."""

    def _flash_attention_forward_no_dropout_inplace(self, out, q, k, v, *args, **options):
        _check_signature("_flash_attention_forward_no_dropout_inplace", out, q, k, v, *args,
                         **options)  # fmt: skip
        *lengths, dropout, causal, _ = args
        result, lse = self._attention(lengths, causal, options).forward(q, k, v)
        out.copy_(result)
        return lse

    def _flash_attention_backward(self, d_out, q, k, v, out, lse, *args, **options):
        _check_signature("_flash_attention_backward", d_out, q, k, v, out, lse, *args, **options)
        *lengths, dropout, causal, rng_state, unused = args
        return self._attention(lengths, causal, options).backward(d_out, q, k, v, out, lse)

    def _scaled_dot_product_cudnn_attention(self, q, k, v, *args, scale):
        _check_signature("_scaled_dot_product_cudnn_attention", q, k, v, *args, scale=scale)
        bias, with_lse, dropout, causal, debug = args
        assert with_lse
        out, lse = self._cudnn(causal, scale).forward(*(x.transpose(1, 2) for x in (q, k, v)))
        return out.transpose(1, 2), lse[..., None]

    def _scaled_dot_product_cudnn_attention_backward(self, d_out, q, k, v, out, lse, *args, scale):
        _check_signature("_scaled_dot_product_cudnn_attention_backward", d_out, q, k, v, out, lse,
                         *args, scale=scale)  # fmt: skip
        *_, max_q, max_k, dropout, causal = args
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        assert lse.shape == (*q.shape[:3], 1)
        gradients = self._cudnn(causal, scale).backward(
            *(x.transpose(1, 2) for x in (d_out, q, k, v, out)), lse[..., 0]
        )
        return [x.transpose(1, 2) for x in gradients]

    def _attention(self, lengths, causal, options) -> Attention:
        window = options["window_size_left"], options["window_size_right"]
        return Attention(*lengths, causal, *window, options["scale"])

    def _cudnn(self, causal, scale) -> Attention:
        return Attention(None, None, None, None, causal, -1, 0 if causal else -1, scale)


def _check_signature(operator: str, *args, **options) -> None:
    def meta(x):
        return x.to("meta") if isinstance(x, Tensor) else x

    getattr(torch.ops.aten, operator)(*map(meta, args), **options)
