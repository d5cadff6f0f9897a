"""No order of copies that the edges allow may change what a program computes.

Random programs that keep the engine's contract run on simulated streams in adversarial orders and
must see what they see when every copy runs at once. With any one kind of edge left out, they do
not. Data only moves, so equality is exact.
"""

import gc
import random
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_untied.streaming import copy_engine
from megatron_untied.streaming.copy_engine import CopyEngine, CpuStreams, Waits, contiguous_pieces
from megatron_untied.streaming.host_arena import HostArena, allocate_pageable
from tests.support.simulated_streams import (
    EDGES,
    ORDERS,
    LateStreams,
    SimulatedStreams,
    in_random_order,
)

SHAPE = (3, 2)


class RandomProgram:
    """Compute, stores and fetches over three device tensors and three slots.

    It waits where :class:`Copy` says one must, and nowhere else. ``expected`` follows from plain
    copies made as the program is queued, ``seen`` is what its compute reads when it runs.
    """

    def __init__(self, streams, seed: int, num_operations: int = 40):
        self.streams = streams
        self.arena = HostArena(CopyEngine(streams), allocate_pageable)
        self.random = random.Random(seed)
        self.seen, self.expected = [], []
        self.device = [torch.zeros(SHAPE) for _ in range(3)]
        self.device_values = [torch.zeros(SHAPE) for _ in range(3)]
        self.copies_out = [[] for _ in range(3)]  # not waited for, by device tensor
        self.copies_in = [[] for _ in range(3)]
        self.slots = [self.arena.reserve(SHAPE, torch.float32) for _ in range(3)]
        self.slot_values = [None] * 3
        operations = self.overwrite, self.look, self.store, self.fetch, self.reserve_again
        for i in range(num_operations):
            device, slot = self.random.randrange(3), self.random.randrange(3)
            self.random.choice(operations)(device, slot, i)
        for device in range(3):
            self.look(device, 0, 0)

    def wait(self, copies: list) -> None:
        while copies:
            copies.pop().wait()

    def rows(self) -> slice:
        start = self.random.randrange(SHAPE[0])
        return slice(start, self.random.randrange(start, SHAPE[0]) + 1)

    def overwrite(self, device: int, slot: int, value: int) -> None:
        self.wait(self.copies_out[device])
        self.wait(self.copies_in[device])
        tensor = self.device[device]
        self.streams.launch(self.streams.compute, lambda: tensor.fill_(value))
        self.device_values[device].fill_(value)

    def look(self, device: int, slot: int, value: int) -> None:
        self.wait(self.copies_in[device])
        tensor = self.device[device]
        self.streams.launch(self.streams.compute, lambda: self.seen.append(tensor.clone()))
        self.expected.append(self.device_values[device].clone())

    def store(self, device: int, slot: int, value: int) -> None:
        self.wait(self.copies_in[device])
        rows = slice(None) if self.slot_values[slot] is None else self.rows()
        copy = self.slots[slot].write(self.device[device][rows], rows)
        self.copies_out[device].append(copy)
        if self.slot_values[slot] is None:
            self.slot_values[slot] = torch.empty(SHAPE)
        self.slot_values[slot][rows] = self.device_values[device][rows]

    def fetch(self, device: int, slot: int, value: int) -> None:
        if self.slot_values[slot] is None:
            return
        self.wait(self.copies_out[device])
        rows = self.rows()
        copy = self.slots[slot].read(self.device[device][rows], rows)
        self.copies_in[device].append(copy)
        self.device_values[device][rows] = self.slot_values[slot][rows]

    def reserve_again(self, device: int, slot: int, value: int) -> None:
        self.slots[slot].release()
        self.slots[slot] = self.arena.reserve(SHAPE, torch.float32)
        self.slot_values[slot] = None

    def saw_the_expected(self) -> bool:
        return len(self.seen) == len(self.expected) and all(
            map(torch.equal, self.seen, self.expected)
        )


def is_right(program_seed: int, order, dropped=None) -> bool:
    streams = SimulatedStreams(dropped)
    program = RandomProgram(streams, program_seed)
    streams.drain(order)
    return program.saw_the_expected()


def test_copies_at_once_give_the_expected():
    assert all(RandomProgram(CpuStreams(), seed).saw_the_expected() for seed in range(20))


@settings(max_examples=150, deadline=None)
@given(program_seed=st.integers(0, 2**32), order_seed=st.integers(0, 2**32))
def test_no_random_order_changes_the_result(program_seed, order_seed):
    assert is_right(program_seed, in_random_order(order_seed))


@pytest.mark.parametrize("order", ORDERS)
def test_no_extreme_order_changes_the_result(order):
    assert all(is_right(seed, order) for seed in range(20))


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: f"{edge[0]}_without_{edge[1]}")
def test_every_kind_of_edge_is_needed(edge):
    wrong = [(s, o) for s in range(20) for o in ORDERS if not is_right(s, o, dropped=edge)]
    assert wrong


