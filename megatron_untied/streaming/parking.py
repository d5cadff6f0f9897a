"""Give a tensor's device memory away while attention runs."""

import contextlib
from collections.abc import Iterator

from torch import Tensor

from megatron_untied.streaming.host import HostRows
from megatron_untied.streaming.stash import DeviceRows, Rows, Stash


@contextlib.contextmanager
def parked(x: Tensor, stash: Stash, already: Rows | None = None) -> Iterator[Rows]:
    """The rows of ``x`` [n, b, m]; if the stash parks, ``x`` has no device memory meanwhile.

    ``already`` is a copy of ``x`` that exists: if it is on the host, nothing is copied out. The
    storage keeps its identity, so whatever aliases ``x`` is right again afterwards.
    """
    if not stash.park:
        yield DeviceRows(x)
        return
    if isinstance(already, HostRows):
        rows, borrowed = already, True
        stash.arena.engine.wait_all()  # x may still be on its way to that copy
    else:
        slot, borrowed = stash.arena.reserve(x.shape, x.dtype), False
        slot.store(x).wait()
        rows = HostRows(slot, stash.workspace, x[:0])
    storage = x.untyped_storage()
    num_bytes = storage.nbytes()
    storage.resize_(0)
    try:
        yield rows
    finally:  # an error inside must not leave a tensor without memory behind
        storage.resize_(num_bytes)
    rows.slot.fetch(x).wait()
    if not borrowed:
        rows.release()
