"""Build again, in backward, what a layer did not keep."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_untied.context_parallel.head_major import HeadMajor
from megatron_untied.context_parallel.untied import LogSumExps
from megatron_untied.phases import MemoryCategory, Phase, allocating
from megatron_untied.streaming.host import HostLogSumExps
from megatron_untied.streaming.stash import Attention, Group, LayerStash, Rows, Stash

Attend = Callable[..., Attention]
Finish = Callable[[nn.Module, Rows, HeadMajor, Tensor], None]


def rebuild(
    group: Group, stash: Stash, attend: Attend, finish: Finish
) -> tuple[Rows, HeadMajor, LogSumExps]:
    """x, O and log-sum-exps of the last layer left in ``group``; the caller releases x and O.

    Called in the backward of a group's layers, last first: the first call fills in what all of
    them lack. FSDP2 has gathered the parameters of the calling layer only; the others' are
    gathered here, one at a time, and those of the layer whose backward comes next stay.
    """
    members = group.members
    for each, following in zip(members, [*members[1:], None], strict=True):
        complete = each.attention is not None and (following is None or following.x is not None)
        if complete:
            continue
        if following is not None:
            _gather(each.layer)
        if each.attention is None:
            is_kept = following is not None
            with each.layer.progress.phase(Phase.RECOMPUTE_ATTENTION):
                each.attention = attend(each.layer, each.x, group.sequence, is_kept=is_kept)
        if following is not None:
            _keep_output(each, following, stash, finish)
            if following is not members[-1]:
                _scatter(each.layer)
    last = members.pop()
    out, lse = last.attention
    return last.x, out, lse.on_device() if isinstance(lse, HostLogSumExps) else lse


def _keep_output(each: LayerStash, following: LayerStash, stash: Stash, finish: Finish) -> None:
    """The input of the layer that follows, from the input and attention of ``each``."""
    with allocating(MemoryCategory.RESIDUAL):
        result = torch.empty(each.x.shape, dtype=each.x.like.dtype, device=each.x.like.device)
    with each.layer.progress.phase(Phase.RECOMPUTE_MLP):
        finish(each.layer, each.x, each.attention[0], result)
    leaving = stash.keep_rows(following, result)
    if leaving is not None:
        leaving.wait()


def _gather(layer: nn.Module) -> None:
    if isinstance(layer, FSDPModule):
        layer.unshard()


def _scatter(layer: nn.Module) -> None:
    if isinstance(layer, FSDPModule):
        layer.reshard()
