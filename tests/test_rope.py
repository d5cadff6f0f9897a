import math
from dataclasses import replace

import mpmath
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import megatron_untied  # noqa: F401
from megatron_untied.config import RotaryConfig
from megatron_untied.rope import (
    RotaryTable,
    check_scaling,
    rotary_frequencies,
    rotate,
    rotate_,
    rotated_width,
)

PLAIN = RotaryConfig(base=500000.0)
LINEAR = RotaryConfig(base=10000.0, scaling="linear", scaling_factor=4.0)
LLAMA31 = RotaryConfig(base=500000.0, scaling="llama3", scaling_factor=8.0)
YARN = RotaryConfig(
    base=1e6, scaling="yarn", scaling_factor=4.0, original_max_positions=32768
)  # Qwen2.5 and Qwen3
YARN_UNROUNDED = replace(YARN, base=150000.0, scaling_factor=32.0, truncate=False)  # gpt-oss
KINDS = {
    "plain": PLAIN,
    "linear": LINEAR,
    "llama3": LLAMA31,
    "yarn": YARN,
    "yarn, not rounded": YARN_UNROUNDED,
    "yarn, factor given": replace(YARN, attention_factor=0.9, beta_fast=24.0, beta_slow=2.0),
    "percent": replace(PLAIN, percent=0.5),
    "yarn, percent": replace(YARN, percent=0.25),
}
FIVE_MILLION = 5 << 20
each_kind = pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)


def hf_config(config, head_width):
    """The same embedding as a Hugging Face Llama configuration."""
    rope = {
        "rope_type": "default" if config.scaling == "none" else config.scaling,
        "rope_theta": config.base,
        "partial_rotary_factor": config.percent,
    }
    if config.scaling != "none":
        rope["factor"] = config.scaling_factor
    if config.scaling in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = config.original_max_positions
    if config.scaling == "llama3":
        rope |= {
            "low_freq_factor": config.low_freq_factor,
            "high_freq_factor": config.high_freq_factor,
        }
    if config.scaling == "yarn":
        rope |= {
            "beta_fast": config.beta_fast,
            "beta_slow": config.beta_slow,
            "truncate": config.truncate,
            "attention_factor": config.attention_factor,
        }
    positions = int(config.original_max_positions * config.scaling_factor)
    return LlamaConfig(
        head_dim=head_width,
        hidden_size=4 * head_width,
        num_attention_heads=4,
        max_position_embeddings=positions,
        rope_parameters=rope,
    )


@pytest.mark.parametrize("config", [c for c in KINDS.values() if c.scaling != "none"])
@pytest.mark.parametrize("head_width", [64, 128])
def test_frequencies_equal_hugging_face(config, head_width):
    theirs, their_factor = ROPE_INIT_FUNCTIONS[config.scaling](hf_config(config, head_width))
    ours, our_factor = rotary_frequencies(config, head_width)
    assert ours.dtype == torch.float64
    # They compute in fp32: a few roundings, more where the llama3 ramp subtracts near-equal values.
    torch.testing.assert_close(ours.float(), theirs, rtol=2e-6, atol=0)
    assert our_factor == pytest.approx(their_factor, rel=1e-12)


def test_plain_frequencies_equal_hugging_face():
    theirs = LlamaRotaryEmbedding(hf_config(PLAIN, 128)).inv_freq
    ours, factor = rotary_frequencies(PLAIN, 128)
    torch.testing.assert_close(ours.float(), theirs, rtol=5e-7, atol=0)
    assert factor == 1.0


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequencies_equal_megatron(factor):
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    theirs = RotaryEmbedding(
        128, 1.0, rotary_base=500000, rope_scaling=True, rope_scaling_factor=factor
    )
    ours, _ = rotary_frequencies(replace(LLAMA31, scaling_factor=factor), 128)
    torch.testing.assert_close(ours.float(), theirs.inv_freq, rtol=2e-6, atol=0)


def test_yarn_equals_megatron():
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    theirs = YarnRotaryEmbedding(
        128,
        rotary_base=YARN.base,
        scaling_factor=YARN.scaling_factor,
        original_max_position_embeddings=YARN.original_max_positions,
    )
    angles, their_factor = theirs.get_emb(2)  # [2, 1, 1, 128]: row 1 is one step of each pair
    ours, our_factor = rotary_frequencies(YARN, 128)
    torch.testing.assert_close(ours.float(), angles[1, 0, 0, :64], rtol=2e-6, atol=0)
    assert our_factor == pytest.approx(their_factor, rel=1e-12)


