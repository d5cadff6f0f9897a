"""Recompute, in backward, what a layer did not keep."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_untied.context_parallel.exchange import HeadMajor
from megatron_untied.phases import MemoryCategory, Phase, allocating
from megatron_untied.streaming.activation_store import (
    ActivationStore,
    CheckpointGroup,
    SavedLayer,
    StoredLse,
)
from megatron_untied.streaming.rows import Rows


def recompute(
    group: CheckpointGroup,
    store: ActivationStore,
    attend: Callable[..., tuple[HeadMajor, StoredLse]],
    finish: Callable[[nn.Module, Rows, HeadMajor, Tensor], None],
) -> SavedLayer:
    """The last layer left in ``group``, complete; the caller releases its x and O.

    Called in the backward of a group's layers, last first: the first call fills in what all of
    them lack, with the layer's own ``attend`` and ``finish``. FSDP2 has gathered the parameters of
    the calling layer only; the others' are gathered here, one at a time, and those of the layer
    whose backward comes next stay.
    """
    members = group.members
    for saved, following in zip(members, [*members[1:], None], strict=True):
        if saved.out is not None and (following is None or following.x is not None):
            continue
        if following is not None:
            _gather(saved.layer)
        if saved.out is None:
            is_kept = following is not None
            with saved.layer.progress.phase(Phase.RECOMPUTE_ATTENTION):
                saved.out, saved.lse = attend(saved.layer, saved.x, group.sequence, is_kept=is_kept)
        if following is not None:
            _keep_output(saved, following, store, finish)
            if following is not members[-1]:
                _scatter(saved.layer)
    return members.pop()


def _keep_output(
    saved: SavedLayer, following: SavedLayer, store: ActivationStore, finish: Callable[..., None]
) -> None:
    """The input of the layer that follows, from the input and attention of ``saved``."""
    with allocating(MemoryCategory.RESIDUAL):
        result = torch.empty(saved.x.shape, dtype=saved.x.dtype, device=saved.x.device)
    with saved.layer.progress.phase(Phase.RECOMPUTE_MLP):
        finish(saved.layer, saved.x, saved.out, result)
    leaving = store.keep_rows(following, result)
    if leaving is not None:
        leaving.wait()


def _gather(layer: nn.Module) -> None:
    if isinstance(layer, FSDPModule):
        layer.unshard()


def _scatter(layer: nn.Module) -> None:
    if isinstance(layer, FSDPModule):
        layer.reshard()
