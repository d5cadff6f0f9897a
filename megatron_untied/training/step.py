"""One training step: read micro-batches, forward and backward, update; and evaluation.

The loss of a step is the mean over the valid tokens of the global batch, weighted by the loss mask.
The sum of the weights is reduced over all ranks before the first backward. After that, each rank's
loss and gradients are partial sums, and no later step divides by a number of micro-batches or
ranks.
"""

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

from megatron_untied.checkpoint.collective_errors import raise_on_all_ranks
from megatron_untied.config.run import RunConfig
from megatron_untied.context_parallel.sequence import SequenceInfo
from megatron_untied.data.loader import micro_batches
from megatron_untied.phases import Phase
from megatron_untied.platform import device
from megatron_untied.training.initialize import errors_in_one_line
from megatron_untied.training.state import TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One rank's shard of a micro-batch, on its device."""

    tokens: Tensor
    """[b, s/p] int64."""
    labels: Tensor
    """[b, s/p] int64: the next token; the last label of a shard is the next rank's first token."""
    loss_mask: Tensor
    """[b, s/p] fp32: weights of valid tokens, whose labels contribute to the loss; 0 for others.
    They are 1 without ``--loss-weighting sample``."""
    sequence: SequenceInfo = field(default_factory=SequenceInfo)
    """Positions of this shard's tokens [b, s/p] and documents of the whole sequences [b, s]."""


GetBatch = Callable[[dict[str, Tensor], RunConfig, ProcessGroupCollection], Batch]
"""(micro-batch of tensors [b, s] on the host; config; groups) -> this rank's shard of it."""


def global_batches(
    dataset: Dataset,
    config: RunConfig,
    groups: ProcessGroupCollection,
    get_batch: GetBatch,
    consumed_samples: int,
    stop: int | None = None,
) -> Iterator[list[Batch]]:
    """Yield this rank's micro-batches of one optimizer step after another.

    Collective over all ranks at each item: if a sample cannot be read on one rank, all ranks exit
    with its message.

    Args:
        dataset: maps an index to tensors [s] by name.
        config: the whole run.
        groups: from ``initialize``.
        get_batch: cuts this rank's shard from a micro-batch.
        consumed_samples: samples to skip, over all data-parallel ranks.
        stop: samples before the first one that must not be read, because its length is another.
    """
    samples = micro_batches(
        dataset,
        consumed_samples=consumed_samples,
        micro_batch_size=config.batch.micro_batch_size,
        data_parallel_rank=groups.dp.rank(),
        data_parallel_size=groups.dp.size(),
        num_workers=config.data.num_workers,
        global_batch_size=config.batch.global_batch_size,
        stop=stop,
    )
    num_micro_batches = config.batch.num_micro_batches(groups.dp.size())
    while True:
        with errors_in_one_line():
            # One all-reduce of a number per step; without it the other ranks would wait in the
            # first collective of the forward for a rank that has failed.
            batches = raise_on_all_ranks(
                lambda: [
                    get_batch(micro_batch, config, groups)
                    for micro_batch in itertools.islice(samples, num_micro_batches)
                ]
            )
        yield batches


def count_valid_tokens(batches: list[Batch], group: dist.ProcessGroup) -> tuple[int, float]:
    """Number and summed weights of valid tokens in ``batches`` over ``group``; collective."""
    # fp64, in which a sum of ones is their number.
    sums = torch.stack(
        [
            torch.stack([batch.loss_mask.count_nonzero(), batch.loss_mask.sum(dtype=torch.float64)])
            for batch in batches
        ]
    ).sum(0)
    dist.all_reduce(sums, group=group)
    count, weight = sums.tolist()  # synchronizes: once per step, before its first kernel
    return int(count), weight


ForwardStep = Callable[[nn.Module, Batch, Tensor], Tensor]
"""(model, batch, token_weights [b, s/p]) -> this rank's sum of weight x cross-entropy, fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Outcome of one training step; identical on all ranks."""

    lm_loss: float
    """Mean cross-entropy in nats over the valid tokens of the global batch, by their weights."""
    grad_norm: float
    """L2 norm of the whole gradient before clipping."""
    learning_rate: float
    """As Megatron reports it: the schedule's value after the step, used by the next step."""
    valid_tokens: int
    updated: bool
    """False if the optimizer skipped the update because of the gradient."""