def exact_frequencies(config, head_width):
    """Frequencies to 40 digits, from the papers' formulas."""
    width = int(head_width * config.percent)
    for i in range(width // 2):
        plain = mpmath.mpf(config.base) ** (mpmath.mpf(-2 * i) / width)
        yield plain + (plain / config.scaling_factor - plain) * exact_share(config, i, plain, width)


def exact_share(config, i, frequency, width):
    """How much of ``frequency`` is stretched."""
    context = config.original_max_positions
    if config.scaling == "llama3":
        low, high = config.low_freq_factor, config.high_freq_factor
        smooth = (context * frequency / (2 * mpmath.pi) - low) / (high - low)
        return 1 - min(max(smooth, 0), 1)
    if config.scaling == "yarn":
        ends = [
            width * mpmath.log(context / (beta * 2 * mpmath.pi)) / (2 * mpmath.log(config.base))
            for beta in (config.beta_fast, config.beta_slow)
        ]
        if config.truncate:
            ends = [mpmath.floor(ends[0]), mpmath.ceil(ends[1])]
        low, high = max(ends[0], 0), min(ends[1], width - 1)
        return min(max((i - low) / (high - low), 0), 1)
    return {"none": 0, "linear": 1}[config.scaling]


@each_kind
def test_cos_and_sin_are_exact_up_to_five_million(config):
    positions = [0, *(2**k for k in range(23)), FIVE_MILLION - 1]
    cos, sin = RotaryTable(config, 32).at(torch.tensor(positions))
    _, factor = rotary_frequencies(config, 32)
    with mpmath.workdps(40):
        for j, frequency in enumerate(exact_frequencies(config, 32)):
            for row, position in enumerate(positions):
                angle = position * frequency
                assert abs(cos[row, 0, 0, j].item() - factor * mpmath.cos(angle)) < 1e-6
                assert abs(sin[row, 0, 0, j].item() - factor * mpmath.sin(angle)) < 1e-6


def test_fp32_angles_would_be_far_off():
    """Why the table is made in float64."""
    positions = torch.arange(FIVE_MILLION - 1000, FIVE_MILLION)
    cos, _ = RotaryTable(PLAIN, 128).at(positions)
    frequencies = LlamaRotaryEmbedding(hf_config(PLAIN, 128)).inv_freq
    fp32 = (positions[:, None].float() * frequencies).cos()
    assert (cos[:, 0, 0] - fp32).abs().max() > 0.1


def test_positions_may_differ_within_the_batch():
    table = RotaryTable(LLAMA31, 16)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 0, 1, FIVE_MILLION]])
    cos, sin = table.at(positions)
    assert cos.shape == sin.shape == (5, 2, 1, 8)
    for row in range(2):
        alone_cos, alone_sin = RotaryTable(LLAMA31, 16).at(positions[row])
        assert torch.equal(cos[:, row : row + 1], alone_cos)
        assert torch.equal(sin[:, row : row + 1], alone_sin)


def test_table_is_rebuilt_only_when_positions_change():
    table, positions = RotaryTable(PLAIN, 8), torch.arange(6)
    cos, sin = table.at(positions)
    assert table.at(positions)[0] is cos
    assert table.at(positions)[1] is sin
    positions.add_(1)  # a loader that reuses its tensor
    later, _ = table.at(positions)
    assert torch.equal(later[:-1], cos[1:])
    assert not torch.equal(later, cos)
    assert table.at(torch.arange(6))[0] is not cos


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_model_dtype_default_dtype_and_build_device_do_not_touch_the_table(dtype):
    positions = torch.arange(9) + FIVE_MILLION
    expected, _ = RotaryTable(PLAIN, 8).at(positions)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = torch.nn.Linear(2, 2)
            model.rotary = RotaryTable(PLAIN, 8)
            model.to(dtype)
            cos, _ = model.rotary.at(positions)
    finally:
        torch.set_default_dtype(torch.float32)
    assert cos.dtype == torch.float32
    assert torch.equal(cos, expected)
    model.to(dtype)
    assert torch.equal(model.rotary.at(positions)[0], expected)
    assert [name for name, _ in model.named_parameters()] == ["weight", "bias"]
    assert not list(model.buffers())


