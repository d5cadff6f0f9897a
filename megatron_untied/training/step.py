"""From the samples of a dataset to the micro-batches that one rank computes on."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.utils.data import Dataset

from megatron_untied.checkpoint.collective_errors import on_every_rank
from megatron_untied.config.run import RunConfig
from megatron_untied.context_parallel.sequence import SequenceInfo
from megatron_untied.data.loader import micro_batches
from megatron_untied.phases import Phase
from megatron_untied.platform import device
from megatron_untied.training.initialize import errors_in_one_line
from megatron_untied.training.state import Learner


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """This rank's shard of a micro-batch, on its device."""

    tokens: Tensor
    """[b, s/p] int64."""
    labels: Tensor
    """[b, s/p] int64: the token after each, which may be the next rank's first."""
    loss_mask: Tensor
    """[b, s/p] fp32: 1 where the label counts, 0 where it does not."""
    sequence: SequenceInfo = field(default_factory=SequenceInfo)
    """Positions of these tokens, and documents of the whole sequences."""


GetBatch = Callable[[dict[str, Tensor], RunConfig, ProcessGroupCollection], Batch]
"""(whole micro-batch, tensors [b, s] on the host; config; groups) -> this rank's shard of it."""


def global_batches(
    dataset: Dataset,
    config: RunConfig,
    groups: ProcessGroupCollection,
    get_batch: GetBatch,
    consumed_samples: int,
) -> Iterator[list[Batch]]:
    """For ever: what this rank computes on in one optimizer step, its micro-batches in order.

    Collective over all ranks with every item: a sample that one rank cannot read ends all of them,
    with its message in one line.
    """
    samples = micro_batches(
        dataset,
        consumed_samples=consumed_samples,
        micro_batch_size=config.batch.micro_batch_size,
        data_parallel_rank=groups.dp.rank(),
        data_parallel_size=groups.dp.size(),
        num_workers=config.data.num_workers,
    )
    num_micro_batches = config.batch.num_micro_batches(groups.dp.size())

    def read() -> list[Batch]:
        some = itertools.islice(samples, num_micro_batches)
        return [get_batch(one, config, groups) for one in some]

    while True:
        with errors_in_one_line():
            batches = on_every_rank(read)
        yield batches


def count_valid_tokens(batches: list[Batch], group: dist.ProcessGroup) -> int:
    """Tokens that count in the loss, over all ``batches`` of all ranks of ``group``; collective."""
    total = sum(batch.loss_mask.count_nonzero() for batch in batches)
    dist.all_reduce(total, group=group)
    return int(total)


ForwardStep = Callable[[nn.Module, Batch, Tensor], Tensor]
"""(model, batch, token_weights [b, s/p]) -> this rank's sum of weight x cross-entropy, fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The same on every rank."""

    lm_loss: float
    """Mean over the valid tokens of the global batch."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    """As Megatron reports it: the schedule's value after the step, which the next one uses."""
    valid_tokens: int
    updated: bool
    """False if the optimizer refused the gradient."""


def train_step(
    learner: Learner, batches: list[Batch], *, num_samples: int, forward_step: ForwardStep
) -> StepResult:
    """Update the model with a global batch of ``num_samples``; ``batches`` are this rank's part.

    Collective over all ranks. The loss is a mean over all ranks' valid tokens: with their number
    known before the first backward, losses and gradients of ranks and micro-batches only add up.
    """
    sharding, ranks = learner.sharding, learner.groups.dp_cp
    valid_tokens = count_valid_tokens(batches, ranks)
    sharding.zero_grad()
    lm_loss = forward_backward(learner, batches, valid_tokens, forward_step)
    with learner.progress.phase(Phase.OPTIMIZER):
        dist.all_reduce(lm_loss, group=ranks)
        updated, grad_norm = sharding.step()
        learner.scheduler.step(increment=num_samples)
    return StepResult(
        lm_loss=lm_loss.item(),
        grad_norm=float(grad_norm),
        learning_rate=learner.scheduler.get_lr({}),
        valid_tokens=valid_tokens,
        updated=updated,
    )


def forward_backward(
    learner: Learner, batches: list[Batch], valid_tokens: int, forward_step: ForwardStep
) -> Tensor:
    """Add this rank's gradients of ``batches`` to the model's; returns its part of the loss, fp64.

    With no valid token anywhere both are 0.
    """
    total = torch.zeros((), dtype=torch.float64, device=device.current_device())
    sharding, progress = learner.sharding, learner.progress
    for number, batch in enumerate(batches, start=1):
        which = f"micro-batch {number} of {len(batches)}" if len(batches) > 1 else ""
        is_last = batch is batches[-1]
        with contextlib.nullcontext() if is_last else sharding.more_to_come():
            with progress.phase(Phase.FORWARD, micro_batch=which):
                loss = forward_step(sharding.model, batch, batch.loss_mask / max(1, valid_tokens))
            with progress.phase(Phase.BACKWARD, micro_batch=which):
                loss.backward()
        total += loss.detach()
    return total


def require_finite(result: StepResult, iteration: int) -> None:
    """Raises ``FloatingPointError`` if the loss or the gradient is nan or infinite."""
    if not (math.isfinite(result.lm_loss) and math.isfinite(result.grad_norm)):
        raise FloatingPointError(
            f"iteration {iteration}: lm loss {result.lm_loss}, grad norm {result.grad_norm}. The "
            "weights are spoilt and not saved: go on from the last checkpoint with a lower --lr, "
            "or give --no-check-for-nan-in-loss-and-grad to train on"
        )


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
