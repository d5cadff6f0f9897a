"""Ranks wait for one that does not come: they end, and say which it is and where it is."""

import time

import pytest

import pretrain_gpt
from megatron_untied.phases import Phase
from megatron_untied.training.initialize import read_launch
from megatron_untied.training.loop import pretrain
from tests.support.command_line import tiny_config
from tests.support.launch import launch

TIMEOUT_MINUTES = 0.2  # longer than a busy machine lets a rank wait for its turn


def train_until_one_sleeps(rank: int, sleeper: int, place: tuple, flags: dict) -> None:
    def model_provider(config, groups, progress):
        model = pretrain_gpt.model_provider(config, groups, progress)
        if rank == sleeper:
            fall_asleep_at(place, model.attention_context.kernel, progress)
        return model

    launched = read_launch()
    pretrain(
        tiny_config(launched.world_size, distributed_timeout_minutes=TIMEOUT_MINUTES, **flags),
        launched,
        model_provider=model_provider,
        datasets_provider=pretrain_gpt.datasets_provider,
        get_batch=pretrain_gpt.get_batch,
        forward_step=pretrain_gpt.forward_step,
    )


def fall_asleep_at(place: tuple, kernel, progress) -> None:
    backward = kernel._backward

    def sleepy(*arguments) -> None:
        here = progress.last_completed()
        if (here.step, here.phase, here.layer, here.chunk) == place:
            time.sleep(1000)
        backward(*arguments)

    kernel._backward = sleepy


SELECTIVE = {"recompute_granularity": "selective"}


@pytest.mark.parametrize(
    ("ranks", "sleeper", "flags"),
    [
        (2, 0, {"cp_heads_per_chunk": 4, **SELECTIVE}),
        pytest.param(
            2, 1, {"cp_comm_type": "p2p", "cp_heads_per_chunk": 4}, marks=pytest.mark.slow
        ),
        pytest.param(
            4,
            2,
            {
                "cp_comm_type": "a2a+p2p",
                "hierarchical_context_parallel_sizes": "2 2",
                "cp_heads_per_chunk": 4,
                **SELECTIVE,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ulysses", "ring", "ulysses on a ring"],
)
def test_the_others_name_the_rank_the_layer_and_the_chunk(tmp_path, ranks, sleeper, flags):
    flags = {"context_parallel_size": ranks, "global_batch_size": 2} | flags
    others = [rank for rank in range(ranks) if rank != sleeper]
    place = "iteration 2", Phase.ATTENTION_BACKWARD, 0, 1
    said = launch(
        train_until_one_sleeps, ranks, tmp_path, sleeper, place, flags, wait_for=others, timeout=90
    )
    expected = (
        f"error: rank {sleeper} did not arrive, rank {sleeper} last at iteration 2, "
        "micro-batch 1 of 2, attention backward, layer 1 of 2, chunk 2"
    )
    for rank in others:
        assert expected in said[rank], said[rank]
        assert "--distributed-timeout-minutes" in said[rank]
