"""Part: versions of what is installed, the GPU, and which optional packages import."""

import importlib
import importlib.metadata
import platform

import torch

from benchmarks.gpu.record import Record
from benchmarks.gpu.sizes import Sizes
from megatron_untied.platform import device
from megatron_untied.platform.device import GIB

REQUIRED = ("torch", "megatron.core", "megatron_untied")
OPTIONAL = (
    "flash_attn.cute.interface",
    "flash_attn_interface",
    "flash_attn.flash_attn_interface",
    "transformer_engine.pytorch",
    "apex.optimizers",
)


def run(record: Record, sizes: Sizes) -> None:
    """Import each package in this process; one that is installed and does not import is noted."""
    for name in REQUIRED + OPTIONAL:
        state, reason = "imports", None
        try:
            module = importlib.import_module(name)
            state = getattr(module, "__version__", state)
        except ModuleNotFoundError as error:
            state, reason = "not installed", str(error)
        except Exception as error:  # a build for another torch or CUDA raises what its loader does
            state, reason = "does not import", str(error)
        record.row("packages", package=name, version=state, reason=reason)
        optional_and_absent = name in OPTIONAL and state == "not installed"
        record.expect(reason is None or optional_and_absent, f"{name} {state}: {reason}")
    record.row("machine", property="Python", value=platform.python_version())
    record.row("machine", property="host memory, GiB", value=device.host_memory_bytes() / GIB)
    if not torch.cuda.is_available():
        return
    found = torch.cuda.get_device_properties(0)
    for name, value in {
        "GPU": found.name,
        "compute capability": f"{found.major}.{found.minor}",
        "GPU memory, GiB": found.total_memory / GIB,
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "fp32 matrix products": torch.get_float32_matmul_precision(),
    }.items():
        record.row("machine", property=name, value=value)
