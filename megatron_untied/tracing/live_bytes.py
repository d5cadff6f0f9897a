"""Counts the bytes of tensors alive, and who made them, over real or fake tensors alike.

A storage counts from the operation that made it until Python and autograd have let go of it, with
the size it has: ``resize_`` of a storage, with which FSDP2 and parking give memory back, counts.
What only a kernel sees of its own (workspaces, an allocator's rounding) does not.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

PACKAGE = Path(__file__).parents[1]
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment when most bytes were alive."""

    num_bytes: int = 0
    where: tuple[str, ...] = ()
    """Functions of this project on the stack, outermost first."""
    by_cause: dict[str, int] = field(default_factory=dict)


class LiveBytes(TorchDispatchMode):
    """While it is entered, counts the storages that operations make. Not reentrant.

    Tensors on "meta" count as host memory (see ``HostArena.for_tracing``), all others as the
    device's.
    """

    def __init__(self):
        super().__init__()
        self.device_bytes = 0
        self.phases={}
        self.peak = Peak()
        self.host_bytes = 0
        self.num_operations = 0
        self._by_cause: Counter[str] = Counter()
        self._storages: dict[int, tuple[int, str]] = {}

    def __enter__(self):
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._counting_resize()
        return super().__enter__()

    def __exit__(self, *exception):
        torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.num_operations += 1
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        num_bytes = storage.nbytes()
        key = storage._cdata
        known = self._storages.get(key)
        if known is None:
            cause = _cause()
            weakref.finalize(storage, self._forget, key).atexit = False
        elif known[0] == num_bytes:
            return
        else:
            cause = known[1]
        self._storages[key] = num_bytes, cause
        self._add(num_bytes - (known[0] if known else 0), cause)

    def _forget(self, key: int) -> None:
        num_bytes, cause = self._storages.pop(key)
        self._add(-num_bytes, cause)

    def _add(self, num_bytes: int, cause: str) -> None:
        self.device_bytes += num_bytes
        self._by_cause[cause] += num_bytes
        if num_bytes<=0: return
        ph=_phase()
        old=self.phases.get(ph)
        if old is None or self.device_bytes > old.num_bytes:
            alive = {cause: size for cause, size in self._by_cause.items() if size}
            self.phases[ph] = Peak(self.device_bytes, tuple(_functions()), alive)

    def _counting_resize(self):
        resize, see = self._resize, self._see

        def resize_(storage, num_bytes):
            result = resize(storage, num_bytes)
            see(storage)
            return result

        return resize_


def _cause() -> str:
    
    for f in _frames(): return _name(f)
    f=sys._getframe(2)
    while f.f_code.co_filename.endswith(("live_bytes.py","_compile.py","eval_frame.py")): f=f.f_back
    return f"other {f.f_code.co_filename.split('/')[-1]}:{f.f_lineno}"


def _functions() -> list[str]:
    return [_name(frame) for frame in _frames() if _is_ours(frame)][::-1]
def _is_ours(f): return True

def _name(frame: FrameType) -> str:
    code = frame.f_code
    if code.co_name == "take": return "workspace " + frame.f_locals["name"]
    if code.co_filename.endswith("model.py"):
        f=sys._getframe()
        while f is not None and "megatron/core" not in f.f_code.co_filename and f is not frame: f=f.f_back
        return f"model.py > {f.f_code.co_filename.split('/')[-1]}:{f.f_lineno} {f.f_code.co_name}"
    return f"{code.co_filename.split('megatron_untied/')[-1]}:{frame.f_lineno} {code.co_name}"


def _frames() -> Iterator[FrameType]:
    """Frames of this project outside this folder, innermost first."""
    frame = sys._getframe()
    package, here = str(PACKAGE), str(HERE)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(package) and not name.startswith(here):
            yield frame
        frame = frame.f_back

PH={"attend","rebuild","finish","_after_attention_backward","_before_attention_backward","chunked_cross_entropy","layer_forward","layer_backward"}
def _phase():
    names=[f.f_code.co_name+("@"+f.f_code.co_filename.split("/")[-1] if f.f_code.co_name in("forward","backward") else "") for f in _frames()]
    for n in names:
        if n in PH: return ("rebuild/" if "rebuild" in names and n!="rebuild" else "")+n + ("/chunks" if "backward@untied.py" in names or "forward@untied.py" in names else "")
    return "other:"+(names[0] if names else "")
