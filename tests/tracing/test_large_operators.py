"""No operator beyond 2^31 elements whose CUDA kernel was not looked at: a closed list.

Llama 3 8B at 5 Mi tokens, two layers of it, on eight ranks and on one. ``large_operators.json`` has
every call, and for each operator that spans more than 2^31 elements why its kernel is right.
"""

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.tracing.large_operators import large_calls

LIST = Path(__file__).with_name("large_operators.json")
STEP = (
    "--model llama3-8b --num-layers 2 --seq-length 5242880 --micro-batch-size 1 --lr 1e-5 --bf16 "
    "--mock-data --tokenizer-type NullTokenizer --train-iters 1 --use-torch-fsdp2 --no-cp-overlap "
    "--recompute-granularity selective --cpu-offloading-num-layers all --cp-heads-per-chunk 8 "
)
# Large tiles are traced faster; nothing of a tile of these sizes is beyond 2^31 elements.
CASES = {
    "8 ranks": (8, "--context-parallel-size 8 --sequence-tile-size 32768 --loss-chunk-size 8192"),
    "8 ranks, parked": (
        8,
        "--context-parallel-size 8 --sequence-tile-size 32768 --loss-chunk-size 8192 "
        "--recompute-granularity full --park-during-attention",
    ),
    "1 rank": (1, "--sequence-tile-size 65536 --loss-chunk-size 16384"),
}


def trace_cases() -> dict[str, Any]:
    """``large``: operator, file of the caller, case -> shape; ``far``: operator -> files."""
    context = multiprocessing.get_context("forkserver")
    large, far = {}, {}
    for case, (world_size, flags) in CASES.items():
        with ProcessPoolExecutor(1, mp_context=context) as executor:
            calls = executor.submit(large_calls, STEP + flags, world_size).result()
        for operator, callers in calls["large"].items():
            for file, shape in callers.items():
                large.setdefault(operator, {}).setdefault(file, {})[case] = shape
        for operator, callers in calls["far"].items():
            far.setdefault(operator, set()).update(callers)
    return {"large": large, "far": {operator: sorted(files) for operator, files in far.items()}}


@pytest.fixture(scope="module")
def found():
    return trace_cases()


def test_every_operator_beyond_2_to_the_31_elements_is_listed(found):
    listed = json.loads(LIST.read_text())
    large, listed_large = (
        {operator: sorted(calls) for operator, calls in each["large"].items()}
        for each in (found, listed)
    )
    # Shapes are in the list for its reader; they follow the plan of buffers.
    assert (large, found["far"]) == (listed_large, listed["far"]), (
        f"The calls are not those of {LIST.name}. For a new operator under 'large' read its CUDA "
        "kernel in the pinned torch: does it index with 64 bits, or is it launched on parts of 32? "
        "If not, call it on parts. Say so under 'reasons', with the source, and replace 'large' "
        "and 'far' by:\n" + json.dumps(found, indent=1, sort_keys=True)
    )


def test_every_large_operator_has_a_reason(found):
    reasons = json.loads(LIST.read_text())["reasons"]
    assert reasons.keys() == {*found["large"], "far"}
    assert all(each["why"] and each["source"] for each in reasons.values())