class LargestTemporary(TorchDispatchMode):
    """Bytes of the largest storage a call makes, besides those of its result."""

    def __init__(self, result_nbytes):
        super().__init__()
        self.result_nbytes, self.nbytes = result_nbytes, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().nbytes() != self.result_nbytes:
            self.nbytes = max(self.nbytes, out.untyped_storage().nbytes())
        return out


def test_a_ranks_share_of_five_million_positions_traces_with_small_temporaries():
    n, half = FIVE_MILLION // 8, 64
    with FakeTensorMode():
        positions = torch.arange(n)
        with LargestTemporary(n * half * 4) as largest:
            cos, sin = RotaryTable(LLAMA31, 128).at(positions)
        assert cos.shape == sin.shape == (n, 1, 1, half)
        assert cos.nbytes == sin.nbytes == 160 << 20
        assert largest.nbytes == 64 << 20  # float64 angles of one block

        x = torch.empty(n, 1, 4, 128, dtype=torch.bfloat16)
        with LargestTemporary(x.nbytes) as largest:
            rotate_(x, cos, sin)
        assert largest.nbytes == 16 << 20  # half of a head's width, fp32, one block


def test_blocks_join_without_a_seam():
    n = (1 << 23) // 32 + 77  # a full block and a short one
    cos, sin = RotaryTable(PLAIN, 64).at(torch.arange(n))
    edge = slice(n - 80, n)
    edge_cos, edge_sin = RotaryTable(PLAIN, 64).at(torch.arange(n)[edge])
    assert torch.equal(cos[edge], edge_cos)
    assert torch.equal(sin[edge], edge_sin)
    x = torch.randn(n, 1, 1, 70)
    rotated = rotate_(x, cos, sin, out=torch.empty_like(x))
    assert torch.equal(rotated[edge], rotate_(x[edge].clone(), cos[edge], sin[edge]))


def tokens_to_rotate(config, dtype=torch.float32, t=7, b=3, heads=5, d=16):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(t, b, heads, d, generator=generator, dtype=torch.float64).to(dtype)
    return x, *RotaryTable(config, d).at(torch.randint(FIVE_MILLION, (b, t), generator=generator))


@each_kind
def test_rotation_equals_hugging_face_on_the_same_table(config):
    x, cos, sin = tokens_to_rotate(config, d=32)
    rot = 2 * cos.shape[-1]
    pairs = [torch.cat([half, half], -1)[:, :, 0].transpose(0, 1) for half in (cos, sin)]
    theirs, _ = apply_rotary_pos_emb(
        *(x[..., :rot].permute(1, 2, 0, 3),) * 2, *pairs
    )  # [b, heads, t, rot]
    ours = rotate_(x, cos, sin, out=torch.empty_like(x))
    torch.testing.assert_close(ours[..., :rot], theirs.permute(2, 0, 1, 3), rtol=0, atol=2e-6)
    assert torch.equal(ours[..., rot:], x[..., rot:])


@pytest.mark.parametrize("config", [PLAIN, LINEAR, LLAMA31, YARN, YARN_UNROUNDED])
def test_table_and_rotation_equal_hugging_face_at_short_positions(config):
    positions = torch.arange(40)  # where their fp32 angles are still good: 40 * 6e-8
    x = torch.randn(2, 4, 40, 64)
    cos, sin = LlamaRotaryEmbedding(hf_config(config, 64))(x, positions[None])
    theirs, _ = apply_rotary_pos_emb(x, x, cos, sin)
    ours = rotate(x.permute(2, 0, 1, 3), *RotaryTable(config, 64).at(positions))
    torch.testing.assert_close(ours.permute(1, 2, 0, 3), theirs, rtol=0, atol=2e-5)


def test_rotation_equals_megatron():
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    x, cos, sin = tokens_to_rotate(replace(YARN, percent=0.5))
    angles = torch.atan2(sin.double(), cos.double())
    factor = rotary_frequencies(YARN, 16)[1]
    theirs = _apply_rotary_pos_emb_bshd(
        x.double(), torch.cat([angles, angles], dim=-1), mscale=factor
    )
    torch.testing.assert_close(rotate(x.double(), cos, sin), theirs, rtol=0, atol=1e-6)


@each_kind
def test_adjoint_is_the_transpose(config):
    x, cos, sin = tokens_to_rotate(config, torch.float64)
    y = torch.randn_like(x)
    rotated = rotate_(x, cos, sin, out=torch.empty_like(x))
    back = rotate_(y, cos, sin, adjoint=True, out=torch.empty_like(x))
    assert (rotated * y).sum().item() == pytest.approx((x * back).sum().item(), rel=1e-12)


