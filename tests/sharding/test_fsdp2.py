"""Fully sharded runs against one rank that has everything."""

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron_untied.training.metrics import read_metrics
from tests.support.fsdp2_flags import (
    CONTEXT,
    DOCUMENTS,
    FULL,
    OFFLOAD,
    PARKED,
    SEQUENCE,
    TENSOR,
    TIED,
    UNEVEN,
    VECTORS,
    layers,
)
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import batch_of, train, train_state_on
from tests.support.whole_model import gather_state

AWKWARD = VECTORS | UNEVEN


def curve(folder, world_size: int, **flags) -> list[dict]:
    path = folder / "metrics.jsonl"
    run_on_ranks(train, world_size, path, train_iters=5, num_layers=3, **flags)
    return [step for step in read_metrics(path) if "lm_loss" in step]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """One rank, ordinary autograd, megatron-core's optimizer."""
    folder = tmp_path_factory.mktemp("plain")
    return {
        "untied": curve(folder / "untied", 1, **AWKWARD),
        "tied": curve(folder / "tied", 1, **AWKWARD, **TIED),
        "documents": curve(folder / "documents", 1, **AWKWARD, **DOCUMENTS),
    }


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(1, {}, id="1-rank"),
        pytest.param(2, {"eval_iters": 1, "eval_interval": 2}, id="dp2-evaluated"),
        pytest.param(2, CONTEXT | OFFLOAD, id="cp2-offload"),
        pytest.param(2, CONTEXT | layers("full", 2, **PARKED), id="cp2-full-2-parked"),
        pytest.param(2, TENSOR, id="tp2"),
        pytest.param(2, CONTEXT | layers("full", 1) | DOCUMENTS, id="cp2-full-documents"),
        pytest.param(2, CONTEXT | layers("selective", 3) | TIED, id="cp2-selective-3-tied"),
        pytest.param(2, SEQUENCE | layers("full", 1) | TIED, id="tp2-sequence-full-tied"),
        pytest.param(4, CONTEXT | layers("selective", 2) | OFFLOAD, id="dp2-cp2-selective-2"),
        pytest.param(4, CONTEXT | SEQUENCE | layers("full", 3, **PARKED), id="tp2-cp2-full-3"),
    ],
)
def test_five_steps_are_those_of_one_rank(tmp_path, plain, world_size, flags):
    kinds = {"tied": TIED, "documents": DOCUMENTS}
    kind = next((name for name, its in kinds.items() if its.items() <= flags.items()), "untied")
    expected = plain[kind]
    shared = curve(tmp_path, world_size, **FULL, **AWKWARD, **flags)
    assert len(shared) == len(expected) == 5
    for ours, theirs in zip(shared, expected, strict=True):
        # The order of sums alone differs.
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-6)
        # Above the limit: what is clipped counts every logical element once.
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert ours["grad_norm"] > 1.0
        assert ours["learning_rate"] == theirs["learning_rate"]


def test_bf16_curves_agree_with_those_of_megatron_cores_optimizer(tmp_path):
    flags = AWKWARD | {"bf16": True}
    expected = curve(tmp_path / "one", 1, **flags)
    shared = curve(tmp_path / "full", 2, **FULL, **CONTEXT, **layers("selective", 2), **flags)
    # The same main weights at first, so the same bf16 weights. Then Adam turns the rounding of tiny
    # gradients into whole steps: 1e-3 of a weight of 0.02, on a few of them.
    assert shared[0]["lm_loss"] == pytest.approx(expected[0]["lm_loss"], rel=3e-5)
    for ours, theirs in zip(shared, expected, strict=True):
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=3e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=3e-3)


def initial_state(group, **flags):
    train_state = train_state_on(group, **AWKWARD, **flags)
    shards = train_state.checkpoint_state.shards.shards(with_moments=True)
    held = sum(shard.value.numel() for shard in shards)
    return (
        gather_state(train_state.checkpoint_state),
        held / train_state.num_parameters,
        train_state.checkpoint_state.shards.step(),
    )


@pytest.mark.parametrize("flags", [{}, {"bf16": True}, TIED], ids=["fp32", "bf16", "tied"])
def test_initial_weights_are_those_of_every_other_sharding(flags):
    ((expected, *_),) = run_on_ranks(initial_state, 1, **flags)
    assert not any(value.any() for name, value in expected.items() if "exp_avg" in name)
    for split in (FULL, FULL | TENSOR, FULL | OFFLOAD, {"use_distributed_optimizer": True}):
        for state, share, step in run_on_ranks(initial_state, 2, **flags, **split):
            assert all(torch.equal(state[name], expected[name]) for name in expected)
            assert share == pytest.approx(0.5, rel=0.05)  # vectors are copies with TENSOR
            assert step == 0


def evaluation(group, **flags):
    train_state = train_state_on(group, **flags)
    batch = batch_of(train_state.groups, seed=1)
    with torch.no_grad():
        logits = train_state.model(batch.tokens)
        loss = pretrain_gpt.forward_step(train_state.model, batch, batch.loss_mask)
    dist.all_reduce(loss, group=train_state.groups.dp_cp)
    return loss.item(), logits


@pytest.mark.parametrize("flags", [{}, TIED], ids=["untied", "tied"])
def test_evaluates_and_gives_logits_without_gradients(flags):
    ((loss, logits),) = run_on_ranks(evaluation, 1, **flags)
    shards = run_on_ranks(evaluation, 2, **FULL, **CONTEXT, **flags)
    assert shards[0][0] == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(torch.cat([shard for _, shard in shards], 1), logits)


def check_logits_with_gradients_are_refused(group):
    train_state = train_state_on(group, **FULL)
    with pytest.raises(ValueError, match="logits of a fully sharded model have no backward"):
        train_state.model(batch_of(train_state.groups, seed=1).tokens)


def test_refuses_logits_with_gradients():
    run_on_ranks(check_logits_with_gradients_are_refused, 1)
