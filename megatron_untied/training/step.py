"""One training step: read micro-batches, forward and backward, update; and evaluation.

The loss of a step is the mean over the valid tokens of the global batch, weighted by the loss mask.
The sum of the weights is reduced over all ranks before the first backward. After that, each rank's
loss and gradients are partial sums, and no later step divides by a number of micro-batches or
ranks.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.utils.data import Dataset

from megatron_untied.checkpoint.collective_errors import raise_on_all_ranks
from megatron_untied.config.run import LoopConfig, RunConfig
from megatron_untied.context_parallel.sequence import SequenceInfo
from megatron_untied.data.loader import micro_batches
from megatron_untied.phases import Phase
from megatron_untied.platform import device
from megatron_untied.training.guards import StepGuard, StepNumbers
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
    samples: tuple[int, ...] = ()
    """Numbers of the samples in the dataset, for messages; set by :func:`global_batches`."""


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

    def read() -> list[Batch]:
        batches = []
        for micro_batch in itertools.islice(samples, num_micro_batches):
            numbers = tuple(micro_batch.pop("number").tolist())
            batches.append(replace(get_batch(micro_batch, config, groups), samples=numbers))
        return batches

    while True:
        with errors_in_one_line():
            # One all-reduce of a number per step; without it the other ranks would wait in the
            # first collective of the forward for a rank that has failed.
            batches = raise_on_all_ranks(read)
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
    """False if the update was skipped because the loss or the gradient was not finite."""


def train_step(
    train_state: TrainState,
    batches: list[Batch],
    *,
    num_samples: int,
    forward_step: ForwardStep,
    guard: StepGuard | None = None,
    iteration: int = 0,
) -> StepResult:
    """Do one optimizer step; collective over all ranks.

    Args:
        train_state: updated in place.
        batches: this rank's micro-batches.
        num_samples: by which the schedule advances: an iteration's, as it counts them.
        forward_step: computes the loss of a micro-batch.
        guard: checks the numbers; None makes one that checks nothing.
        iteration: counted from 1, for messages.

    Raises:
        UserError: on every rank, before anything is updated: a check of ``guard`` failed.
    """
    guard = guard or StepGuard(train_state.model, LoopConfig(train_iters=0, check_for_nan=False))
    valid_tokens, weight = count_valid_tokens(batches, train_state.groups.dp_cp)
    guard.begin(iteration)
    compute = functools.partial(
        compute_gradients, train_state, batches, weight, forward_step=forward_step, guard=guard
    )
    numbers = compute(then=train_state.sharding.update)
    failed = not numbers.replays_equal or (guard.checks_nan and not numbers.is_finite)
    if failed:
        samples = [batch.samples for batch in batches]
        if guard.rerun_on_nan and not numbers.is_finite:
            progress = train_state.progress
            total_units = progress.last_completed().total_units
            progress.begin(f"iteration {iteration}, run again", total_units)
            found = guard.verdict(numbers, compute, samples)
        else:
            found = guard.message(numbers, samples)
        with errors_in_one_line():
            raise FloatingPointError(f"iteration {iteration}: {found}")
    if numbers.is_finite:  # as in Megatron, a skipped step does not count in the schedule
        train_state.scheduler.step(increment=num_samples)
    return StepResult(
        lm_loss=numbers.lm_loss,
        grad_norm=float(numbers.grad_norm),
        learning_rate=train_state.scheduler.get_lr({}),
        valid_tokens=valid_tokens,
        updated=numbers.is_finite,
    )


def compute_gradients(
    train_state: TrainState,
    batches: list[Batch],
    total_weight: float,
    *,
    forward_step: ForwardStep,
    guard: StepGuard,
    then: Callable[[float | Tensor], None] | None = None,
) -> StepNumbers:
    """Forward and backward of one step, and what came of it; collective over all ranks.

    All ranks return alike: the loss is reduced together with the flags of ``guard``, over all
    ranks. The host waits for the device there, before the optimizer's kernels are launched.

    Args:
        train_state: its gradients are replaced.
        batches: this rank's micro-batches.
        total_weight: as in :func:`forward_backward`.
        forward_step: computes the loss of a micro-batch.
        guard: has begun this step.
        then: is called with the gradient's norm, if no rank has a number that is not finite or a
            replay that differs.
    """
    sharding = train_state.sharding
    sharding.zero_grad()
    losses = forward_backward(train_state, batches, total_weight, forward_step)
    require_disk(train_state)  # before the NaN that a failed read leaves is looked at
    with train_state.progress.phase(Phase.OPTIMIZER):
        norm = sharding.gradient_norm()
        # Tensor-parallel ranks have the same loss: the first of them counts.
        own_loss = sum(losses) if train_state.groups.tp.rank() == 0 else losses[0].new_zeros(())
        sums = torch.cat([own_loss[None], guard.flags(losses, norm)])
        dist.all_reduce(sums)
        lm_loss, num_not_finite, num_differing = sums.tolist()
        is_finite, replays_equal = num_not_finite == 0, num_differing == 0
        if then is not None and is_finite and replays_equal:
            then(norm)
    return StepNumbers(
        losses=losses,
        lm_loss=lm_loss,
        grad_norm=norm,
        is_finite=is_finite,
        replays_equal=replays_equal,
    )


def require_disk(train_state: TrainState) -> None:
    """End the run on all ranks if a disk of saved activations has failed on one; collective."""
    if train_state.disk is not None:
        with errors_in_one_line():
            raise_on_all_ranks(train_state.disk.require_no_failure)


def forward_backward(
    train_state: TrainState, batches: list[Batch], total_weight: float, forward_step: ForwardStep
) -> list[Tensor]:
    """Accumulate this rank's gradients of ``batches`` in the model.

    Args:
        train_state: holds the model; its gradients are added to.
        batches: this rank's micro-batches.
        total_weight: of the valid tokens of the global batch. If it is 0, loss and gradients are.
        forward_step: computes the loss of a micro-batch.

    Returns:
        This rank's part of the loss, of each micro-batch: scalars in fp64. The sum over them and
        the ranks is the loss.
    """
    losses = []
    sharding, progress = train_state.sharding, train_state.progress
    for number, batch in enumerate(batches, start=1):
        name = f"micro-batch {number} of {len(batches)}" if len(batches) > 1 else ""
        is_last = batch is batches[-1]
        # Gradients are reduced over ranks once, in the backward of the last micro-batch.
        with contextlib.nullcontext() if is_last else sharding.no_sync():
            with progress.phase(Phase.FORWARD, micro_batch=name):
                # Not a local variable, which would keep the weights alive during backward.
                loss = forward_step(sharding.model, batch, batch.loss_mask / (total_weight or 1))
                # fp64: one scalar, and the sum does not depend on the number of micro-batches.
                losses.append(loss.detach().double())
            with progress.phase(Phase.BACKWARD, micro_batch=name):
                loss.backward()
    return losses


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
