"""The report on a new GPU, in small on a CPU: the program must not be what fails there."""

import importlib
import json
import subprocess
from datetime import datetime
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import memory, unit_tests
from benchmarks.gpu.gpu_report import PARTS, Part, default_scale, report, result_name, run_parts
from benchmarks.gpu.record import Record, markdown
from benchmarks.gpu.sizes import ROOT, TOY
from megatron_untied.context_parallel.kernels.flash_attention import (
    FlashAttention3,
    FlashAttention4,
)
from tests.support.ranks import run_on_ranks

TABLES = {
    "environment": ["packages", "machine"],
    "tests": ["tests marked gpu"],
    "kernels": ["kernels", "error against float64, over the largest value", "speed of 4 heads"],
    "layer": ["layer"],
    "offload": ["copies", "offload of a layer"],
    "memory": ["peak memory"],
    "context": ["predicted", "tried"],
    "agreement": ["losses"],
}
TRAINS = ("tests", "memory", "context", "agreement")
"""Parts that start other programs."""


def record_of(group, function: str, path: Path) -> Record:
    module, name = function.split(".")
    record = Record(path, budget_seconds=100)
    getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)(record, TOY)
    return record


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=[pytest.mark.slow] * (part.name in TRAINS), id=part.name)
        for part in PARTS
    ],
)
def test_every_part_runs_in_small_and_finds_no_problem(part, tmp_path):
    path = tmp_path / "found.json"
    (record,) = run_on_ranks(record_of, 1, part.function, path, timeout=280)
    assert list(record.tables) == TABLES[part.name]
    assert record.problems == []
    assert json.loads(path.read_text())["tables"].keys() == record.tables.keys()


def test_a_part_that_fails_or_takes_too_long_is_reported_and_the_others_run(tmp_path):
    parts = [
        Part("broken", "Can it be imported?", "no_such_module.run", 60),
        Part("endless", "Does it end?", "unit_tests.run", 0.5),
        Part("good", "What is installed?", "environment.run", 60),
    ]
    broken, endless, good = run_parts(parts, ["--device", "cpu", "--toy"], scale=1.0)
    assert broken["state"].startswith("failed:")
    assert "No module named 'benchmarks.gpu.no_such_module'" in broken["state"]
    assert endless["state"] == "ended after its 0.5 s"
    assert good["state"] == "done"
    page = report([broken, endless, good], "A title")
    assert page.startswith("# A title\n")
    assert "No module named 'benchmarks.gpu.no_such_module'" in page
    assert "| torch |" in page


def test_what_was_found_before_the_end_is_in_the_file(tmp_path):
    record = Record(tmp_path / "found.json", budget_seconds=1)
    record.row("table", tokens=4, seconds=0.5)
    record.row("table", tokens=8, note="left out")
    record.expect(True, "not noted")
    record.expect(False, "noted")
    found = json.loads(record.path.read_text())
    assert found["problems"] == ["noted"]
    assert markdown(found["tables"]["table"]).splitlines() == [
        "| tokens | seconds | note |",
        "|---|---|---|",
        "| 4 | 0.5 |  |",
        "| 8 |  | left out |",
    ]


def test_a_record_is_whole_while_it_is_written(tmp_path, monkeypatch):
    """A part may be killed within a write: the file keeps what it had."""
    record = Record(tmp_path / "found.json", budget_seconds=1)
    record.row("table", tokens=4)
    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(KeyboardInterrupt):
        record.row("table", tokens=8)
    monkeypatch.undo()
    assert json.loads(record.path.read_text())["tables"] == {"table": [{"tokens": 4}]}


def write_half(path: Path, text: str) -> None:
    path.write_bytes(text[: len(text) // 2].encode())
    raise KeyboardInterrupt


def test_flash_attention_4_has_time_to_compile(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for missing, scale in (("a Blackwell data center GPU", 1.0), (None, 3.0)):
        monkeypatch.setattr(FlashAttention4, "missing", lambda device, said=missing: said)
        assert default_scale("cuda") == scale
    assert default_scale("cpu") == 5.0


def test_plan_and_trace_are_of_the_kernel_that_is_installed(monkeypatch, tmp_path):
    """A Hopper GPU with nothing beyond requirements.txt runs torch's flash attention."""
    monkeypatch.setattr(memory, "current_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(FlashAttention3, "missing", lambda device: "the package FlashAttention-3")
    assert set(memory.this_machine_alone().kernels) >= {"torch-flash"}
    traced = {}
    monkeypatch.setattr(memory.subprocess, "run", lambda command, **_: traced.update(to=command))
    (tmp_path / "trace.json").write_text('{"peak_device_bytes": 1}')
    memory.traced_peak(TOY.model.format(layers=1) + "--seq-length 128", tmp_path / "trace.json")
    assert traced["to"][-2:] == ["--attention-backend", "torch-flash"]


def test_runs_and_parts_do_not_overwrite_each_others_results():
    every, at = [part.name for part in PARTS], datetime(2026, 12, 1, 5, 4, 3)
    assert result_name("NVIDIA H200", every, at) == "nvidia-h200_20261201-050403"
    assert result_name("NVIDIA H200", every[:1], at) == "nvidia-h200_environment_20261201-050403"


def test_tests_that_end_without_a_report_are_one_problem(tmp_path, monkeypatch):
    """Such as a conftest that does not import, and a folder without tests."""
    (tmp_path / "tests").mkdir()
    monkeypatch.setattr(unit_tests, "ROOT", tmp_path)
    record = Record(tmp_path / "found.json", budget_seconds=1)
    unit_tests.run(record, TOY)
    assert record.problems == ["no test is marked gpu: this is no checkout with its tests"]
    (tmp_path / "tests/test_one.py").write_text("# pytest.mark.gpu\n")
    (tmp_path / "tests/conftest.py").write_text("import no_such_module\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    unit_tests.run(record, TOY)
    (problem,) = record.problems[1:]
    assert problem.startswith("pytest ended with 4 and without a report: ")
    assert "no_such_module" in problem


def test_all_budgets_are_eight_minutes():
    assert sum(part.budget_seconds for part in PARTS) <= 8 * 60


@pytest.mark.slow
def test_the_command_writes_json_and_a_page(tmp_path):
    command = ["bash", "benchmarks/gpu/run.sh", "--device", "cpu", "--toy", "--out", str(tmp_path)]
    command += ["--only", "environment", "kernels", "--scale", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[2/2] kernels: " in done.stdout
    (page,) = tmp_path.glob("cpu_environment_kernels_*.md")
    (numbers,) = tmp_path.glob("cpu_environment_kernels_*.json")
    assert [each["part"] for each in json.loads(numbers.read_text())] == ["environment", "kernels"]
    assert "| kernels | Are the attention kernels right, and how fast? | done |" in page.read_text()
