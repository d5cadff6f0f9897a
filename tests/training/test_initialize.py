import pytest
import torch.distributed as dist

from megatron_untied.training.initialize import (
    Launch,
    errors_in_one_line,
    initialize,
    read_launch,
)
from tests.support.command_line import tiny_config
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import launch_of


def test_reads_what_torchrun_says(monkeypatch):
    ranks = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    for name, value in {**ranks, "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert read_launch() == Launch(rank=5, world_size=8, local_rank=1)


def test_a_process_started_by_hand_is_alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert read_launch() == Launch(rank=0, world_size=1, local_rank=0)


def group_ranks(group) -> dict[str, list[int]]:
    config = tiny_config(4, tensor_model_parallel_size=2, context_parallel_size=2)
    groups = initialize(config, launch_of(group))
    names = ("tp", "cp", "dp", "dp_cp")
    return {name: dist.get_process_group_ranks(getattr(groups, name)) for name in names}


def test_neighbors_share_tensor_parallelism_then_context_parallelism():
    ranks = run_on_ranks(group_ranks, 4)
    assert ranks[0] == {"tp": [0, 1], "cp": [0, 2], "dp": [0], "dp_cp": [0, 2]}
    assert ranks[3] == {"tp": [2, 3], "cp": [1, 3], "dp": [3], "dp_cp": [1, 3]}


def hierarchical_ranks(group) -> list[list[int]]:
    config = tiny_config(4, context_parallel_size=4, cp_comm_type="a2a+p2p",
                         hierarchical_context_parallel_sizes="2 2")  # fmt: skip
    groups = initialize(config, launch_of(group))
    return [dist.get_process_group_ranks(its) for its in groups.hcp]


def test_neighbors_share_heads_and_others_a_ring():
    ranks = run_on_ranks(hierarchical_ranks, 4)
    assert ranks == [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]


@pytest.mark.parametrize(
    "error", [ValueError("two of them"), FileNotFoundError("no file"), IsADirectoryError("folder")]
)
def test_a_users_mistake_is_one_line(error):
    with pytest.raises(SystemExit) as exit_, errors_in_one_line():
        raise error
    assert str(exit_.value) == f"error: {error}"


def test_our_own_mistake_keeps_its_traceback():
    with pytest.raises(TypeError), errors_in_one_line():
        raise TypeError