def train_step(
    train_state: TrainState, batches: list[Batch], *, num_samples: int, forward_step: ForwardStep
) -> StepResult:
    """Do one optimizer step; collective over all ranks.

    Args:
        train_state: updated in place.
        batches: this rank's micro-batches.
        num_samples: by which the schedule advances: an iteration's, as it counts them.
        forward_step: computes the loss of a micro-batch.
    """
    sharding, ranks = train_state.sharding, train_state.groups.dp_cp
    valid_tokens, weight = count_valid_tokens(batches, ranks)
    sharding.zero_grad()
    lm_loss = forward_backward(train_state, batches, weight, forward_step)
    with train_state.progress.phase(Phase.OPTIMIZER):
        dist.all_reduce(lm_loss, group=ranks)
        updated, grad_norm = sharding.step()
        train_state.scheduler.step(increment=num_samples)
    return StepResult(
        lm_loss=lm_loss.item(),  # synchronizes: the optimizer's kernels are the last of the step
        grad_norm=float(grad_norm),
        learning_rate=train_state.scheduler.get_lr({}),
        valid_tokens=valid_tokens,
        updated=updated,
    )


def forward_backward(
    train_state: TrainState, batches: list[Batch], total_weight: float, forward_step: ForwardStep
) -> Tensor:
    """Accumulate this rank's gradients of ``batches`` in the model.

    Args:
        train_state: holds the model; its gradients are added to.
        batches: this rank's micro-batches.
        total_weight: of the valid tokens of the global batch. If it is 0, loss and gradients are.
        forward_step: computes the loss of a micro-batch.

    Returns:
        This rank's part of the loss: a scalar in fp64. The sum over the ranks is the loss.
    """
    # fp64 costs one scalar per micro-batch and makes the sum independent of their number.
    total = torch.zeros((), dtype=torch.float64, device=device.current_device())
    sharding, progress = train_state.sharding, train_state.progress
    for number, batch in enumerate(batches, start=1):
        name = f"micro-batch {number} of {len(batches)}" if len(batches) > 1 else ""
        is_last = batch is batches[-1]
        # Gradients are reduced over ranks once, in the backward of the last micro-batch.
        with contextlib.nullcontext() if is_last else sharding.no_sync():
            with progress.phase(Phase.FORWARD, micro_batch=name):
                # Not a local variable, which would keep the weights alive during backward.
                loss = forward_step(sharding.model, batch, batch.loss_mask / (total_weight or 1))
            with progress.phase(Phase.BACKWARD, micro_batch=name):
                loss.backward()
        total += loss.detach()
    return total


def require_finite(result: StepResult, iteration: int) -> None:
    """Raise ``FloatingPointError`` if the loss or the gradient norm is nan or infinite."""
    if not (math.isfinite(result.lm_loss) and math.isfinite(result.grad_norm)):
        raise FloatingPointError(
            f"iteration {iteration}: lm loss {result.lm_loss}, grad norm {result.grad_norm}. The "
            "weights are not valid any more and were not saved; resume from a checkpoint with a "
            "lower --lr, or give --no-check-for-nan-in-loss-and-grad to continue regardless"
        )


@torch.no_grad()
def evaluate(
    train_state: TrainState, global_batches: Iterable[list[Batch]], *, forward_step: ForwardStep
) -> float:
    """Mean cross-entropy in nats over all valid tokens of ``global_batches``, by their weights.

    Collective over all ranks. The weight of a token does not depend on the size of its batch. The
    result is nan if no token is valid.
    """
    train_state.model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device.current_device())  # [loss, weight]
    for batches in global_batches:
        for batch in batches:
            with train_state.progress.phase(Phase.FORWARD):
                sums[0] += forward_step(train_state.model, batch, batch.loss_mask)
            # On the device, and reduced once at the end instead of once per batch.
            sums[1] += batch.loss_mask.sum(dtype=torch.float64)
    dist.all_reduce(sums, group=train_state.groups.dp_cp)
    train_state.model.train()
    return (sums[0] / sums[1]).item()
