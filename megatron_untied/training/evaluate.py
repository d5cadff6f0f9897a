"""The loss on held-out samples."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from megatron_untied.phases import Phase
from megatron_untied.platform import device
from megatron_untied.training.batch import Batch
from megatron_untied.training.learner import Learner
from megatron_untied.training.step import ForwardStep


@torch.no_grad()
def evaluate(
    learner: Learner, global_batches: Iterable[list[Batch]], *, forward_step: ForwardStep
) -> float:
    """Mean cross-entropy over all valid tokens of ``global_batches``; collective over all ranks.

    Every token counts the same, whichever batch it is in; nan if none is valid.
    """
    learner.model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device.current_device())  # loss, tokens
    for batches in global_batches:
        for batch in batches:
            with learner.progress.phase(Phase.FORWARD):
                sums[0] += forward_step(learner.model, batch, batch.loss_mask)
            sums[1] += batch.loss_mask.count_nonzero()
    dist.all_reduce(sums, group=learner.groups.dp_cp)
    learner.model.train()
    return (sums[0] / sums[1]).item()
