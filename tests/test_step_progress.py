"""Progress follows the device, and adds up to a whole step under every recompute setting."""

import pytest

from megatron_untied.config import MemoryConfig, ParallelConfig
from megatron_untied.flops import attention_units
from megatron_untied.phases import Phase
from megatron_untied.step_progress import COST, StepProgress
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import batch, make_model, parallel_groups, tiny


class Device:
    """Completes the events recorded on it up to the number in ``done``."""

    def __init__(self):
        self.recorded = self.done = 0

    def record(self) -> "Event":
        self.recorded += 1
        return Event(self, self.recorded)


class Event:
    def __init__(self, device: Device, number: int):
        self.device, self.number = device, number

    def query(self) -> bool:
        return self.number <= self.device.done


def test_progress_is_the_devices_not_the_hosts():
    device = Device()
    progress = StepProgress(device.record)
    progress.begin("iteration 1", total_units=7.0)
    layer = progress.for_layer(2, num_layers=4, num_chunks=2)
    with layer.phase(Phase.ATTENTION_FORWARD):
        for chunk in range(2):
            with layer.chunk(chunk):
                pass
        assert progress.current_phase is Phase.ATTENTION_FORWARD
    assert progress.current_phase is Phase.DATA
    assert str(progress.last_completed()) == "start, setup"
    device.done = 2
    assert str(progress.last_completed()) == "iteration 1, attention forward, layer 3 of 4"
    device.done = 3
    assert (
        str(progress.last_completed())
        == "iteration 1, attention forward, layer 3 of 4, chunk 1 of 2"
    )
    assert progress.last_completed().units == 0
    device.done = device.recorded - 1
    assert (
        str(progress.last_completed())
        == "iteration 1, attention forward, layer 3 of 4, chunk 2 of 2"
    )
    device.done = device.recorded
    assert str(progress.last_completed()) == "iteration 1, data loading"
    assert progress.last_completed().fraction == 1 / 7


def test_marks_without_a_reader_do_not_accumulate():
    device = Device()
    progress = StepProgress(device.record)
    for _ in range(20_000):
        progress.kernel_call_completed()
        device.done = device.recorded
    assert len(progress._pending) < 10_000


def test_a_rank_that_has_attended_is_ahead_of_one_that_attends_to_the_same_chunk():
    progress, orders = StepProgress(lambda: None), []
    progress.begin("iteration 1", 1.0)
    with progress.for_layer(0, 1, 1).chunk(0):
        orders.append(progress.last_completed().order)
        progress.kernel_call_completed()
        orders.append(progress.last_completed().order)
    orders.append(progress.last_completed().order)
    assert orders == sorted(set(orders))


LAYERS, HEADS_PER_CHUNK = 3, 4


def positions_of_a_step(group, parallel: dict, memory: MemoryConfig) -> tuple[list, list, float]:
    """What a forward and a backward mark: kinds with layers and chunks, orders; the fraction."""
    parallel = ParallelConfig(heads_per_chunk=HEADS_PER_CHUNK, **parallel)
    config, groups = tiny(num_layers=LAYERS), parallel_groups(parallel)
    progress, marked = StepProgress(), []
    model = make_model(config, parallel, memory, groups=groups, progress=progress)
    mark = progress._mark
    progress._mark = lambda position: (marked.append(position), mark(position))
    progress.begin("iteration 1", LAYERS * attention_units(memory, LAYERS))
    layout = model.decoder.layers[0].self_attention.context.layout
    shard = {name: layout.shard(x) for name, x in batch(config, 32, 1).items()}
    with progress.phase(Phase.FORWARD):
        loss = model(**shard)
    with progress.phase(Phase.BACKWARD):
        loss.backward()
    kinds = [(at.phase, at.layer, at.chunk) for at in marked if at.chunk is not None]
    return kinds, [at.order for at in marked], progress.last_completed().fraction


MEMORIES = {
    "plain": MemoryConfig(),
    "full": MemoryConfig(recompute_granularity="full"),
    "full in groups": MemoryConfig(recompute_granularity="full", recompute_num_layers=2),
    "selective": MemoryConfig(recompute_granularity="selective"),
    "selective in a part": MemoryConfig(
        recompute_granularity="selective", attention_output_layers=1, recompute_num_layers=2
    ),
}
SPLITS = {
    "1 rank": (1, {}),
    "Ulysses": (2, {"context_parallel_size": 2}),
    "ring": (2, {"context_parallel_size": 2, "cp_comm_type": "p2p"}),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_step_adds_up_to_all_of_its_attention(memory, split):
    ranks, parallel = SPLITS[split]
    all_ranks = run_on_ranks(positions_of_a_step, ranks, parallel, MEMORIES[memory])
    positions, orders, fraction = all_ranks[0]
    assert fraction == pytest.approx(1.0)
    assert orders == sorted(orders)
    assert all(others == orders for _, others, _ in all_ranks)  # so positions of ranks compare
    seen = list(dict.fromkeys(positions))
    chunks = [(layer, chunk) for layer in range(LAYERS) for chunk in range(2)]
    forward = [(Phase.ATTENTION_FORWARD, *chunk) for chunk in chunks]
    assert seen[: len(forward)] == forward
    # Layers whose attention runs again: in the last case all but the one that keeps its output.
    again = {"full": LAYERS, "full in groups": LAYERS, "selective in a part": LAYERS - 1}
    recomputed = again.get(memory, 0) * 2  # chunks
    assert {kind for kind, _, _ in seen} == {
        Phase.ATTENTION_FORWARD,
        Phase.ATTENTION_BACKWARD,
        *([Phase.RECOMPUTE_ATTENTION] if recomputed else []),
    }
    assert len(seen) == len(forward) * 2 + recomputed
    assert seen[-1] == (Phase.ATTENTION_BACKWARD, 0, 1)


def test_backward_is_five_products_to_two():
    assert COST[Phase.ATTENTION_BACKWARD] / COST[Phase.ATTENTION_FORWARD] == 5 / 2


def test_what_is_no_attention_advances_by_its_own_units():
    progress = StepProgress()
    progress.begin("iter_0000003", total_units=200, phase=Phase.LOADING)
    for _ in range(3):
        progress.advance(50)
    assert progress.last_completed().fraction == 0.75
    assert str(progress.last_completed()) == "iter_0000003, loading"
