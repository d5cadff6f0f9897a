import pytest
import torch

import pretrain_gpt
from megatron_untied.training.step import (
    Batch,
    count_valid_tokens,
    evaluate,
    forward_backward,
    train_step,
)
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import train_state_on


def random_batch(num_samples: int, *, seed: int, valid: float) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 251, (num_samples, 65), generator=generator)
    return Batch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        loss_mask=(torch.rand(num_samples, 64, generator=generator) < valid).float(),
    )


def joined(batches: list[Batch]) -> Batch:
    fields = ("tokens", "labels", "loss_mask")
    return Batch(**{name: torch.cat([getattr(b, name) for b in batches]) for name in fields})


def gradients(train_state) -> torch.Tensor:
    return torch.cat([p.main_grad.flatten() for p in train_state.model.module.parameters()])


def backward(train_state, batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    train_state.sharding.zero_grad()
    _, weight = count_valid_tokens(batches, train_state.groups.dp_cp)
    losses = forward_backward(train_state, batches, weight, pretrain_gpt.forward_step)
    return sum(losses), gradients(train_state).clone()


UNEVEN = [
    random_batch(1, seed=1, valid=0.1),
    random_batch(3, seed=2, valid=0.9),
    random_batch(2, seed=3, valid=0.0),
]


def check_micro_batches_add_up(group):
    train_state = train_state_on(group)
    loss, gradient = backward(train_state, UNEVEN)
    whole_loss, whole_gradient = backward(train_state, [joined(UNEVEN)])
    # The same sums in another order, in fp32.
    torch.testing.assert_close(loss, whole_loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-4, atol=1e-7)


def test_micro_batches_of_unequal_weight_add_up_to_the_whole_batch():
    run_on_ranks(check_micro_batches_add_up, 1)


def check_nothing_valid(group):
    train_state = train_state_on(group, weight_decay=0)
    before = [parameter.clone() for parameter in train_state.model.module.parameters()]
    result = train_step(
        train_state,
        [random_batch(1, seed=1, valid=0.0)],
        num_samples=1,
        forward_step=pretrain_gpt.forward_step,
    )
    assert (result.lm_loss, result.grad_norm, result.valid_tokens) == (0.0, 0.0, 0)
    for old, new in zip(before, train_state.model.module.parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_batch_without_valid_tokens_changes_nothing():
    run_on_ranks(check_nothing_valid, 1)


def one_rank_has_nothing(group):
    batch = random_batch(1, seed=1, valid=0.5 if group.rank() else 0.0)
    train_state = train_state_on(group)
    step = train_step(train_state, [batch], num_samples=2, forward_step=pretrain_gpt.forward_step)
    return step, gradients(train_state)


def test_a_rank_without_valid_tokens_takes_part():
    (first, gradient), (second, same_gradient) = run_on_ranks(one_rank_has_nothing, 2)
    assert first == second
    assert first.lm_loss == pytest.approx(5.5, abs=0.1)  # ln 251 is 5.53
    assert torch.equal(gradient, same_gradient)
    assert gradient.norm() > 0


def norms_by_clip(group, clip_grad):
    train_state = train_state_on(group, clip_grad=clip_grad)
    step = train_step(
        train_state,
        [random_batch(2, seed=1, valid=1.0)],
        num_samples=2,
        forward_step=pretrain_gpt.forward_step,
    )
    return step.grad_norm, gradients(train_state).norm().item()


@pytest.mark.parametrize("clip_grad", [0.0, 0.01, 100.0])
def test_the_norm_before_clipping_is_reported_and_the_gradient_clipped_to_it(clip_grad):
    ((reported, clipped),) = run_on_ranks(norms_by_clip, 1, clip_grad)
    assert reported > 0.1
    assert clipped == pytest.approx(0.01 if clip_grad == 0.01 else reported, rel=1e-3)


def check_evaluation(group):
    train_state = train_state_on(group)
    loss = evaluate(train_state, [UNEVEN, UNEVEN[:1]], forward_step=pretrain_gpt.forward_step)
    assert train_state.model.training
    everything = joined([*UNEVEN, UNEVEN[0]])
    logits = train_state.model.module(everything.tokens)[..., :251]
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), everything.labels.flatten(), reduction="none"
    )
    mean = each[everything.loss_mask.flatten() == 1].double().mean().item()
    assert loss == pytest.approx(mean, rel=1e-6)


def test_evaluation_is_the_mean_over_all_valid_tokens():
    run_on_ranks(check_evaluation, 1)
