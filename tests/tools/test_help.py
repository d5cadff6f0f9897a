"""``--help`` of every program: its documentation with all line breaks, and its own name."""

import ast
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tools", "benchmarks")
PROGRAMS = [ROOT / "pretrain_gpt.py", *sorted(p for f in FOLDERS for p in ROOT.glob(f"{f}/*.py"))]


def help_of(program: Path, capsys, monkeypatch) -> str:
    monkeypatch.setattr(sys, "argv", [str(program), "--help"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(program), run_name="__main__")
    assert exit_.value.code in (0, None)
    return capsys.readouterr().out


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_help_is_the_documentation_with_its_line_breaks(program, capsys, monkeypatch):
    shown = help_of(program, capsys, monkeypatch)
    assert shown.startswith(f"usage: {program.name} ")
    told = ast.get_docstring(ast.parse(program.read_text())).splitlines()
    first = told[0]
    assert first in shown.splitlines()
    if program.name != "pretrain_gpt.py":  # a page of flags follows: its examples are in README.md
        missing = [line for line in told if line not in shown.splitlines()]
        assert not missing
    assert any(line.startswith("    ") and program.name in line for line in shown.splitlines())
