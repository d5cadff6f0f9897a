"""Rotary position embedding for the positions of one rank.

Angles are computed in float64: at position 5 Mi an angle in fp32 has an error of 0.25, and in bf16
it is meaningless. Cosines and sines are stored in fp32, which keeps them within 6e-8, and the
rotation is computed in fp32. Pairs are the two halves of the rotated width, as in Llama and in
Megatron's non-interleaved form.
"""

import math

import torch
from torch import Tensor

from megatron_untied.config import RotaryConfig

_BLOCK_ELEMENTS = 1 << 23
"""Elements per block: a temporary is 64 MiB in float64, 32 MiB in fp32."""


def rotated_width(config: RotaryConfig, head_width: int) -> int:
    """Number of a head's first dimensions that are rotated: ``percent`` of them.

    Raises:
        ValueError: if that is not an even number of dimensions, at least 2.
    """
    width = int(head_width * config.percent)
    if not 0.0 < config.percent <= 1.0 or width < 2 or width % 2:
        raise ValueError(
            f"rotary percent {config.percent} rotates {width} of {head_width} dimensions; "
            f"it must be an even number of them, at least 2: 1.0 rotates {head_width // 2 * 2}."
        )
    return width


def check_scaling(config: RotaryConfig) -> None:
    """Refuse values that cannot work, and settings that would have no effect.

    Raises:
        ValueError: with the value seen and one that works.
    """
    if config.base <= 1.0:
        raise ValueError(f"rotary base {config.base} must be above 1, such as 10000.")
    if config.scaling == "none" and config.scaling_factor != 1.0:
        raise ValueError(
            f"rotary scaling_factor {config.scaling_factor} has no effect with scaling 'none'; "
            "choose 'linear', 'llama3' or 'yarn', or a factor of 1."
        )
    if config.scaling_factor < 1.0:
        raise ValueError(f"rotary scaling_factor {config.scaling_factor} must be 1 or more.")
    if config.scaling != "yarn" and config.attention_factor is not None:
        raise ValueError(
            f"rotary attention_factor {config.attention_factor} has no effect with scaling "
            f"{config.scaling!r}; choose 'yarn', or leave it None."
        )
    if config.scaling == "llama3" and config.low_freq_factor >= config.high_freq_factor:
        raise ValueError(
            f"rotary low_freq_factor {config.low_freq_factor} must be below high_freq_factor "
            f"{config.high_freq_factor}; Llama 3.1 has 1 and 4."
        )
    if config.scaling == "yarn" and config.beta_slow >= config.beta_fast:
        raise ValueError(
            f"rotary beta_slow {config.beta_slow} must be below beta_fast {config.beta_fast}; "
            "YaRN has 1 and 32."
        )


