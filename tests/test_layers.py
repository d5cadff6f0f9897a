"""Imports point downwards: a module imports from its own layer or from lower ones."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = (
    ("platform", "config", "presets", "dtypes", "phases", "step_progress"),
    ("norms", "matmul", "backends", "rope", "flops", "tiling", "residual", "lora"),
    ("context_parallel",),
    ("streaming", "loss"),
    ("gpt_model", "model"),
    ("sharding",),
    ("checkpoint",),
    ("data", "hf", "megatron_lm", "planner"),
    ("api",),
    ("training",),
    ("tracing",),
    ("cli",),
    ("commands",),
)
"""Packages and modules of ``megatron_untied`` from the ground up."""
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def modules() -> dict[str, Path]:
    paths = (ROOT / "megatron_untied").rglob("*.py")
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


MODULES = modules()


def imports_of(name: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_untied"):
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.startswith("megatron_untied")}
    return found


def room(name: str) -> str:
    return name.split(".")[1]


@pytest.mark.parametrize("name", [name for name in MODULES if "." in name])
def test_a_module_imports_nothing_from_above(name):
    above = {
        other for other in imports_of(name) if "." in other and RANK[room(other)] > RANK[room(name)]
    }
    assert not above, f"{name} is in layer {RANK[room(name)]}"


def test_the_architecture_page_has_the_same_layers():
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("## Layers of the code")[2].partition("\n\n##")[0]
    rows = [row.split("|")[2] for row in table.splitlines() if row.startswith("|")][2:]
    named = [set(re.findall(r"`(\w+)`", row)) for row in rows]
    assert named == [set(layer) for layer in reversed(LAYERS)]


def test_no_circle():
    """Between modules; a package that imports its own modules is no circle."""
    graph = {
        name: {other for other in imports_of(name) if not name.startswith(f"{other}.")}
        for name in MODULES
    }
    TopologicalSorter(graph).prepare()  # raises CycleError
