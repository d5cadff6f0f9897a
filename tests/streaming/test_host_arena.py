"""Slots: sizes and reuse by identity and bytes, contents bit for bit, order under late copies."""

import mmap
import warnings
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_untied.streaming.copy_engine import CopyEngine, CpuStreams
from megatron_untied.streaming.host_arena import (
    PAGE_BYTES,
    HostArena,
    RegisteredMemory,
    allocate_pageable,
    prefetch,
)
from tests.streaming.test_registered_memory import Cudart
from tests.support.simulated_streams import LateStreams

CPU = torch.device("cpu")


def cpu_arena() -> HostArena:
    return HostArena.for_device(CPU)


def late_arena() -> HostArena:
    """Copies run only when compute waits for them: too early a use or an overwrite is seen."""
    return HostArena(CopyEngine(LateStreams()), allocate_pageable)


ARENAS = pytest.mark.parametrize("make_arena", [cpu_arena, late_arena])


# A training step as the streamed layers run it.


def forward_and_backward(arena: HostArena, num_layers: int, step: int) -> None:
    """The residual is updated in place; each layer's input goes to the host, returns by tile."""
    generator = torch.Generator().manual_seed(step)
    residual = torch.randn(7, 2, 5, generator=generator)  # [n, b, m]
    inputs, slots = [], []
    for _ in range(num_layers):
        inputs.append(residual.clone())
        slots.append(arena.reserve(residual.shape, residual.dtype))
        copied = slots[-1].write(residual)
        update = torch.randn(residual.shape, generator=generator)
        copied.wait()
        residual += update

    room = torch.empty(2, 3 * 2 * 5)
    parking = arena.reserve(residual.shape, residual.dtype)
    for layer in reversed(range(num_layers)):
        expected_gradient = residual.clone()
        parking.write(residual).wait()
        residual.fill_(float("nan"))  # attention uses the memory
        parking.read(residual).wait()
        assert torch.equal(residual, expected_gradient)
        tiles = [slice(0, 3), slice(3, 6), slice(6, 7)]
        reads = ((slots[layer], tile) for tile in tiles)
        seen = torch.cat([tile.clone() for tile in prefetch(reads, room)])
        assert torch.equal(seen, inputs[layer])
        slots[layer].release()
    parking.release()


@ARENAS
def test_training_step_reads_back_what_it_stored(make_arena):
    forward_and_backward(make_arena(), num_layers=4, step=0)


@ARENAS
def test_thirty_steps_allocate_what_the_first_one_did(make_arena):
    arena = make_arena()
    for step in range(30):
        forward_and_backward(arena, num_layers=4, step=step)
        assert arena.num_allocations == 5
        assert arena.used_bytes == 0
    assert arena.reserved_bytes == arena.peak_used_bytes == 5 * PAGE_BYTES


def test_steps_reuse_the_same_memory():
    arena = cpu_arena()

    def addresses() -> set[int]:
        slots = [arena.reserve((5, 3), torch.bfloat16) for _ in range(4)]
        found = {slot._host.data_ptr() for slot in slots}
        for slot in slots:
            slot.release()
        return found

    first = addresses()
    assert len(first) == 4
    assert all(addresses() == first for _ in range(30))


def test_forgotten_wait_before_overwriting_is_wrong_data():
    """Late copies are what makes the tests above able to fail."""
    arena = late_arena()
    slot, residual, out = arena.reserve((4,), torch.float32), torch.ones(4), torch.empty(4)
    slot.write(residual)
    residual += 1
    slot.read(out).wait()
    assert not torch.equal(out, torch.ones(4))


def test_forgotten_wait_before_use_is_wrong_data():
    arena = late_arena()
    slot, out = arena.reserve((4,), torch.float32), torch.zeros(4)
    slot.write(torch.ones(4)).wait()
    slot.read(out)
    assert not torch.equal(out, torch.ones(4))


# Bytes.


def test_memory_is_exact_to_the_page():
    arena = cpu_arena()
    slots = [arena.reserve((3, 4096, 5), torch.bfloat16)]  # 122,880 bytes: 30 pages, not 2^17 bytes
    assert arena.reserved_bytes == 30 * PAGE_BYTES
    slots.append(arena.reserve((1,), torch.float32))
    slots.append(arena.reserve((0, 8), torch.float32))
    assert arena.reserved_bytes == 32 * PAGE_BYTES
    assert [slot._host.data_ptr() % PAGE_BYTES for slot in slots[:2]] == [0, 0]


