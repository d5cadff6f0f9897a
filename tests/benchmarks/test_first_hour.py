"""The program of the first hour on a GPU, in small on a CPU: it must not be what fails there."""

import importlib
import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu.first_hour import PARTS, ROOT, Part, report, run_parts
from benchmarks.gpu.record import Record, markdown
from benchmarks.gpu.sizes import TOY
from tests.support.ranks import run_on_ranks

TABLES = {
    "environment": ["packages", "machine"],
    "tests": ["tests marked gpu"],
    "kernels": ["kernels", "error against float64, over the largest value", "speed of 4 heads"],
    "layer": ["layer"],
    "stash": ["copies", "a layer's stash"],
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


def test_all_budgets_are_eight_minutes():
    assert sum(part.budget_seconds for part in PARTS) <= 8 * 60


@pytest.mark.slow
def test_the_command_writes_json_and_a_page(tmp_path):
    command = ["bash", "benchmarks/gpu/run.sh", "--device", "cpu", "--toy", "--out", str(tmp_path)]
    command += ["--only", "environment", "kernels", "--scale", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[2/2] kernels: " in done.stdout
    (page,) = tmp_path.glob("first_hour_cpu_*.md")
    (numbers,) = tmp_path.glob("first_hour_cpu_*.json")
    assert [each["part"] for each in json.loads(numbers.read_text())] == ["environment", "kernels"]
    assert "| kernels | Are the attention kernels right, and how fast? | done |" in page.read_text()
