"""Collectives of a counted step keep nothing alive, however late their work is dropped."""

import weakref

import torch
import torch.distributed as dist

from megatron_untied.step_progress import StepProgress
from megatron_untied.tracing.fake_collectives import borrow, call_with_borrowed_memory
from megatron_untied.tracing.live_bytes import LiveBytes
from tests.support.ranks import run_on_ranks


def test_a_borrowed_tensor_is_the_same_memory_and_does_not_keep_it():
    x = torch.arange(24, dtype=torch.bfloat16).view(4, 6)[1:, ::2]
    y = borrow(x)
    assert (y.dtype, y.shape, y.stride()) == (x.dtype, x.shape, x.stride())
    assert y.data_ptr() == x.data_ptr()
    y.add_(1)
    assert x.tolist() == [[7, 9, 11], [13, 15, 17], [19, 21, 23]]
    owner = weakref.ref(x.untyped_storage())
    del x
    assert owner() is None


def test_nothing_is_borrowed_of_an_empty_tensor():
    assert borrow(torch.empty(0)).numel() == 0


def collectives_whose_work_is_kept(group) -> tuple[list[int], float, int]:
    """Bytes alive after each collective's tensors were dropped, its work held by a late thread."""
    works, alive = [], []
    with LiveBytes(StepProgress(), call_with_borrowed_memory) as live:
        for collective in (_all_reduce, _all_to_all, _pass_on, _all_gather):
            work, total = collective(group)
            works.append(work)
            alive.append(live.num_bytes)
        peak = max(size for _, size in live.timeline)
    return alive, total, peak


def _all_reduce(group):
    x = torch.ones(1000)
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    return work, x.sum().item()


def _all_to_all(group):
    x = torch.full((1000,), float(group.rank()))
    y = torch.empty(1000)
    work = dist.all_to_all_single(y, x, group=group, async_op=True)
    work.wait()
    return work, y.sum().item()


def _pass_on(group):
    x, y = torch.full((1000,), float(group.rank())), torch.empty(1000)
    there, here = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    operations = [
        dist.P2POp(dist.isend, x, group=group, group_peer=there),
        dist.P2POp(dist.irecv, y, group=group, group_peer=here),
    ]
    works = dist.batch_isend_irecv(operations)
    for work in works:
        work.wait()
    return works, y.sum().item()


def _all_gather(group):
    x, y = torch.full((500,), 1.0 + group.rank()), torch.empty(1000)
    work = dist.all_gather_into_tensor(y, x, group=group, async_op=True)
    work.wait()
    return work, y.sum().item()


def test_a_work_that_is_still_held_keeps_no_memory():
    for alive, gathered, peak in run_on_ranks(collectives_whose_work_is_kept, 2):
        assert alive == [0, 0, 0, 0]
        assert gathered == 500 * 1.0 + 500 * 2.0
        assert 2 * 4000 <= peak < 3 * 4000
