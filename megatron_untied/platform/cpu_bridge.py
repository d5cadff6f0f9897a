"""Lets megatron.core run where there is no GPU, by reading its source with the device swapped.

Megatron-core names ``"cuda"`` in its sources. Where CUDA is available :func:`install` does nothing.
Otherwise every module of megatron.core is compiled with ``SWAPS`` applied to its text (line numbers
stay), and the ``torch.cuda`` it sees is ``cuda`` below. torch and the importing program are left
as they are, so a "cuda" in this project's own code still fails on a CPU.

Checked against megatron-core 0.16.1; recheck the swaps when that pin moves.
"""

import contextlib
import importlib.machinery
import re
import sys
import types
from collections.abc import Sequence

import torch

SWAPS = [
    (re.compile(pattern, re.DOTALL), to)
    for pattern, to in (
        (rb"""(['"])torch\.cuda\.(\w+Tensor)\1""", rb"\1torch.\2\1"),  # Tensor.type()'s answer
        (rb"""(['"])cuda\1""", rb"\1cpu\1"),
        (rb"""f(['"])cuda:\{[^}]*\}\1""", rb"\1cpu\1"),
        (rb"\.cuda\((?:[^()]|\([^()]*\))*\)", rb".cpu()"),
        (rb"\bpin_memory=True", rb"pin_memory=False"),
        (rb"\bfrom torch\.cuda import", f"from {__name__}.cuda import".encode()),
        (rb"(?<!from )(?<!import )\btorch\.cuda\b(?=\.)", rb"_cuda"),
    )
]


class _Event:
    """A CUDA event on a machine whose work is always done."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True


class _Stream:
    """A CUDA stream that is always drained."""

    def __init__(self, *args, **kwargs):
        pass

    def synchronize(self, *args) -> None:
        pass

    wait_event = wait_stream = synchronize

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _CpuGenerators:
    """``torch.cuda.default_generators`` with the CPU's generator for every device."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator


def _torch_cuda_on_cpu() -> types.ModuleType:
    """``torch.cuda`` as megatron.core sees it; what is not replaced comes from the real one."""
    cuda = types.ModuleType(f"{__name__}.cuda")
    cuda.__getattr__ = lambda name: getattr(torch.cuda, name)
    cuda.current_device = lambda: torch.device("cpu")
    cuda.set_device = cuda.synchronize = cuda._lazy_init = lambda *args: None
    # The real one queues calls until CUDA starts: on a CPU build, for ever.
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *args: _Stream()
    cuda.stream = cuda.device = lambda which: contextlib.nullcontext()
    cuda.default_generators = _CpuGenerators()
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.random = cuda
    cuda.nvtx = types.SimpleNamespace(range_push=lambda message: None, range_pop=lambda: None)
    return cuda


class _Loader(importlib.machinery.SourceFileLoader):
    def path_stats(self, path: str) -> dict:
        raise OSError("no .pyc: it would hold the unswapped source, or give others the swapped one")

    def get_data(self, path: str) -> bytes:
        data = super().get_data(path)
        for pattern, to in SWAPS:
            data = pattern.sub(to, data)
        return data

    def exec_module(self, module: types.ModuleType) -> None:
        module._cuda = sys.modules[f"{__name__}.cuda"]
        super().exec_module(module)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None):
        if not name.startswith("megatron.core."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(name, spec.origin)
        return spec


def install() -> None:
    """Prepare megatron.core for this machine; does nothing where CUDA is available.

    Raises:
        ImportError: if megatron.core was imported first, on a machine without CUDA.
    """
    name = f"{__name__}.cuda"
    if torch.cuda.is_available() or name in sys.modules:
        return
    if any(loaded.startswith("megatron.core.") for loaded in sys.modules):
        raise ImportError("import megatron_untied before megatron.core: there is no CUDA here")
    sys.modules[name] = _torch_cuda_on_cpu()
    sys.meta_path.insert(0, _Finder)
