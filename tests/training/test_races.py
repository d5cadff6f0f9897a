"""A step on a device that ends nothing before it is waited for: the gradients of plain autograd.

A generated design has every pair of values of what moves data: exchanges, rings, tensor
parallelism, sharding and host memory. Four planted races show that each kind is seen.
"""

import contextlib
import math
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from unittest import mock

import pytest
import torch

import pretrain_gpt
from megatron_untied.context_parallel import ulysses
from megatron_untied.context_parallel.exchange import Done, HeadExchange
from megatron_untied.context_parallel.sequence import SequenceLayout
from megatron_untied.step_progress import StepProgress
from megatron_untied.streaming.copy_engine import Copy
from megatron_untied.streaming.host_arena import HostSlot
from megatron_untied.training.initialize import initialize
from megatron_untied.training.state import build_train_state
from megatron_untied.training.step import train_step
from tests.support.command_line import tiny_config
from tests.support.late_device import late_device
from tests.support.pairs import all_pairs, memory_flags, mostly_slow
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import batch_of, launch_of
from tests.support.whole_model import gather_gradients

LAYERS = 4
TOLERANCE = 5e-6  # fp32, sums in another order
CONTEXT = {  # (Ulysses ranks, ring ranks) -> flags
    (1, 1): {},
    (2, 1): {"context_parallel_size": 2},
    (4, 1): {"context_parallel_size": 4},
    (1, 2): {"context_parallel_size": 2, "cp_comm_type": "p2p"},
    (1, 4): {"context_parallel_size": 4, "cp_comm_type": "p2p"},
    (2, 2): {
        "context_parallel_size": 4,
        "cp_comm_type": "a2a+p2p",
        "hierarchical_context_parallel_sizes": "2 2",
    },
}
FACTORS = {
    "context": list(CONTEXT),
    "recompute": [None, ("full", 1), ("full", 2), ("selective", 1), ("selective", 3)],
    "host_layers": [0, 2, LAYERS],
    "disk": [False, True],
    "park": [False, True],
    "overlap": [True, False],
    "tile": [None, 7],
    "sharding": [None, "use_distributed_optimizer", "use_torch_fsdp2"],
    "tensor": [1, 2],
    "heads": ["all", "fewest"],
}


def is_valid(case: dict) -> bool:
    """At most four ranks; without recomputation nothing is saved by us, parked or tiled."""
    plain = case["host_layers"] == 0 and not case["park"] and case["tile"] is None
    if case["disk"] and case["host_layers"] < LAYERS:  # of fewer, none are on the disk
        return False
    ranks = math.prod(case["context"]) * case["tensor"]
    return ranks <= 4 and (case["recompute"] is not None or plain)


def flags_of(case: dict) -> dict:
    return CONTEXT[case["context"]] | {
        "cp_heads_per_chunk": "all" if case["heads"] == "all" else case["context"][0],
        "no_cp_overlap": not case["overlap"] or None,
        "loss_chunk_size": 13,
        **memory_flags(case),
    }


def num_ranks(case: dict) -> int:
    ranks = math.prod(case["context"]) * case["tensor"]
    return max(ranks, 2) if case["sharding"] else ranks


def one_step(group, flags: dict) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and whole gradients; the second micro-batch reuses every buffer of the first."""
    # Without updates: Adam's first one turns the rounding of tiny gradients into whole steps.
    config = tiny_config(group.size(), num_layers=LAYERS, clip_grad=0, lr=0, **flags)
    groups = initialize(config, launch_of(group))
    train_state = build_train_state(pretrain_gpt.model_provider, config, groups, StepProgress())
    layout = SequenceLayout.of(config.parallel, rank=groups.cp.rank())
    result = train_step(
        train_state,
        [batch_of(groups, seed=number, layout=layout) for number in range(2)],
        num_samples=8,
        forward_step=pretrain_gpt.forward_step,
    )
    return result.lm_loss, gather_gradients(train_state)


def late_step(group, flags: dict):
    with late_device() as device:
        results = one_step(group, flags)
    assert device.num_launches > 0
    return results


def worst_error(ours: dict, theirs: dict) -> float:
    assert ours.keys() == theirs.keys()
    errors = [(ours[n] - theirs[n]).abs().max() / theirs[n].abs().max() for n in theirs]
    return torch.stack(errors).max().item()  # NaN if any is


@pytest.fixture(scope="module")
def plain():
    """One rank, megatron-core's layers under autograd, an ordinary CPU."""
    return run_on_ranks(one_step, 1, {})[0]


def name(case: dict) -> str:
    return "-".join(str(value) for value in case.values()).replace(" ", "")


@pytest.mark.parametrize("case", mostly_slow(all_pairs(FACTORS, is_valid)), ids=name)
def test_nothing_is_used_before_it_is_there(case, plain):
    loss, gradients = run_on_ranks(late_step, num_ranks(case), flags_of(case))[0]
    assert loss == pytest.approx(plain[0], rel=1e-6)
    assert worst_error(gradients, plain[1]) < TOLERANCE


def exchange_not_waited_for() -> AbstractContextManager:
    to_heads = HeadExchange.to_heads

    def skipped(*args):
        to_heads(*args)
        return Done()

    return mock.patch.object(HeadExchange, "to_heads", skipped)


def send_buffer_rewritten() -> AbstractContextManager:
    """Without overlap q, k and v are sent from one buffer, one after the other."""
    wait = ulysses._LoadedChunk.wait
    return mock.patch.object(
        ulysses._LoadedChunk,
        "wait",
        lambda chunk: chunk if chunk.q is None else wait(chunk),  # once all of it was launched
    )


def host_slot_reused() -> AbstractContextManager:
    write = HostSlot.write

    def written_and_free(self, *args):
        copy = write(self, *args)
        self._arena._released[self._segment.memory.nbytes].append(self._segment)
        return copy

    return mock.patch.object(HostSlot, "write", written_and_free)


@contextlib.contextmanager
def fetches_not_waited_for() -> Iterator[None]:
    wait, read = Copy.wait, HostSlot.read
    fetches = set()

    def remembered(*args):
        fetches.add(copy := read(*args))
        return copy

    with (
        mock.patch.object(HostSlot, "read", remembered),
        mock.patch.object(Copy, "wait", lambda self: self in fetches or wait(self)),
    ):
        yield


RACES = {  # to what the device says of it; "" where only the numbers are wrong
    exchange_not_waited_for: "all_to_all_single is never waited for",
    send_buffer_rewritten: "all_to_all_single: a buffer .* in flight is written to before wait",
    fetches_not_waited_for: "a copy is never waited for",
    host_slot_reused: "",
}
STREAMED = {
    "context_parallel_size": 2,
    "cp_heads_per_chunk": 2,
    "no_cp_overlap": True,
    "recompute_granularity": "selective",
    "cpu_offloading_num_layers": LAYERS,
    "sequence_tile_size": 7,
}


def step_with(group, race) -> tuple[dict[str, torch.Tensor], str]:
    """Gradients of a step with a race in it, and what the device says of it."""
    try:
        with late_device(), race():
            _, gradients = one_step(group, STREAMED)
    except AssertionError as fault:
        return gradients, str(fault)
    return gradients, ""


@pytest.mark.parametrize("race", RACES)
def test_a_planted_race_is_seen(race, plain):
    for gradients, fault in run_on_ranks(step_with, 2, race):
        assert re.search(RACES[race], fault)
        # What was sent is captured at the launch, so a buffer rewritten later is only reported.
        is_right = worst_error(gradients, plain[1]) < TOLERANCE  # not if NaN
        assert is_right == (race is send_buffer_rewritten)
