"""2N iterations equal N, a restart and N more, bit for bit: losses, weights, moments, generators.

The model runs for real, with dropout, on batches drawn from Python's and numpy's generators, which
differ between ranks. Initial weights come from another seed after the restart.
"""

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_untied.checkpoint import (
    CheckpointConfig,
    Progress,
    load_checkpoint,
    save_checkpoint,
)
from megatron_untied.checkpoint.random_state import seed_generators
from tests.support.optimizer_run import MODEL, Split, small_run
from tests.support.ranks import run_on_ranks
from tests.support.whole_model import gather_parameters, gather_state


def train(run, iterations):
    losses = []
    for _ in range(iterations):
        tokens = torch.from_numpy(numpy.random.randint(MODEL.vocab_size, size=(2, 9)))
        weight = random.random()
        run.wrapped.zero_grad_buffer()
        run.optimizer.zero_grad()
        logits = run.wrapped(tokens[:, :-1], None, None)[..., : MODEL.vocab_size]
        loss = weight * F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        run.wrapped.finish_grad_sync()
        run.optimizer.step()
        run.state.scheduler.step(increment=4)
        losses.append(loss.item())
    return losses


def next_random_numbers():
    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(2).tolist()
    return (
        random.random(),
        numpy.random.rand(),
        numpy.random.randn(),
        torch.rand(2).tolist(),
        tracked,
    )


def start(group, split, seed):
    run = small_run(split, seed=seed, dropout=0.1)
    seed_generators(seed)
    random.seed(seed + group.rank())
    numpy.random.seed(seed + group.rank())
    numpy.random.randn()  # leaves a second normal number in the generator
    return run


def final_state(run, losses):
    parameters = gather_parameters(run.model, run.state.layouts)
    return (
        losses,
        gather_state(run.state),
        parameters,
        run.optimizer.param_groups[0]["lr"],
        next_random_numbers(),
    )


def train_without_a_stop(group, split):
    run = start(group, split, seed=1)
    return final_state(run, train(run, 6)[3:])


def train_and_save(group, split, path):
    run = start(group, split, seed=1)
    train(run, 3)
    save_checkpoint(path, run.state, Progress(iteration=3, consumed_samples=12))


def resume(group, split, path):
    run = start(group, split, seed=2)
    load_checkpoint(CheckpointConfig(load=path), run.state, seed=2)
    return final_state(run, train(run, 3))


@pytest.mark.parametrize(
    ("ranks", "split"),
    [
        (1, Split(distributed_optimizer=False)),
        (2, Split()),
        (2, Split(bf16=True)),
        (2, Split(bf16=True, distributed_optimizer=False)),
    ],
    ids=["1-plain", "dp2", "dp2-bf16", "dp2-bf16-plain"],
)
def test_a_restart_changes_nothing(tmp_path, ranks, split):
    expected = run_on_ranks(train_without_a_stop, ranks, split)
    run_on_ranks(train_and_save, ranks, split, str(tmp_path))
    found = run_on_ranks(resume, ranks, split, str(tmp_path))
    for ours, theirs in zip(found, expected, strict=True):
        losses, state, parameters, learning_rate, random_numbers = ours
        assert losses == theirs[0]
        assert len(set(losses)) == 3
        assert all(torch.equal(state[name], theirs[1][name]) for name in theirs[1])
        assert all(torch.equal(parameters[name], theirs[2][name]) for name in theirs[2])
        assert learning_rate == theirs[3]
        assert random_numbers == theirs[4]


def load_and_draw(group, split, config, seed):
    run = start(group, split, seed=2)
    progress = load_checkpoint(config, run.state, seed=seed)
    return (
        progress,
        run.state.shards.step(),
        run.optimizer.param_groups[0]["lr"],
        next_random_numbers(),
    )


def draw_after_seeding(group, split, seed):
    start(group, split, seed=2)
    if seed is not None:
        seed_generators(seed)
    return next_random_numbers()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("checkpoints"))
    run_on_ranks(train_and_save, 2, Split(), path)
    return path


def test_other_ranks_seed_their_generators_from_the_seed_and_the_iteration(saved):
    for split in (Split(tensor=2), Split(context=2)):
        found = run_on_ranks(load_and_draw, 2, split, CheckpointConfig(load=saved), 50)
        expected = run_on_ranks(draw_after_seeding, 2, split, 50 + 3)
        assert [answer[3] for answer in found] == expected


def test_no_load_rng_leaves_the_generators(saved):
    config = CheckpointConfig(load=saved, load_rng=False)
    found = run_on_ranks(load_and_draw, 2, Split(), config, 50)
    assert [answer[3] for answer in found] == run_on_ranks(draw_after_seeding, 2, Split(), None)
    assert found[0][0] == Progress(iteration=3, consumed_samples=12)


def test_finetune_takes_the_weights_alone(saved):
    config = CheckpointConfig(load=saved, finetune=True)
    found = run_on_ranks(load_and_draw, 2, Split(), config, 50)
    progress, step, learning_rate, _ = found[0]
    assert (progress, step, learning_rate) == (Progress(), 0, 0.0)
    assert [answer[3] for answer in found] == run_on_ranks(draw_after_seeding, 2, Split(), None)


def test_no_load_optim_keeps_the_progress_but_starts_adam_and_the_schedule_anew(saved):
    config = CheckpointConfig(load=saved, load_optim=False)
    progress, step, learning_rate, _ = run_on_ranks(load_and_draw, 2, Split(), config, 50)[0]
    assert (progress, step, learning_rate) == (Progress(iteration=3, consumed_samples=12), 0, 0.0)


@pytest.mark.parametrize("flags", [{"finetune": True}, {"load_optim": False}])
def test_weights_alone_are_the_checkpoints_and_moments_zero(saved, flags):
    config = CheckpointConfig(load=saved, **flags)
    everything = run_on_ranks(load_and_gather, 2, Split(), CheckpointConfig(load=saved))[0]
    weights = run_on_ranks(load_and_gather, 1, Split(), config)[0]
    for name, values in everything.items():
        expected = values if name.startswith("model.") else torch.zeros_like(values)
        assert torch.equal(weights[name], expected), name


def load_and_gather(group, split, config):
    run = start(group, split, seed=2)
    load_checkpoint(config, run.state, seed=2)
    return gather_state(run.state)
