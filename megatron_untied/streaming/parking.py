"""Free a tensor's device memory while attention runs."""

import contextlib
from collections.abc import Iterator

from torch import Tensor

from megatron_untied.streaming.activation_store import ActivationStore
from megatron_untied.streaming.host_tensors import DeviceRows, HostRows, Rows


@contextlib.contextmanager
def offload_during(x: Tensor, store: ActivationStore, copy: Rows | None = None) -> Iterator[Rows]:
    """The rows of ``x`` [n, b, m]; if the store parks, ``x`` has no device memory meanwhile.

    ``copy`` is an existing copy of ``x``: if it is on the host, nothing is copied out. The storage
    object stays the same, so aliases of ``x`` are valid again afterwards.
    """
    if not store.policy.park:
        yield DeviceRows(x)
        return
    slot = copy and copy.host_slot
    owns_slot = slot is None
    if owns_slot:
        slot = store.arena.reserve(x.shape, x.dtype)
        slot.write(x).wait()
    else:
        store.arena.engine.wait_all()  # that copy may still be in flight
    storage = x.untyped_storage()
    num_bytes = storage.nbytes()
    storage.resize_(0)
    try:
        yield HostRows(slot, store.workspace, x.device)
    finally:  # an error inside must not leave a tensor without memory behind
        storage.resize_(num_bytes)
    slot.read(x).wait()
    if owns_slot:
        slot.release()
