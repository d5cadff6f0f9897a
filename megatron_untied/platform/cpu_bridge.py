"""Lets megatron.core run without a GPU, by compiling its source with the device names replaced.

Megatron-core names ``"cuda"`` in its sources. Where CUDA is available :func:`install` does nothing.
Otherwise every module of megatron.core is compiled with ``SWAPS`` applied to its text (line numbers
stay), and the ``torch.cuda`` it sees is ``cuda`` below. torch and the importing program are left
as they are, so a "cuda" in this project's own code still fails on a CPU.

Checked against megatron-core 0.16.1; recheck the swaps when that pin moves.
"""

import collections
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
        # Nothing here runs a compiled function, and the compiler takes a second to import.
        (rb"\bjit_fuser = torch\.compile\b", rb"jit_fuser = noop_decorator"),
    )
]


def _do_nothing(*args, **kwargs) -> None:
    pass


class _Event:
    """A CUDA event on a machine whose work is always done."""

    __init__ = record = wait = synchronize = _do_nothing
    query = staticmethod(lambda: True)


class _Stream:
    """A CUDA stream that is always drained."""

    __init__ = synchronize = wait_event = wait_stream = _do_nothing

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


def _torch_cuda_on_cpu() -> types.ModuleType:
    """The module that megatron.core uses as ``torch.cuda``; the rest comes from the real one."""
    cuda = types.ModuleType(f"{__name__}.cuda")
    cuda.__getattr__ = lambda name: getattr(torch.cuda, name)
    cuda.current_device = lambda: torch.device("cpu")
    cuda.set_device = cuda.synchronize = cuda._lazy_init = _do_nothing
    # The real one queues calls until CUDA is initialized, which never happens on a CPU.
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *args: _Stream()
    cuda.stream = cuda.device = lambda which: contextlib.nullcontext()
    # Indexed with a device or its number: one generator for every device.
    cuda.default_generators = collections.defaultdict(lambda: torch.default_generator)
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.random = cuda
    cuda.nvtx = types.SimpleNamespace(range_push=lambda message: None, range_pop=lambda: None)
    return cuda


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module of megatron.core from its text with ``SWAPS`` applied."""

    def path_stats(self, path: str) -> dict:
        # A .pyc would hold the original source, or give the replaced source to other programs.
        raise OSError("no .pyc for replaced source")

    def get_data(self, path: str) -> bytes:
        data = super().get_data(path)
        for pattern, to in SWAPS:
            data = pattern.sub(to, data)
        return data

    def exec_module(self, module: types.ModuleType) -> None:
        module._cuda = sys.modules[f"{__name__}.cuda"]
        super().exec_module(module)


class _Finder:
    """Finds modules of megatron.core before Python's own finders, for :class:`_Loader`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None):
        if not name.startswith("megatron.core."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        # Extension modules and namespace packages have no source to replace.
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
