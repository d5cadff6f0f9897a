"""``--help`` of every program: its documentation with all line breaks, and its own name."""

import runpy
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tools", "benchmarks")
PROGRAMS = [
    ROOT / "pretrain_gpt.py",
    # peer_systems.py is started by peers.py alone.
    *sorted(p for f in FOLDERS for p in ROOT.glob(f"{f}/*.py") if p.stem != "peer_systems"),
]
COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def documentation_of(main) -> list[str]:
    return main.__globals__["__doc__"].strip().splitlines()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_help_is_the_documentation_with_its_line_breaks(program, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(program), "--help"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(program), run_name="__main__")
    assert exit_.value.code in (0, None)
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: {program.name} ")
    expected = documentation_of(runpy.run_path(str(program))["main"])
    assert expected[0] in shown.splitlines()
    if program.name != "pretrain_gpt.py":  # a page of flags follows: its examples are in README.md
        assert not [line for line in expected if line not in shown.splitlines()]
    names = program.name, f"-m {program.parent.name}.{program.stem} "
    examples = [line for line in shown.splitlines() if line.startswith("    ")]
    assert any(name in line for name in names for line in examples)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_names_the_command(command, capsys, monkeypatch):
    main = EntryPoint(command, COMMANDS[command], "console_scripts").load()
    monkeypatch.setattr(sys, "argv", [f"/somewhere/bin/{command}", "--help"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code in (0, None)
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: {command} ")
    assert documentation_of(main)[0] in shown.splitlines()
    assert any(line.startswith(f"    {command} ") for line in shown.splitlines())


def test_every_command_has_a_script_in_a_checkout():
    """And every module of commands is a command."""
    modules = {path.stem for path in (ROOT / "megatron_untied/commands").glob("*.py")}
    assert {each.removesuffix(":main") for each in COMMANDS.values()} == {
        f"megatron_untied.commands.{module}" for module in modules - {"__init__"}
    }
    mains = [runpy.run_path(str(program))["main"] for program in PROGRAMS]
    assert {main.__module__ for main in mains} >= {v.split(":")[0] for v in COMMANDS.values()}
