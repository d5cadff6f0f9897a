import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import megatron_untied
from megatron_untied.config.run import ATTENTION_BACKENDS
from megatron_untied.context_parallel.kernels import Mask, choose_kernel
from megatron_untied.context_parallel.kernels.cudnn import Cudnn
from megatron_untied.context_parallel.kernels.flash_attention import FlashAttention3, TorchFlash
from megatron_untied.context_parallel.kernels.registry import KERNELS
from megatron_untied.context_parallel.kernels.split_calls import Shape, split_calls

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
            "the package FlashAttention-3 (No module named 'flash_attn_interface')",
        ),
        ("flash-attention-2", "the package flash-attn (No module named 'flash_attn')"),
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
         "takes heads of up to 256 channels in multiples of 8, not --kv-channels 20"),
        ("torch-flash", BF16 | {"head_width": 264},
         "takes heads of up to 256 channels in multiples of 8, not --kv-channels 264"),
        ("fused", BF16 | {"window": 8}, "cudnn has no sliding window"),
        ("fused", BF16 | {"documents": True},
         "cudnn has no documents. --attention-backend auto takes one that works."),
        ("flash", FP32, "cpu-flash needs tensors on a CPU"),
    ],
)  # fmt: skip
def test_says_what_a_kernel_cannot_do(hopper, backend, needs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        choose_kernel(backend, hopper, **needs)


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """Packages for attention by the text of their files, found before any that is installed."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        importlib.invalidate_caches()

    loaded = set(sys.modules)
    yield write
    for name in set(sys.modules) - loaded:
        if name.split(".")[0] in ("flash_attn", "flash_attn_interface"):
            del sys.modules[name]


BROKEN = {
    "another torch": "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')",
    "another CUDA": "raise OSError('libcudart.so.12: cannot open shared object file')",
    "no GPU code": "raise RuntimeError('two lines\\nof trouble')",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize(
    ("backend", "files"),
    [
        ("flash-attention-3", ["flash_attn_interface.py"]),
        ("flash-attention-2", ["flash_attn/flash_attn_interface.py", "flash_attn/__init__.py"]),
    ],
)
def test_a_package_that_does_not_import_is_passed_over_by_auto(
    hopper, packages, backend, files, text
):
    packages(dict.fromkeys(files, text))
    kernel = choose_kernel("auto", hopper, **BF16)
    assert kernel.name == "torch-flash"
    reason = text.split("'")[1].partition("\\n")[0]
    assert [reason in passed for passed in kernel.passed_over].count(True) == 1
    with pytest.raises(ValueError, match=re.escape(f"{backend} needs the package")) as error:
        choose_kernel(backend, hopper, **BF16)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("is_overwritten", [False, True])
def test_an_older_flash_attention_4_inside_of_flash_attn_is_not_taken(
    hopper, packages, monkeypatch, is_overwritten
):
    """flash-attn 2.8.3 installs one over that of flash-attn-4: other arguments, the same name."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    # As in flash-attn 2.8.3.post1, and as in flash-attn-4 4.0.0b36.
    last = "pack_gqa=None" if is_overwritten else "num_splits=1, return_lse=False, out=None"
    text = f"def _flash_attn_fwd(q, k, v, softmax_scale=None, causal=False, {last}): ..."
    packages({"flash_attn/cute/interface.py": text})
    kernel = choose_kernel("auto", hopper, **BF16)
    assert kernel.name == ("torch-flash" if is_overwritten else "flash-attention-4")
    if is_overwritten:
        with pytest.raises(ValueError, match="cute is flash-attn's; pip install --force-reinstall"):
            choose_kernel("flash-attention-4", hopper, **BF16)


def test_flash_attention_4_alone_is_not_flash_attention_2(hopper, packages):
    """Its package has no flash_attn/__init__.py: the name is there, as a namespace."""
    packages({"flash_attn/cute/__init__.py": ""})
    assert choose_kernel("auto", hopper, **BF16).name == "torch-flash"


@pytest.mark.parametrize(("version", "fits"), [("2.7.4.post1", False), ("2.8.3.post1", True)])
def test_limits_are_those_of_the_installed_flash_attention_2(hopper, packages, version, fits):
    packages({
        "flash_attn/__init__.py": f"__version__ = '{version}'",
        "flash_attn/flash_attn_interface.py": "",
    })  # fmt: skip
    long = Shape(num_queries=5 << 20, num_keys=5 << 20, b=1, h=4, g=1, d=128)
    if fits:
        kernel = choose_kernel("auto", hopper, **BF16, shapes=[long])
        assert kernel.name == "flash-attention-2"
        assert len(split_calls(long, Mask(), kernel.limits)) == 1
        return
    message = (
        "flash-attention-2 cannot index 5243008 rows x 128 channels x 4 heads are 2684420096 "
        "elements, and the kernel's limit is 2147483648; give fewer --cp-heads-per-chunk or more "
        "ring ranks"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        choose_kernel("flash-attention-2", hopper, **BF16, shapes=[long])
    kernel = choose_kernel("auto", hopper, **BF16, shapes=[long])
    assert kernel.name == "torch-flash"
    assert message in kernel.passed_over


def test_a_sequence_too_long_for_flash_attention_is_not_left_to_matrix_products(hopper):
    long = Shape(num_queries=20 << 20, num_keys=20 << 20, b=1, h=4, g=1, d=128)
    with pytest.raises(ValueError, match="matrix-products would materialize scores"):
        choose_kernel("auto", hopper, **BF16, shapes=[long])
    assert choose_kernel("local", hopper, **BF16, shapes=[long]).name == "matrix-products"
    shorter = replace(long, num_queries=5 << 20, num_keys=5 << 20)
    assert choose_kernel("auto", hopper, **BF16, shapes=[shorter]).name == "torch-flash"


def test_what_a_kernel_accepts_it_can_split(hopper):
    """The choice and the calls ask the same limit, on both sides of it."""
    for kind in dict.fromkeys(kernel for row in KERNELS.values() for kernel in row):
        for rows in (1 << 20, 4_194_176, 4_194_177, 5 << 20, 16_777_087, 16_777_088, 1 << 25):
            for h, g in ((1, 1), (4, 1), (4, 4), (8, 2)):
                shape = Shape(num_queries=rows, num_keys=rows, b=2, h=h, g=g, d=128)
                needs = {"dtype": kind.limits.dtypes[0], "head_width": 128, "shapes": [shape]}
                if list(kind.limits.problems(**needs)):
                    with pytest.raises(ValueError, match="the kernel's limit is"):
                        split_calls(shape, Mask(), kind.limits)
                else:
                    assert split_calls(shape, Mask(), kind.limits)


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
