import re
from pathlib import Path

import pytest
import torch

import megatron_untied
from megatron_untied.config.run import ATTENTION_BACKENDS
from megatron_untied.context_parallel.kernels import choose_kernel
from megatron_untied.context_parallel.kernels.cudnn import Cudnn
from megatron_untied.context_parallel.kernels.flash_attention import FlashAttention3, TorchFlash
from megatron_untied.context_parallel.kernels.registry import KERNELS

CPU = torch.device("cpu")
FP32 = {"dtype": torch.float32, "head_width": 64}
BF16 = {"dtype": torch.bfloat16, "head_width": 128}


@pytest.mark.parametrize("needs", [FP32, BF16, BF16 | {"window": 4, "documents": True}])
@pytest.mark.parametrize(
    ("backend", "name"),
    [("auto", "cpu-flash"), ("flash", "cpu-flash"), ("local", "matrix-products")],
)
def test_on_a_cpu(backend, name, needs):
    assert choose_kernel(backend, CPU, **needs).name == name


def test_every_backend_has_kernels():
    assert KERNELS.keys() == set(ATTENTION_BACKENDS)


@pytest.mark.parametrize("backend", ["fused", "cudnn", "flash-attention-2", "torch-flash"])
def test_names_what_is_missing(backend):
    message = f"--attention-backend {backend} has no kernel here: .* needs an Ampere or newer GPU"
    with pytest.raises(ValueError, match=message):
        choose_kernel(backend, CPU, **BF16)


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper GPU, as far as the choice asks, without the flash-attn packages."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    return torch.device("cuda", 0)


def test_on_a_gpu_without_packages_pytorchs_own_flash_attention(hopper):
    for backend in ("auto", "flash", "torch-flash"):
        assert choose_kernel(backend, hopper, **BF16).name == "torch-flash"
    assert choose_kernel("fused", hopper, **BF16).name == "cudnn"
    assert choose_kernel("auto", hopper, **FP32).name == "matrix-products"


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (
            "flash-attention-3",
            "the package FlashAttention-3 (no module named flash_attn_interface)",
        ),
        ("flash-attention-2", "the package flash-attn (no module named flash_attn)"),
    ],
)
def test_names_the_package_that_was_asked_for(hopper, backend, message):
    with pytest.raises(ValueError, match=re.escape(f"{backend} needs {message}")):
        choose_kernel(backend, hopper, **BF16)


@pytest.mark.parametrize(
    ("backend", "needs", "message"),
    [
        ("torch-flash", FP32, "torch-flash computes in bfloat16 and float16, not float32"),
        ("torch-flash", BF16 | {"head_width": 20},
         "takes heads of a multiple of 8 channels up to 256, not 20"),
        ("torch-flash", BF16 | {"head_width": 264},
         "takes heads of a multiple of 8 channels up to 256, not 264"),
        ("fused", BF16 | {"window": 8}, "cudnn has no sliding window"),
        ("fused", BF16 | {"documents": True},
         "cudnn has no documents. --attention-backend auto takes one that works."),
        ("flash", FP32, "cpu-flash needs tensors on a CPU"),
    ],
)  # fmt: skip
def test_says_what_a_kernel_cannot_do(hopper, backend, needs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        choose_kernel(backend, hopper, **needs)


def test_rejects_layouts_that_a_kernel_would_misread():
    limits = FlashAttention3.limits
    x = torch.empty(8, 2, 4, 16, dtype=torch.bfloat16)
    limits.check_layout(q=x, k=x[1:, :, 1:], v=x.transpose(0, 1))
    with pytest.raises(ValueError, match=r"dk has strides \(128, 64, 1, 16\): the last dimension"):
        limits.check_layout(q=x, dk=x.mT)
    flat = torch.empty(2000, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"q starts at element 4 with strides .* 16 bytes"):
        limits.check_layout(q=flat[4:].as_strided((8, 2, 4, 16), x.stride()))
    with pytest.raises(ValueError, match=r"q starts at element 0 with strides \(132, .* 16 bytes"):
        limits.check_layout(q=flat.as_strided((8, 2, 4, 16), (132, 64, 16, 1)))


def test_cudnn_and_torch_flash_know_pytorchs_operators():
    operators = torch.ops.aten
    assert TorchFlash().operators is operators
    assert Cudnn().operators is operators


def test_nothing_else_imports_flash_attention():
    package = Path(megatron_untied.__file__).parent
    kernels = package / "context_parallel" / "kernels"
    for file in package.rglob("*.py"):
        if kernels not in file.parents:
            assert "flash_attn" not in file.read_text(), file
