"""Recompute, in backward, what a layer did not save."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_untied.context_parallel.exchange import HeadChunks
from megatron_untied.phases import MemoryCategory, Phase, allocating
from megatron_untied.streaming.activation_store import (
    ActivationStore,
    CheckpointGroup,
    SavedLayer,
    StoredLse,
)
from megatron_untied.streaming.host_tensors import Rows


def recompute(
    group: CheckpointGroup,
    store: ActivationStore,
    attend: Callable[..., tuple[HeadChunks, StoredLse]],
    finish: Callable[[nn.Module, Rows, HeadChunks, Tensor], None],
) -> SavedLayer:
    """Pop the last layer left in ``group``, complete; the caller releases its x and O.

    Called in the backward of a group's layers, last first: the first call completes all of them,
    with the layer's own ``attend`` and ``finish``. FSDP2 has gathered the parameters of the calling
    layer only. The others' are gathered here, one layer at a time, and those of the layer whose
    backward comes next stay gathered.
    """
    members = group.members
    for saved, successor in zip(members, [*members[1:], None], strict=True):
        if saved.out is not None and (successor is None or successor.x is not None):
            continue
        needs_gather = successor is not None and isinstance(saved.layer, FSDPModule)
        if needs_gather:
            saved.layer.unshard()
        if saved.out is None:
            # The last layer's output is used at once, in the backward that called this.
            is_saved = successor is not None
            with saved.layer.progress.phase(Phase.RECOMPUTE_ATTENTION):
                saved.out, saved.lse = attend(
                    saved.layer, saved.x, group.sequence, is_saved=is_saved
                )
        if successor is not None:
            _recompute_input(successor, saved, store, finish)
        if needs_gather and successor is not members[-1]:
            saved.layer.reshard()
    return members.pop()


def _recompute_input(
    layer: SavedLayer, before: SavedLayer, store: ActivationStore, finish: Callable[..., None]
) -> None:
    """The input of ``layer``, [n, b, m], from the input and attention of the layer before it."""
    with allocating(MemoryCategory.RESIDUAL):
        x = torch.empty(before.x.shape, dtype=before.x.dtype, device=before.x.device)
    with before.layer.progress.phase(Phase.RECOMPUTE_MLP):
        finish(before.layer, before.x, before.out, x)
    copy = store.save_input(layer, x)
    if copy is not None:
        copy.wait()  # x is freed on return