def rotary_frequencies(config: RotaryConfig, head_width: int) -> tuple[Tensor, float]:
    """Angle per position of every pair, float64 [rot/2] on the CPU, and the attention factor.

    Every kind of scaling divides some of the frequencies by ``scaling_factor``. The attention
    factor multiplies cos and sin (YaRN; 1 for the others).

    Raises:
        ValueError: see :func:`rotated_width` and :func:`check_scaling`.
    """
    check_scaling(config)
    width = rotated_width(config, head_width)
    pair = torch.arange(width // 2, dtype=torch.float64, device="cpu")
    frequencies = config.base ** (-2.0 * pair / width)  # [rot/2]
    if config.scaling == "none":
        return frequencies, 1.0
    scaled, attention_factor = frequencies / config.scaling_factor, 1.0
    if config.scaling == "linear":
        return scaled, attention_factor
    # ``stretched`` says how far each pair is scaled, 0 to 1, fp64 [rot/2].
    if config.scaling == "llama3":
        # A ramp over a pair's turns in the old context: 0 at high_freq_factor turns or more, 1 at
        # low_freq_factor or fewer.
        turns = config.original_max_positions * frequencies / (2.0 * math.pi)
        kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        stretched = 1.0 - kept.clamp(0.0, 1.0)
    else:
        # YaRN, section 3.2: a ramp over the pair's index, from the pair that turns beta_fast times
        # in the old context to the one that turns beta_slow times. Pair i turns
        # context * base^(-2i / width) / 2 pi times; solved for i.
        first, last = (
            width
            * math.log(config.original_max_positions / (turns * 2.0 * math.pi))
            / (2.0 * math.log(config.base))
            for turns in (config.beta_fast, config.beta_slow)
        )
        if config.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        if first == last:
            last += 0.001  # a step; the same number as in Hugging Face and megatron-core
        stretched = ((pair - first) / (last - first)).clamp(0.0, 1.0)
        attention_factor = config.attention_factor
        if attention_factor is None:
            attention_factor = yarn_attention_factor(config.scaling_factor)
    return scaled * stretched + frequencies * (1.0 - stretched), attention_factor


def yarn_attention_factor(
    stretch: float, mscale: float = 1.0, mscale_all_dim: float = 0.0
) -> float:
    """YaRN's factor for cos and sin, 0.1 ln(stretch) + 1, or the ratio of two weighted ones."""
    log_stretch = math.log(max(stretch, 1.0))
    return (0.1 * mscale * log_stretch + 1.0) / (0.1 * mscale_all_dim * log_stretch + 1.0)


class RotaryTable:
    """Cosines and sines for given positions; caches the last ones.

    Not a module, so that ``model.bfloat16()``, ``model.to()`` and a meta-device build leave it
    alone. All layers of a model share one. At 655,360 positions of width 128 it holds 2 x 160 MiB.

    Raises:
        ValueError: see :func:`rotated_width` and :func:`check_scaling`.
    """

    def __init__(self, config: RotaryConfig, head_width: int):
        check_scaling(config)  # here, not when the first step asks for a table
        rotated_width(config, head_width)
        self._config, self._head_width = config, head_width
        self._positions, self._version, self._table = None, None, None

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin, fp32 [n, b or 1, 1, rot/2], on the device of ``positions``.

        ``positions`` is int64 [n], the same for the whole batch, or [b, n]. The same, unmodified
        tensor costs nothing again; another one builds a new table.
        """
        if positions is self._positions and positions._version == self._version:
            return self._table
        assert positions.dtype == torch.int64, positions.dtype  # fp32 counts to 16,777,216
        self._table = None  # free the old table before allocating the new one
        frequencies, factor = rotary_frequencies(self._config, self._head_width)
        frequencies = frequencies.to(positions.device)
        by_token = positions[:, None] if positions.dim() == 1 else positions.t()  # [n, b]
        shape = (*by_token.shape, 1, frequencies.numel())
        cos = torch.empty(shape, dtype=torch.float32, device=positions.device)
        sin = torch.empty_like(cos)
        for block, cos_block, sin_block in _blocks(cos.shape[1:].numel(), by_token, cos, sin):
            angles = block[:, :, None, None] * frequencies  # float64
            cos_block.copy_(angles.cos().mul_(factor))
            sin_block.copy_(angles.sin_().mul_(factor))
        self._positions, self._version = positions, positions._version
        self._table = cos, sin
        return self._table


@torch.no_grad()
def rotate_(
    x: Tensor, cos: Tensor, sin: Tensor, *, adjoint: bool = False, out: Tensor | None = None
) -> Tensor:
    """Rotate [t, b, heads, d] in place, or into ``out``: another tensor of any strides.

    ``cos`` and ``sin`` [t, b or 1, 1, rot/2] are rows of a :class:`RotaryTable` for these tokens.
    Dimensions past the rotated width are copied. Computed in fp32 (float64 for a float64 ``x``),
    rounded once; the size of temporaries is bounded. ``adjoint`` applies the transpose, which is
    the backward pass, attention factor included. Not recorded by autograd; see :func:`rotate`.
    """
    out = x if out is None else out
    half, sign = cos.shape[-1], 1.0 if adjoint else -1.0
    for x_block, out_block, c, s in _blocks(x.shape[1:].numel(), x, out, cos, sin):
        first, second = x_block.narrow(-1, 0, half), x_block.narrow(-1, half, half)
        # Both are computed before either is written: out may be x.
        rotated_first = torch.mul(first, c).addcmul_(second, s, value=sign)
        rotated_second = torch.mul(second, c).addcmul_(first, s, value=-sign)
        if out is x:
            first.copy_(rotated_first)
            second.copy_(rotated_second)
        else:
            out_block[..., :half] = rotated_first
            out_block[..., half : 2 * half] = rotated_second
            out_block[..., 2 * half :] = x_block[..., 2 * half :]
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [t, b, heads, d] into a new tensor, differentiably; see :func:`rotate_`."""
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate_(x, cos, sin, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate_(grad, cos, sin, adjoint=True, out=torch.empty_like(grad)), None, None


def _blocks(elements_per_token: int, *tensors: Tensor) -> zip:
    """Split tensors along dimension 0 into blocks of at most ``_BLOCK_ELEMENTS``, in step."""
    tokens = max(1, _BLOCK_ELEMENTS // max(1, elements_per_token))
    if len(tensors[0]) <= tokens:
        return zip(*([tensor] for tensor in tensors), strict=True)
    return zip(*(tensor.split(tokens) for tensor in tensors), strict=True)
