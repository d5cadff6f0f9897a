"""Checkpoints of fully sharded runs: the same files as those of megatron-core's optimizers."""

import pytest
import torch

from megatron_untied.checkpoint import load_checkpoint
from megatron_untied.training.metrics import read_metrics
from tests.support.command_line import tiny_config
from tests.support.fsdp2_flags import CONTEXT, FULL, TENSOR, UNEVEN
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import train, train_state_on
from tests.support.whole_model import gather_state

DISTRIBUTED = {"use_distributed_optimizer": True}
MODEL = UNEVEN | {"qk_layernorm": True, "add_qkv_bias": True}


def loaded(group, path, **flags):
    """What a new train state of another seed has after loading: state, step, learning rate."""
    flags = {"load": path, "seed": 5, "train_iters": 6} | MODEL | flags
    train_state = train_state_on(group, **flags)
    load_checkpoint(
        tiny_config(group.size(), **flags).checkpoint, train_state.checkpoint_state, seed=5
    )
    return (
        gather_state(train_state.checkpoint_state),
        train_state.checkpoint_state.shards.step(),
        train_state.sharding.param_groups[0]["lr"],
    )


def run(world_size: int, path, **flags) -> list[dict]:
    flags = {"metrics_jsonl": path / "metrics.jsonl", "save": path, "train_iters": 6} | flags
    run_on_ranks(train, world_size, flags.pop("metrics_jsonl"), **MODEL, **flags)
    return read_metrics(path / "metrics.jsonl")


@pytest.mark.parametrize(
    ("world_size", "saver"), [(2, DISTRIBUTED), (2, FULL | CONTEXT), (4, FULL | TENSOR | CONTEXT)]
)
def test_every_sharding_reads_what_any_has_written(tmp_path, world_size, saver):
    run(world_size, tmp_path, exit_interval=3, **saver)
    expected, *rest = run_on_ranks(loaded, 1, tmp_path)[0]
    assert rest[0] == 3
    assert not any(value.isnan().any() for value in expected.values())
    for readers, flags in (
        (2, DISTRIBUTED | CONTEXT),
        (2, FULL),
        (2, FULL | TENSOR),
        (4, FULL | CONTEXT | {"optimizer_cpu_offload": True}),
    ):
        for state, *others in run_on_ranks(loaded, readers, tmp_path, **flags):
            assert others == rest
            assert state.keys() == expected.keys()
            assert all(torch.equal(state[name], expected[name]) for name in expected)


def numbers(steps: list[dict]) -> list[tuple]:
    return [(step["lm_loss"], step["grad_norm"], step["learning_rate"]) for step in steps]


@pytest.mark.parametrize("flags", [{}, {"bf16": True, "optimizer_cpu_offload": True}])
def test_a_restart_changes_nothing(tmp_path, flags):
    flags = FULL | CONTEXT | flags
    whole = run(2, tmp_path / "whole", **flags)
    run(2, tmp_path / "halves", exit_interval=3, **flags)
    second = run(2, tmp_path / "halves", load=tmp_path / "halves", **flags)
    assert len(second) == 6
    assert numbers(second) == numbers(whole)  # bit for bit
    ends = [run_on_ranks(loaded, 1, tmp_path / name)[0] for name in ("whole", "halves")]
    assert ends[0][1:] == ends[1][1:]
    assert all(torch.equal(ends[0][0][name], ends[1][0][name]) for name in ends[0][0])


def test_training_goes_on_in_another_sharding(tmp_path):
    flags = {**CONTEXT}
    whole = run(2, tmp_path / "whole", **flags, **DISTRIBUTED)
    run(2, tmp_path / "halves", exit_interval=3, **flags, **DISTRIBUTED)
    second = run(4, tmp_path / "halves", load=tmp_path / "halves", **flags, **FULL)
    for ours, theirs in zip(second, whole, strict=True):
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