def test_adjoint_undoes_the_rotation_up_to_the_attention_factor():
    x, cos, sin = tokens_to_rotate(YARN, torch.float64)
    factor = rotary_frequencies(YARN, 16)[1]
    assert factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    round_trip = rotate_(rotate_(x.clone(), cos, sin), cos, sin, adjoint=True)
    torch.testing.assert_close(round_trip, factor**2 * x, rtol=1e-6, atol=0)  # fp32 cos and sin


@pytest.mark.parametrize("config", [replace(YARN, percent=0.5), LLAMA31])
def test_gradient_is_the_adjoint(config):
    x, cos, sin = tokens_to_rotate(config, torch.float64, t=3, b=2, heads=2, d=8)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), x.requires_grad_())


@pytest.mark.parametrize("adjoint", [False, True])
def test_bf16_is_rounded_once(adjoint):
    x, cos, sin = tokens_to_rotate(LLAMA31, torch.bfloat16)
    ours = rotate_(x, cos, sin, adjoint=adjoint, out=torch.empty_like(x))
    exact = rotate_(x.double(), cos, sin, adjoint=adjoint).bfloat16()
    # fp32 arithmetic can only tip a value that lies next to the middle of two bf16 numbers.
    assert (ours != exact).float().mean() < 0.01
    torch.testing.assert_close(ours, exact, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", [LLAMA31, replace(PLAIN, percent=0.5)])
def test_in_place_and_strided_output_hold_the_same_bits(dtype, config):
    x, cos, sin = tokens_to_rotate(config, dtype)
    before = x.clone()
    expected = rotate(x, cos, sin)
    assert torch.equal(x, before)
    buffer = torch.full((2, 7, 3, 9, 16), 7.0, dtype=dtype)  # one rank's part of a send buffer
    view = buffer[1, :, :, 2:7]
    assert rotate_(x, cos, sin, out=view) is view
    assert torch.equal(view, expected)
    view.fill_(7.0)
    assert (buffer == 7.0).all()
    assert rotate_(x, cos, sin) is x
    assert torch.equal(x, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_cuda_equals_cpu(dtype):
    x, cos, sin = tokens_to_rotate(YARN, dtype)
    positions = torch.arange(FIVE_MILLION - 9, FIVE_MILLION)
    for on_cpu, on_cuda in zip(
        RotaryTable(YARN, 128).at(positions),
        RotaryTable(YARN, 128).at(positions.cuda()),
        strict=True,
    ):
        torch.testing.assert_close(on_cuda.cpu(), on_cpu, rtol=0, atol=2e-7)
    on_cuda = rotate(x.cuda(), cos.cuda(), sin.cuda())
    torch.testing.assert_close(on_cuda.cpu(), rotate(x, cos, sin))


@pytest.mark.parametrize("shape", [(0, 1, 4, 16), (5, 1, 0, 16)])
def test_nothing_to_rotate(shape):
    x = torch.empty(shape)
    assert rotate(x, *RotaryTable(PLAIN, 16).at(torch.arange(shape[0]))).shape == shape


@pytest.mark.parametrize(("percent", "head_width"), [(0.25, 20), (0.0, 64), (1.5, 64), (1.0, 15)])
def test_refuses_a_width_that_does_not_pair(percent, head_width):
    with pytest.raises(ValueError, match=f"rotary percent {percent} rotates .* 1.0 rotates"):
        rotated_width(RotaryConfig(percent=percent), head_width)
    with pytest.raises(ValueError, match="rotary percent"):
        RotaryTable(RotaryConfig(percent=percent), head_width)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RotaryConfig(base=1.0), "base 1.0 must be above 1"),
        (RotaryConfig(scaling_factor=8.0), "scaling_factor 8.0 has no effect with scaling 'none'"),
        (replace(LINEAR, scaling_factor=0.5), "scaling_factor 0.5 must be 1 or more"),
        (replace(LLAMA31, attention_factor=1.1), "attention_factor 1.1 has no effect .* 'llama3'"),
        (replace(LLAMA31, low_freq_factor=4.0), "low_freq_factor 4.0 must be below"),
        (replace(YARN, beta_slow=40.0), "beta_slow 40.0 must be below beta_fast 32.0"),
    ],
)
def test_refuses_scaling_that_cannot_work(config, message):
    with pytest.raises(ValueError, match=message):
        check_scaling(config)
    with pytest.raises(ValueError, match=message):
        RotaryTable(config, 64)
