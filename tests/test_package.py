"""The package as pip installs it: what it needs, what is in it, and its commands."""

import importlib.util
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def requirements(file: str) -> set[str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines())
    return {str(Requirement(line)) for line in lines if line and not line.startswith("--")}


def test_requirements_files_list_what_the_package_declares():
    declared = [*PROJECT["dependencies"], *EXTRAS["test"], *EXTRAS["docs"]]
    assert requirements("requirements.txt") == {str(Requirement(x)) for x in declared}
    assert requirements("requirements-gpu.txt") == {str(Requirement(x)) for x in EXTRAS["gpu"]}


def test_kernels_for_gpus_are_pinned_exactly():
    for each in map(Requirement, EXTRAS["gpu"]):
        assert [part.operator for part in each.specifier] == ["=="], each


def test_torch_is_pinned_exactly():
    (torch,) = (x for x in map(Requirement, PROJECT["dependencies"]) if x.name == "torch")
    assert [each.operator for each in torch.specifier] == ["=="]


@pytest.mark.slow
def test_a_wheel_in_an_environment_of_its_own_runs_the_commands(tmp_path):
    """Offline: dependencies are seen from this environment, the package is the wheel's."""
    source = tmp_path / "source"
    for name in ("megatron_untied", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        source.mkdir(exist_ok=True)
        copy(ROOT / name, source / name)
    run("pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source)
    (wheel,) = tmp_path.glob("*.whl")
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    (packages,) = environment.glob("lib/python*/site-packages")
    # Behind the environment's own packages, and without .pth files: no editable install is seen.
    others = Path(importlib.util.find_spec("torch").origin).parents[1]
    (packages / "dependencies.pth").write_text(f"{others}\n")
    run("pip", "--python", environment, "install", "--no-deps", "--no-index", "-q", wheel)
    for command in PROJECT["scripts"]:
        shown = run(environment / "bin" / command, "--help", cwd=tmp_path)
        assert shown.startswith(f"usage: {command} ")
    flags = "--gpus-per-node 8 --gpu h100-80 --model llama3-8b --bf16 --context-parallel-size 8"
    flags += " --seq-length 131072 --recompute-granularity full --use-torch-fsdp2"
    planned = run(environment / "bin/megatron-untied-plan", *flags.split(), cwd=tmp_path)
    assert "fits: GPU" in planned  # with the wheel's own presets and list of GPUs
    where = "import megatron_untied; print(megatron_untied.__file__)"
    assert run(environment / "bin/python", "-c", where, cwd=tmp_path).startswith(str(packages))


def run(program, *arguments, cwd: Path | None = None) -> str:
    """What a program prints; ``pip`` is this environment's, without this checkout on its path."""
    command = [sys.executable, "-m", "pip"] if program == "pip" else [program]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout
