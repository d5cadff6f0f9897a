"""Tables keep every number whole, whatever they are printed on."""

import io
import re

import pytest
from rich.console import Console

from megatron_untied.planner.plan import Plan
from megatron_untied.planner.report import print_plan, print_table
from tests.support.planning import machine, run_config

LONG = (
    "--model llama3-8b --seq-length 5242880 --context-parallel-size 8 --bf16 --use-torch-fsdp2 "
    "--loss-chunk-size 8192 --cp-heads-per-chunk 8 --recompute-granularity selective "
    "--cpu-offloading-num-layers 32 --tensor-model-parallel-size 1"
)


def printed(width: int | None, **kinds) -> str:
    file = io.StringIO()
    print_plan(
        Plan(run_config(LONG), machine()), Console(file=file, width=width, highlight=False, **kinds)
    )
    return file.getvalue()


def device_numbers(text: str) -> list[str]:
    """Numbers of the device tables, in any order."""
    table = text.partition("GPU, GiB")[2].partition("host, GiB")[0]
    return sorted(re.findall(r"\d[\d,]*\.\d\d\b", table))


@pytest.mark.parametrize("width", [20, 40, 80, 120, 200])
@pytest.mark.parametrize("terminal", [True, False])
def test_no_number_is_cut_at_any_width(width, terminal):
    plan = Plan(run_config(LONG), machine())
    said = printed(width, force_terminal=terminal, color_system=None)
    assert "…" not in said
    sizes = [n for snapshot in plan.phases.values() for n in snapshot.by_category.values()]
    columns = {c for m in plan.phases.values() for c, n in m.by_category.items() if n}
    expected = [f"{n / 2**30:,.2f}" for n in sizes if n]
    found = device_numbers(said)
    for number in expected:
        assert number in found, number
    for category in columns:
        assert all(word in said for word in category.split())
    assert f"{plan.time.seconds:,.2f}" in said
    assert f"{plan.host.total() * 8 / 2**30:,.2f}" in said


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_tables_are_not_wider_than_what_they_are_printed_on(width):
    tables = [line for line in printed(width).splitlines() if line[:1] in "┏┃┡│└├"]
    assert tables
    assert max(map(len, tables)) <= width


def test_the_same_numbers_at_every_width():
    """Only the sums of phases are repeated, never those of a category."""
    narrow, wide = (re.findall(r"\d[\d,]*\.\d\d\b", printed(width)) for width in (40, 300))
    assert sorted(narrow) == sorted(wide)


def test_a_log_keeps_a_line_whole(monkeypatch):
    """No terminal: tables of 80 columns, sentences in one line that can be searched for."""
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = printed(80).splitlines()
    (verdict,) = [line for line in lines if "fits: GPU" in line or "does not fit: GPU" in line]
    assert verdict.endswith("GiB reserve")


def test_long_labels_are_folded_and_long_numbers_are_not():
    file = io.StringIO()
    rows = {"a label of many words that nobody can print": ["1,234,567,890.12"] * 3}
    print_table(Console(file=file, width=40), "title", "label", ["one", "two", "three"], rows)
    said = file.getvalue()
    assert said.count("1,234,567,890.12") == 3
    assert said.count("(1 of") == 1
    assert all(len(line) <= 40 for line in said.splitlines())