def test_released_memory_is_reused_by_size_whatever_the_dtype():
    arena = cpu_arena()
    first = arena.reserve((2048, 3), torch.bfloat16)
    address = first._host.data_ptr()
    first.release()
    second = arena.reserve((3, 1024), torch.float32)
    assert second._host.data_ptr() == address
    third = arena.reserve((3, 1025), torch.float32)
    assert third._host.data_ptr() != address
    assert arena.num_allocations == 2


def test_longest_released_memory_is_reused_first():
    arena = cpu_arena()
    slots = [arena.reserve((4,), torch.float32) for _ in range(3)]
    addresses = [slot._host.data_ptr() for slot in slots]
    for i in (1, 0, 2):
        slots[i].release()
    again = [arena.reserve((4,), torch.float32) for _ in range(3)]
    assert [slot._host.data_ptr() for slot in again] == [addresses[i] for i in (1, 0, 2)]


def test_peak_is_of_slots_held_at_once():
    arena = cpu_arena()
    first, second = (arena.reserve((1024,), torch.float32) for _ in range(2))
    first.release()
    first = arena.reserve((1024,), torch.float32)
    second.release()
    assert (arena.used_bytes, arena.peak_used_bytes) == (PAGE_BYTES, 2 * PAGE_BYTES)


def test_trim_gives_back_what_is_released_once_its_copies_are_done():
    arena = late_arena()
    kept, released = (arena.reserve((4,), torch.float32) for _ in range(2))
    source, out = torch.ones(4), torch.zeros(4)
    kept.write(source)
    released.write(source)
    arriving = released.read(out)
    released.release()
    arena.trim()
    assert torch.equal(out, torch.ones(4))
    assert arena.reserved_bytes == arena.used_bytes == PAGE_BYTES
    arriving.wait()
    arena.reserve((4,), torch.float32)
    assert arena.num_allocations == 3


def test_trim_unmaps_what_is_released():
    mappings = []

    def allocate(num_bytes: int) -> torch.Tensor:
        mapping = mmap.mmap(-1, num_bytes)
        mappings.append(weakref.ref(mapping))
        return torch.frombuffer(mapping, dtype=torch.uint8)

    arena = HostArena(CopyEngine(CpuStreams()), allocate)
    kept, released = (arena.reserve((4,), torch.float32) for _ in range(2))
    for slot in (kept, released):
        slot.write(torch.ones(4)).wait()
    released.release()
    arena.trim()
    assert [mapping() is None for mapping in mappings] == [False, True]


def test_more_than_two_to_the_31_elements():
    """Beyond 32-bit indices; only the pages touched become resident."""
    arena = cpu_arena()
    slot = arena.reserve((5, 2**29), torch.int8)
    rows = (slice(4, 5), slice(2**29 - 3, 2**29))
    value, out = torch.tensor([[1, 2, 3]], dtype=torch.int8), torch.zeros(1, 3, dtype=torch.int8)
    slot.write(value, rows)
    slot.read(out, rows).wait()
    assert torch.equal(out, value)
    assert arena.reserved_bytes == 5 * 2**29


# Tiles.


@ARENAS
def test_tiles_of_a_tensor_stored_by_chunks_of_heads(make_arena):
    attention_output = torch.randn(4, 2, 7, 1, 3)  # [chunk, p, n, b, d]
    slot = make_arena().reserve(attention_output.shape, torch.float32)
    for chunk in range(4):
        slot.write(attention_output[chunk], chunk).wait()
    out = torch.empty(4, 2, 3, 1, 3)
    tile = (slice(None), slice(None), slice(2, 5))
    slot.read(out, tile).wait()
    assert torch.equal(out, attention_output[:, :, 2:5])


@ARENAS
def test_prefetch_is_one_ahead_in_room_for_two(make_arena):
    arena = make_arena()
    slots = [arena.reserve((2, 3), torch.float32) for _ in range(5)]
    for i, slot in enumerate(slots):
        slot.write(torch.full((2, 3), float(i))).wait()
    started = []
    reads = (started.append(i) or (slot, ()) for i, slot in enumerate(slots))
    room = torch.empty(2, 6)
    for i, layer_input in enumerate(prefetch(reads, room)):
        assert started == list(range(min(i + 2, 5)))
        assert layer_input.data_ptr() == room[i % 2].data_ptr()
        assert torch.equal(layer_input, torch.full((2, 3), float(i)))
    assert i == 4


def test_prefetch_of_nothing():
    assert list(prefetch([], torch.empty(2, 6))) == []


