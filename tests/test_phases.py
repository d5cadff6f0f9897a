"""Phases and categories reach whoever measures, and are stated, not read off the Python stack."""

import ast
import threading
from pathlib import Path

import pytest
import torch

import megatron_untied
from megatron_untied.commands.trace import COLORS
from megatron_untied.phases import AllocationObserver, MemoryCategory, Phase, allocating
from megatron_untied.planner.plan import Plan
from megatron_untied.step_progress import StepProgress
from tests.support.planning import machine, run_config
from tests.support.traces import trace_all

FRAMES = {"f_locals", "f_code", "f_back", "_getframe", "currentframe", "getouterframes", "stack"}
"""Names by which code finds out who called it; ``stack`` is that of ``inspect``."""


def test_no_code_inspects_the_python_stack():
    found = []
    for file in sorted(Path(megatron_untied.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            of_torch = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch"
            name = getattr(node, "attr", None) or getattr(node, "name", None)  # also of an import
            if name in FRAMES and not of_torch:
                found.append(f"{file}:{node.lineno}: {name}")
    assert found == []


class Recorder(AllocationObserver):
    """Under which category every operation ran."""

    def __init__(self):
        super().__init__()
        self.categories = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.categories.append(self.category)
        return func(*args, **(kwargs or {}))


def test_the_innermost_category_is_the_observers():
    with Recorder() as recorder:
        torch.empty(1)
        with allocating(MemoryCategory.KEPT):
            torch.empty(1)
            with allocating("workspace: q"):
                torch.empty(1)
            torch.empty(1)
        with pytest.raises(ValueError, match="inside"), allocating(MemoryCategory.TILES):
            raise ValueError("inside")
        torch.empty(1)
    kept = MemoryCategory.KEPT
    assert recorder.categories == [None, kept, "workspace: q", kept, None]


def test_a_category_without_an_observer_or_in_another_thread_reaches_nobody():
    with allocating(MemoryCategory.KEPT):
        torch.empty(1)

    def allocate():
        with allocating(MemoryCategory.TILES):
            torch.empty(1)

    with Recorder() as recorder:
        other = threading.Thread(target=allocate)
        other.start()
        other.join()
        torch.empty(1)
    assert recorder.categories == [None]


def test_phases_nest_and_an_error_leaves_the_phase_it_came_from():
    progress = StepProgress()
    assert progress.current_phase is Phase.SETUP
    with progress.phase(Phase.FORWARD, micro_batch="micro-batch 1 of 2"):
        with progress.for_layer(2, num_layers=4, num_chunks=1).phase(Phase.MLP_FORWARD):
            inside = str(progress.last_completed())
        assert progress.current_phase is Phase.FORWARD
        assert progress.last_completed().layer is None
    assert inside == "start, micro-batch 1 of 2, MLP forward tiles, layer 3 of 4"
    assert (progress.current_phase, progress.last_completed().micro_batch) == (Phase.SETUP, "")
    with pytest.raises(RuntimeError), progress.phase(Phase.LOSS):
        raise RuntimeError
    assert progress.current_phase is Phase.LOSS


STREAMED = (
    "--context-parallel-size 2 --cp-heads-per-chunk 2 --sequence-tile-size 100 --use-torch-fsdp2 "
    "--recompute-granularity full --recompute-num-layers 3 --recompute-method uniform"
)
CASES = {
    "streamed": STREAMED,
    "plain": "--context-parallel-size 2 --cp-heads-per-chunk 2 --use-torch-fsdp2",
}


@pytest.fixture(scope="module")
def traces():
    return trace_all(CASES, world_size=2)


def test_the_tracer_measures_every_phase_of_a_step_and_the_picture_draws_it(traces):
    elsewhere = {Phase.DATASETS, Phase.DATA, Phase.LOADING, Phase.SAVING}
    measured = traces["streamed"].peak_by_phase
    assert set(measured) == set(Phase) - elsewhere == set(COLORS)
    for peak in measured.values():
        assert sum(peak.by_category.values()) == peak.num_bytes


PLANNED = "--model llama3-8b --num-layers 6 --seq-length 131072 --bf16 --context-parallel-size 8 "
PLANS = {
    "streamed": "--recompute-granularity full --recompute-num-layers 3 --cp-heads-per-chunk 8",
    "plain": "--cp-heads-per-chunk 8",
}


@pytest.mark.parametrize("layers", PLANS)
def test_planner_and_tracer_have_the_same_phases(traces, layers):
    config = run_config(PLANNED + "--use-torch-fsdp2 --loss-chunk-size 2048 " + PLANS[layers])
    planned = set(Plan(config, machine()).phases)
    assert planned == set(traces[layers].peak_by_phase) - {Phase.SETUP}


def test_what_is_large_at_the_peak_has_a_category(traces):
    peak = traces["streamed"].peak_by_phase[Phase.ATTENTION_BACKWARD]
    stated = {name: size for name, size in peak.by_category.items() if not name.startswith("other")}
    assert stated[MemoryCategory.STATES] > 0
    assert stated[MemoryCategory.KERNEL] > 0
    assert stated["workspace: dk"] > 0
    assert sum(stated.values()) > 0.9 * peak.num_bytes
