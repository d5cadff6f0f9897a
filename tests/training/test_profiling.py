"""Traces of a run on real ranks: which steps and ranks, and the named ranges in them."""

import gzip
import json
import re

import pytest
import torch

from megatron_untied.phases import Phase
from megatron_untied.step_progress import StepProgress
from tests.support.command_line import tiny_config
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import train

RUN = {
    "context_parallel_size": 2,
    "cp_heads_per_chunk": 4,
    "recompute_granularity": "selective",
    "sequence_tile_size": 16,
    "train_iters": 4,
}


def traced(folder, **profiling) -> dict[str, list[dict]]:
    """Events of each trace file of a run on two ranks, by the file's name."""
    flags = RUN | {"profile": True, "tensorboard_dir": folder} | profiling
    run_on_ranks(train, 2, folder / "metrics", **flags)
    suffix = ".pt.trace.json.gz"
    return {
        path.name.removesuffix(suffix): json.loads(gzip.decompress(path.read_bytes()))[
            "traceEvents"
        ]
        for path in folder.glob(f"*{suffix}")
    }


def ranges(events: list[dict]) -> list[dict]:
    """The named ranges in the order of their start, outer ones first."""
    found = [event for event in events if event.get("cat") == "user_annotation"]
    return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def is_inside(inner: dict, outer: dict) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_a_trace_per_rank_names_every_phase_layer_and_chunk(tmp_path):
    found = traced(
        tmp_path, profile_step_start=1, profile_step_end=3, profile_ranks="0 1", bf16=True
    )
    assert found.keys() == {"rank0-iterations-2-3", "rank1-iterations-2-3"}
    for events in found.values():
        steps = [event for event in ranges(events) if event["name"].startswith("iteration")]
        assert [event["name"] for event in steps] == ["iteration 2", "iteration 3"]
        inner = [event for event in ranges(events) if is_inside(event, steps[0])]
        names = [event["name"] for event in inner]
        for layer in ("layer 1 of 2", "layer 2 of 2"):
            for phase in (Phase.ATTENTION_FORWARD, Phase.ATTENTION_BACKWARD):
                outer = next(e for e in inner if e["name"] == f"{phase}, {layer}")
                chunks = [f"{phase}, {layer}, chunk {chunk} of 2" for chunk in (1, 2)]
                assert [
                    e["name"] for e in inner if is_inside(e, outer) and "chunk" in e["name"]
                ] == chunks
            for phase in (Phase.MLP_FORWARD, Phase.MLP_BACKWARD, Phase.QKV_BACKWARD):
                assert f"{phase}, {layer}" in names
        assert {Phase.LOSS, Phase.OPTIMIZER} <= set(names)
        assert names.count("backward") == 4  # micro-batches
        chunk = next(e for e in inner if "chunk" in e["name"])
        operations = [e for e in events if e.get("cat") == "cpu_op" and is_inside(e, chunk)]
        assert any("flash_attention" in e["name"] for e in operations)


def test_only_the_given_ranks_are_traced_and_an_early_exit_shortens_the_trace(tmp_path):
    found = traced(
        tmp_path, profile_step_start=0, profile_step_end=3, profile_ranks="1", exit_interval=2
    )
    assert found.keys() == {"rank1-iterations-1-2"}


def test_nothing_is_recorded_where_no_step_is_traced():
    progress = StepProgress()
    with torch.profiler.profile() as profile, progress.phase(Phase.FORWARD):
        with progress.for_layer(0, 1, 1).chunk(0):
            torch.ones(2).sum()
    assert {event.key for event in profile.key_averages()} >= {"aten::sum"}
    assert Phase.FORWARD not in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "--profile writes a trace per rank into --tensorboard-dir"),
        (
            {"tensorboard_dir": "t", "profile_step_start": 5, "profile_step_end": 5},
            "--profile-step-end 5 is not above --profile-step-start 5, so no step is traced; use 6",
        ),
        (
            {"tensorboard_dir": "t", "profile_ranks": "0 2"},
            "--profile-ranks 2 is not one of the ranks 0 to 1",
        ),
    ],
)
def test_profiling_that_cannot_be_is_refused(flags, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_config(2, profile=True, **flags)


def test_iterations_are_numbered_as_in_megatron():
    profiling = tiny_config(tensorboard_dir="t", profile=True).profiling
    assert list(profiling.iterations) == [11, 12]
    assert not tiny_config().profiling.iterations