def test_slot_memory_released_while_its_fetch_is_on_the_way():
    arena = late_arena()
    first = arena.reserve((4,), torch.float32)
    first.write(torch.ones(4)).wait()
    out = torch.empty(4)
    arriving = first.read(out)
    first.release()
    second = arena.reserve((4,), torch.float32)
    second.write(torch.zeros(4)).wait()  # the same memory: the fetch must come first
    arriving.wait()
    assert torch.equal(out, torch.ones(4))


def test_slot_dropped_with_its_graph_is_released():
    arena = cpu_arena()
    for _ in range(3):
        slot = arena.reserve((4,), torch.float32)
        slot.write(torch.ones(4)).wait()
        del slot
    assert (arena.used_bytes, arena.num_allocations) == (0, 1)


def test_refuses_a_slot_that_was_released():
    slot = cpu_arena().reserve((4,), torch.float32)
    slot.release()
    with pytest.raises(AssertionError, match="was released"):
        slot.write(torch.ones(4))
    with pytest.raises(AssertionError, match="was released"):
        slot.release()
    with pytest.raises(AssertionError, match="was released"):
        next(prefetch([(slot, ())], torch.empty(2, 4)))


def test_refuses_to_read_what_was_never_written():
    arena = cpu_arena()
    slot = arena.reserve((4,), torch.float32)
    slot.write(torch.ones(4)).wait()
    slot.release()
    slot = arena.reserve((4,), torch.float32)  # the memory was written, this slot was not
    with pytest.raises(AssertionError, match="before anything was written"):
        slot.read(torch.empty(4))


# Registration with CUDA, by a stand-in for torch.cuda.cudart().


def registering_arena(cudart: Cudart) -> HostArena:
    return HostArena(CopyEngine(LateStreams()), RegisteredMemory(cudart, CPU))


def test_every_segment_is_registered_once():
    cudart = Cudart()
    arena = registering_arena(cudart)
    for step in range(3):
        forward_and_backward(arena, num_layers=4, step=step)
    assert cudart.num_calls == 5
    assert sum(cudart.registered.values()) == arena.reserved_bytes


def test_trim_unregisters_what_is_released():
    cudart = Cudart()
    arena = registering_arena(cudart)
    kept, released = (arena.reserve((4,), torch.float32) for _ in range(2))
    released.release()
    arena.trim()
    assert list(cudart.registered) == [kept._host.data_ptr()]


def test_training_goes_on_when_registration_is_refused():
    arena = registering_arena(Cudart(error=2))
    with pytest.warns(UserWarning, match="pinned") as caught:
        forward_and_backward(arena, num_layers=4, step=0)
    assert len(caught) == 1


# Tracing.


def test_traced_slots_take_no_device_memory():
    arena = HostArena.for_tracing()
    with FakeTensorMode():
        residual = torch.empty(655360, 1, 4096, dtype=torch.bfloat16)
        slot = arena.reserve(residual.shape, residual.dtype)
        slot.write(residual).wait()
        room = torch.empty(2, 8192 * 4096, dtype=torch.bfloat16)
        reads = ((slot, slice(start, start + 8192)) for start in range(0, 655360, 8192))
        devices = {tile.device for tile in prefetch(reads, room)}
        assert devices == {residual.device}
        assert slot._host.device.type == "meta"
    assert arena.reserved_bytes == arena.peak_used_bytes == 5 * 2**30


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_are_ordered_with_compute_and_do_not_hold_up_the_host(device):
    """On a GPU each stream is delayed in turn, so that a missing edge reads old data."""
    on_gpu = device == "cuda"
    device = torch.device(device, torch.cuda.current_device()) if on_gpu else CPU
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # registration must succeed
        arena = HostArena.for_device(device)
        slot = arena.reserve((1 << 24 if on_gpu else 1 << 10,), torch.float32)
    assert slot._host.is_pinned() == on_gpu
    streams = arena.engine.streams
    tensor, out = (torch.zeros(slot.shape, device=device) for _ in range(2))
    for step in range(1, 7):
        late = (streams.compute, streams.copy_out, streams.copy_in)[step % 3]
        if on_gpu:
            streams.launch(late, lambda: torch.cuda._sleep(100_000_000))
        tensor.fill_(step)
        copied, fetched = slot.write(tensor), slot.read(out)
        assert not (on_gpu and fetched.done.query())
        copied.wait()
        tensor.fill_(-1)
        fetched.wait()
        assert torch.equal(out, torch.full_like(out, step))
        out.fill_(-2)
    slot.release()
    arena.trim()
