import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankFailure, rank_shard, run_on_ranks


def sum_of_shards(group, x):
    total = rank_shard(x, group).sum()
    dist.all_reduce(total, group=group)
    return total.item()


def fail_on_rank_one(group):
    if group.rank() == 1:
        raise ValueError("the reason")
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_takes_part(world_size):
    x = torch.arange(8.0)
    assert run_on_ranks(sum_of_shards, world_size, x) == [28.0] * world_size


def test_failure_shows_the_ranks_traceback_and_the_next_check_runs():
    with pytest.raises(RankFailure, match="the reason"):
        run_on_ranks(fail_on_rank_one, 2)
    assert run_on_ranks(sum_of_shards, 2, torch.ones(4)) == [4.0, 4.0]
