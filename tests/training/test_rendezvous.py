import sys
import threading
from dataclasses import asdict

import pytest
import torch.distributed as dist

import pretrain_gpt
from megatron_untied.config.flag_names import flag_of
from megatron_untied.training.initialize import Launch
from megatron_untied.training.rendezvous import (
    _fields,
    gather_in,
    open_store,
    require_same_config,
)
from tests.support.command_line import command_line, tiny_config
from tests.support.launch import launch


def main_with(rank: int, flags: dict[int, dict]) -> None:
    shared = {"context_parallel_size": 2, "train_iters": 1, "log_interval": 1}
    sys.argv = ["pretrain_gpt.py", *command_line(**shared | flags[rank])]
    pretrain_gpt.main()


def test_ranks_with_different_flags_all_end_with_the_flag_the_values_and_the_ranks(tmp_path):
    flags = {0: {"seq_length": 64}, 1: {"seq_length": 128, "no_cp_overlap": True}}
    said = launch(main_with, 2, tmp_path, flags)
    assert said[1] == "1\n"  # the exit status; the message is printed once
    for text in said[:1]:
        assert "error: ranks were started with different flags" in text
        assert "--seq-length is 64 on rank 0 and 128 on rank 1" in text
        assert "--cp-overlap is True on rank 0 and False on rank 1" in text
        assert "max-position" not in text  # follows from the sequence length
        assert len(text.strip().splitlines()) == 2  # the status follows


def test_ranks_may_differ_in_what_matters_on_one_of_them_alone(tmp_path):
    flags = {0: {"metrics_jsonl": tmp_path / "m.jsonl", "num_workers": 1}, 1: {"log_interval": 7}}
    flags[1]["data_cache_path"] = tmp_path / "cache"
    said = launch(main_with, 2, tmp_path, flags)
    assert "lm loss" in said[0]
    assert "error" not in said[0] + said[1]
    assert (tmp_path / "m.jsonl").read_text()


def test_ranks_are_grouped_by_their_values():
    store, said = dist.HashStore(), {}

    def meet(rank: int, seed: int) -> None:
        try:
            require_same_config(tiny_config(seed=seed), Launch(rank=rank, world_size=5), store)
        except ValueError as error:
            said[rank] = str(error)

    ranks = [threading.Thread(target=meet, args=each) for each in enumerate((7, 8, 7, 8, 9))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    expected = "--seed is 7 on ranks 0, 2 and 8 on ranks 1, 3 and 9 on rank 4."
    assert [expected in said[rank] for rank in range(5)] == [True] * 5


def test_ranks_gather_in_the_store_in_their_order_again_and_again():
    store, found = dist.HashStore(), {}

    def meet(rank: int) -> None:
        gather = gather_in(store, Launch(rank=rank, world_size=3))
        found[rank] = gather({"rank": rank}), gather(ValueError(f"of {rank}"))

    ranks = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    for rank in range(3):
        first, second = found[rank]
        assert first == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert [str(error) for error in second] == ["of 0", "of 1", "of 2"]


def test_a_rank_alone_agrees_with_itself():
    for _ in range(2):  # each run has keys of its own
        store = open_store(Launch())
        require_same_config(tiny_config(), Launch(), store)


def test_every_setting_has_a_name():
    unnamed = [name for name in _fields(asdict(tiny_config())) if flag_of(name) == name]
    assert not unnamed


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("parallel.heads_per_chunk", "--cp-heads-per-chunk"),
        ("model.rotary.base", "--rotary-base"),
        ("model.num_layers", "--num-layers"),
        ("distributed.backend", "--distributed-backend"),
        ("loop.check_for_nan", "--no-check-for-nan-in-loss-and-grad"),
    ],
)
def test_flags_of_fields(field, flag):
    assert flag_of(field) == flag