def test_device_tensor_is_held_until_the_wait():
    engine = CopyEngine(CpuStreams())
    tensor = torch.ones(4)
    alive = weakref.ref(tensor)
    copy = engine.copy_out(tensor, torch.empty(4), after=None)
    del tensor
    gc.collect()
    assert alive() is not None
    copy.wait()
    assert alive() is None


def test_wait_all_lets_go_of_every_tensor():
    streams = SimulatedStreams()
    engine = CopyEngine(streams)
    tensor, host = torch.ones(4), torch.zeros(4)
    engine.copy_out(tensor, host, after=None)
    engine.copy_out(tensor, host, after=None)
    engine.wait_all()
    streams.launch(streams.compute, lambda: tensor.zero_())
    streams.drain(ORDERS[0])  # compute first
    assert torch.equal(host, torch.ones(4))
    assert not engine.device_tensors


def test_synchronize_runs_what_is_queued():
    streams = SimulatedStreams()
    engine = CopyEngine(streams)
    host = torch.zeros(4)
    engine.copy_out(torch.ones(4), host, after=None)
    engine.synchronize()
    assert torch.equal(host, torch.ones(4))


def test_strided_tensors_are_copied_in_contiguous_pieces():
    host = torch.arange(2 * 3 * 5 * 4.0).view(2, 3, 5, 4)  # a tile is a slice of dimension 2
    tile = torch.empty(2, 3, 2, 4)
    pieces = list(contiguous_pieces(host[:, :, 1:3], tile))
    assert [a.numel() for a, b in pieces] == [8] * 6
    assert all(a.is_contiguous() and b.is_contiguous() for a, b in pieces)
    CopyEngine(CpuStreams()).copy_in(host[:, :, 1:3], tile, after=None).wait()
    assert torch.equal(tile, host[:, :, 1:3])


def test_whole_tensors_are_one_piece():
    assert len(list(contiguous_pieces(torch.empty(3, 4), torch.empty(3, 4)))) == 1


def test_copies_do_not_enter_the_graph():
    tensor, host = torch.ones(4, requires_grad=True) * 2, torch.empty(4)
    CopyEngine(CpuStreams()).copy_out(tensor, host, after=None).wait()
    assert not host.requires_grad


def test_rejects_another_shape_or_dtype():
    engine = CopyEngine(CpuStreams())
    with pytest.raises(AssertionError, match=r"float32 \[4\] to torch.float32 \[2, 2\]"):
        engine.copy_out(torch.ones(4), torch.empty(2, 2), after=None)
    with pytest.raises(AssertionError, match="float32 .* to torch.bfloat16"):
        engine.copy_out(torch.ones(4), torch.empty(4, dtype=torch.bfloat16), after=None)


def test_rejects_a_strided_last_dimension():
    with pytest.raises(AssertionError, match="last dimension"):
        CopyEngine(CpuStreams()).copy_out(torch.ones(3, 4).t(), torch.empty(4, 3), after=None)


def test_a_wait_counts_in_the_phase_that_waits_and_once():
    streams, phases = LateStreams(), iter(["forward", "backward", "forward"])
    engine = CopyEngine(streams)
    engine.waits.phase = lambda: next(phases)
    a, b, c = (engine.copy_out(torch.ones(4), torch.empty(4), after=None) for _ in range(3))
    a.wait()
    c.wait()  # and for b, which is before it in its stream
    b.wait()
    a.wait()
    assert engine.waits.take() == {("host", "forward"): 1.0, ("host", "backward"): 2.0}
    assert next(phases) == "forward"  # what is done is not counted
    assert engine.waits.take() == {}


def test_waits_that_compute_has_not_come_to_are_counted_later():
    streams = SimulatedStreams()
    engine = CopyEngine(streams)
    engine.copy_out(torch.ones(4), torch.empty(4), after=None).wait()
    assert engine.waits.take() == {}
    streams.drain(ORDERS[0])
    assert engine.waits.take().keys() == {("host", "")}


def test_on_a_cpu_copies_take_the_time_of_compute(monkeypatch):
    engine = CopyEngine(CpuStreams())
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(copy_engine.time, "perf_counter", lambda: next(clock))
    engine.copy_in(torch.ones(4), torch.empty(4), after=None).wait()
    assert engine.waits.take() == {("host", ""): 2.5}


def test_waits_that_nobody_takes_are_added_up():
    waits = Waits(CpuStreams())
    for _ in range(2 * Waits.MOST_PENDING + 1):
        with waits.counted("disk"):
            pass
    assert len(waits._pending) == 1
