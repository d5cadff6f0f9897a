"""One optimizer step: a global batch through the model and back, and what it was like."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_untied.phases import Phase
from megatron_untied.platform import device
from megatron_untied.training.batch import Batch, count_valid_tokens
from megatron_untied.training.learner import Learner

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
