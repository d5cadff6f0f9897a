import multiprocessing
import os
import signal
from itertools import islice

import pytest
import torch
from torch.utils.data import Dataset

from megatron_untied.data import loader
from megatron_untied.data.loader import micro_batches


class Numbered(Dataset):
    """Sample i holds i everywhere, and a field that the model is not given."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        fields = ("tokens", "labels", "loss_mask", "positions")
        return {name: torch.full((3,), index) for name in fields} | {"dataset_id": 0}


def order(
    num_batches, *, rank=0, size=1, micro_batch_size=2, consumed_samples=0, num_workers=0, stop=None
):
    batches = micro_batches(
        Numbered(),
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=rank,
        data_parallel_size=size,
        num_workers=num_workers,
        stop=stop,
    )
    return [batch["tokens"][:, 0].tolist() for batch in islice(batches, num_batches)]


def test_batches_have_the_four_fields_and_the_numbers_of_their_samples():
    batch = next(
        micro_batches(
            Numbered(),
            consumed_samples=0,
            micro_batch_size=2,
            data_parallel_rank=0,
            data_parallel_size=1,
            num_workers=0,
        )
    )
    assert batch.pop("number").tolist() == [0, 1]
    assert list(batch) == ["tokens", "labels", "loss_mask", "positions"]
    assert all(tensor.shape == (2, 3) for tensor in batch.values())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_a_global_batch_is_the_same_samples_on_any_ranks(size, micro_batch_size):
    num_batches = 12 // (size * micro_batch_size)  # three global batches of 12
    ranks = [
        order(3 * num_batches, rank=rank, size=size, micro_batch_size=micro_batch_size)
        for rank in range(size)
    ]
    for batch in range(3):
        steps = slice(batch * num_batches, (batch + 1) * num_batches)
        seen = sorted(i for rank in ranks for samples in rank[steps] for i in samples)
        assert seen == list(range(12 * batch, 12 * (batch + 1)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_continues_where_it_stopped(num_workers):
    whole = order(12, rank=1, size=2, num_workers=num_workers)
    resumed = order(7, rank=1, size=2, consumed_samples=5 * 2 * 2, num_workers=num_workers)
    assert whole[5:] == resumed


def test_another_number_of_ranks_resumes_at_the_same_sample():
    assert order(2, size=3, rank=0, micro_batch_size=1, consumed_samples=8) == [[8], [11]]


def test_the_first_sample_follows_the_last():
    assert order(3, micro_batch_size=20) == [
        list(range(20)),
        list(range(20, 40)),
        [*range(40, 50), *range(10)],
    ]


def test_the_runs_random_numbers_are_left_alone():
    before = torch.get_rng_state()
    order(2)
    order(2, num_workers=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_read_after_a_stop(num_workers, rank):
    """Samples of another length begin there, and workers would read them ahead."""
    sizes = {"size": 2, "num_workers": num_workers, "consumed_samples": 8, "stop": 16}
    batches = [[8, 9], [12, 13]] if rank == 0 else [[10, 11], [14, 15]]
    assert order(10, rank=rank, **sizes) == batches


class Work(Numbered):
    """Dealt by work, so that the order within a global batch is another."""

    attention_work = torch.arange(50).flip(0).numpy() % 7


class Deadly(Numbered):
    """Kills the worker that reads sample 11."""

    def __getitem__(self, index):
        if index == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def reading(dataset, num_workers=2):
    return micro_batches(
        dataset, consumed_samples=4, micro_batch_size=1, data_parallel_rank=1,
        data_parallel_size=2, num_workers=num_workers, global_batch_size=8,
    )  # fmt: skip


@pytest.mark.parametrize("dataset", [Numbered(), pytest.param(Work(), marks=pytest.mark.slow)])
def test_samples_go_on_exactly_when_workers_are_killed(dataset, caplog):
    """The loader looks every five seconds whether workers live."""
    handler = signal.getsignal(signal.SIGCHLD)
    expected = [batch["number"].item() for batch in islice(reading(dataset, 0), 20)]
    others = set(multiprocessing.active_children())  # ranks of other tests
    batches, found = reading(dataset), []
    assert signal.getsignal(signal.SIGCHLD) == handler, "nothing is raised between two batches"
    for count in range(20):
        if count == 5:
            for worker in set(multiprocessing.active_children()) - others:
                os.kill(worker.pid, signal.SIGKILL)
        found.append(next(batches)["number"].item())
    assert found == expected
    assert "a data worker of --num-workers ended" in caplog.text
    assert "\n" not in caplog.records[0].message


def test_workers_that_end_again_and_again_end_the_run(caplog, monkeypatch):
    monkeypatch.setattr(loader, "MAX_FAILURES", 1)
    batches = reading(Deadly(), 1)
    with pytest.raises(ChildProcessError, match=r"ended .*give fewer --num-workers"):
        list(islice(batches, 10))
    assert len(caplog.records) == 1
