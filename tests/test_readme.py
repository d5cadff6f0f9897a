"""What the documents tell a reader to type, done as a reader would; and what they name, looked up.

Every line of a bash block must have a check in ``CHECKS``. What a laptop can run is run as it
stands. A command for GPUs is parsed for the number of ranks that it would start, and run with the
same features at a small size. The scripts that take minutes are read by bash; the tiny example is
run by a test marked slow.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_untied.cli.arguments import parse_arguments, parse_flags
from megatron_untied.cli.flags import FLAGS
from megatron_untied.cli.planner_flags import complete, planner_parser
from megatron_untied.commands.trace import parse_own
from tests.support.command_line import MODEL_FLAGS

ROOT = Path(__file__).resolve().parents[1]
SMALL = {
    "--nproc-per-node": "2",
    "--world-size": "2",
    **{flag: str(value) for flag, value in MODEL_FLAGS.items() if value is not True},
    "--context-parallel-size": "2",
    "--cp-heads-per-chunk": "2",
    "--cpu-offloading-num-layers": "2",
    "--recompute-num-layers": "2",
    "--sequence-tile-size": "48",
    "--loss-chunk-size": "48",
    "--seq-length": "256",
    "--vocab-size": "250",
    "--train-iters": "3",
    "--activation-disk": tempfile.gettempdir(),
}
"""What a command for eight GPUs becomes on a CPU."""

SMALL_MODEL = " ".join(
    f"{flag} {SMALL[flag]}"
    for flag in SMALL
    if flag in ("--num-layers", "--hidden-size", "--ffn-hidden-size", "--vocab-size")
)
"""After --model of a published one."""

DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    *(f"docs/{p.name}" for p in sorted(ROOT.glob("docs/*.md"))),
)
WITH_COMMANDS = tuple(
    name
    for name in DOCUMENTS
    # test_guide.py runs them
    if name
    not in (
        "docs/extend_llama_to_1m.md",
        "docs/fine_tune_on_chats.md",
        "docs/evaluate_context.md",
        "docs/one_gpu.md",
    )
)


def commands(document: str) -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```$", (ROOT / document).read_text(), re.M | re.S)
    return [line for block in blocks for line in block.replace("\\\n", "").splitlines() if line]


def run(command: str, folder: Path = ROOT, timeout: float = 850) -> str:
    environment = os.environ | {  # noqa: TID251 - a shell needs one
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # noqa: TID251
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def trains(command: str) -> None:
    words = shlex.split(command)
    iterations = words[words.index("--train-iters") + 1]
    assert re.search(rf"iteration +{iterations}/ +{iterations} .* lm loss", run(command))


def parses_and_trains_small(command: str) -> None:
    words = shlex.split(command)
    script = words.index("pretrain_gpt.py")
    ranks = int(words[words.index("--nproc-per-node") + 1])
    parse_arguments(words[script + 1 :], world_size=ranks)
    before = [None, *words[:-1]]
    small = [SMALL.get(flag, word) for flag, word in zip(before, words, strict=True)]
    trains(" ".join([*small, SMALL_MODEL] if "--model" in words else small))


def parses_and_traces_small(command: str) -> None:
    words = shlex.split(command)
    own, flags = parse_own(words[2:])
    parse_arguments(complete(flags), world_size=own.world_size)
    before = [None, *words[:-1]]
    small = [SMALL.get(flag, word) for flag, word in zip(before, words, strict=True)]
    assert "device peak" in run(" ".join([*small, SMALL_MODEL]))


def is_a_script(command: str) -> None:
    _, script, *arguments = shlex.split(command)
    run(f"bash -n {script}")
    for argument in arguments:  # of run.sh: a folder of tests, or pytest's own
        assert argument == "--slow" or (ROOT / argument).is_dir(), argument


def launches(command: str) -> None:
    """A plan is made. What it is for is read: the launcher exists, and so do the flags."""
    if command.endswith("--dry-run"):
        run(command)
        return
    words = command.split()
    launchers = [word for word in words if word.startswith("examples/")]
    assert launchers
    for launcher in launchers:
        assert (ROOT / launcher).is_file(), launcher
    flags = [word for word in words[words.index(launchers[-1]) :] if word.startswith("--")]
    parse_flags(words[words.index(flags[0]) :] if flags else [])


def builds_the_image(command: str) -> None:
    assert shlex.split(command)[-1] == "."
    assert (ROOT / "Dockerfile").is_file()


def installs(command: str) -> None:
    """Only what pip would read is checked: an installation takes minutes and a network."""
    for word in shlex.split(command)[2:]:
        Requirement(word)


def installs_file(command: str) -> None:
    """The requirements of a file can be read; installing them takes minutes and a network."""
    words = shlex.split(command)
    for line in (ROOT / words[words.index("-r") + 1]).read_text().splitlines():
        if not line.startswith("#"):
            Requirement(line)


def measures(command: str) -> None:
    """The program has the flags; tests/benchmarks runs it at toy size."""
    _, _, module, *arguments = shlex.split(command)
    known = run(f"python -m {module} --help")
    for argument in arguments:
        assert not argument.startswith("--") or argument in known, argument


def starts_pre_commit(command: str) -> None:
    assert command == "pre-commit install"
    assert (ROOT / ".pre-commit-config.yaml").is_file()


def runs_elsewhere(command: str) -> None:
    """Where there is nothing that it could change."""
    with tempfile.TemporaryDirectory() as folder:
        run(command, Path(folder))


OF_OTHER_PROGRAMS = {
    *("--slow", "--fault-seed", "--help"),  # pytest's here, and every program's
    *("--dry-run", "--rehearse"),  # launchers'
    *("--build-arg", "--ipc=host", "--ulimit", "--time"),  # docker's
    *("--shutdown-timeout", "--numa-binding"),  # torchrun's
    "--ft-rank-heartbeat-timeout",  # ft_launcher's
    *(
        "--input",
        "--output-prefix",
        "--join-folders",
        "--on-bad-line",
        "--append-eod",
        "--resume",
        "--dtype",
        "--histogram",
        *("--output", "--tasks", "--lengths", "--depths", "--trials"),
        *("--num-documents", "--window-tokens"),
    ),  # tools'
}

CHECKS = {
    "source tools/environment.sh": run,
    "bash examples/pretrain_tiny.sh": is_a_script,
    "bash tests/": is_a_script,
    "bash examples/": launches,
    "sbatch ": launches,
    "MASTER_ADDR=": launches,
    "kubectl create --filename ": launches,
    "docker build ": builds_the_image,
    "docker run ": launches,
    "python -m torch.distributed.run ": trains,
    "torchrun ": parses_and_trains_small,
    "python benchmarks/memory_trace.py ": parses_and_traces_small,
    "python tools/plot_schedule.py ": run,
    "python tools/plan_memory.py ": run,
    "pip install ": installs,
    "DS_BUILD_OPS=0 pip install ": installs_file,
    "python -m benchmarks.": measures,
    "pre-commit ": starts_pre_commit,
    "ruff ": runs_elsewhere,
}


def check(command: str) -> None:
    checks = [check for start, check in CHECKS.items() if command.startswith(start)]
    assert checks, f"no check for: {command}"
    checks[0](command)


@pytest.mark.timeout(900)  # seconds when the machine is idle
@pytest.mark.parametrize(
    "command",
    dict.fromkeys(command for document in WITH_COMMANDS for command in commands(document)),
)
def test_command(command):
    check(command)


def test_the_readme_says_how_to_install_train_and_test():
    starts = {command.split(" pretrain_gpt.py")[0] for command in commands("README.md")}
    assert starts >= {
        "source tools/environment.sh",
        "bash examples/pretrain_tiny.sh",
        "bash tests/run.sh",
        "python -m torch.distributed.run --standalone --nproc-per-node 2",
        "torchrun --standalone --nproc-per-node 8",
    }


@pytest.mark.parametrize(
    "command",
    [
        "conda activate megatron",
        "bash examples/no_such_script.sh",
        "sbatch examples/slurm_multinode.sbatch examples/no_such_script.sh",
        "bash examples/pretrain_8b_5m.sh --no-such-flag",
        "bash tests/run.sh tests/no_such_folder",
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layerz 2",
        "pip install -r no_such_file.txt",
        "ruff check --fix no_such_folder",
    ],
)
def test_a_broken_command_fails(command):
    with pytest.raises((AssertionError, ValueError)):
        check(command)


@pytest.mark.parametrize(
    "document", [name for name in DOCUMENTS if name not in ("docs/flags.md", "docs/megatron_lm.md")]
)
def test_flags_that_are_named_exist(document):
    code = re.findall(r"`(--[^`]+)`", (ROOT / document).read_text())
    named = {word for text in code for word in text.split() if word.startswith("--")}
    known = {name for flags in FLAGS.values() for name, _ in flags}
    planner = set(planner_parser()._option_string_actions)
    assert named <= known | planner | OF_OTHER_PROGRAMS


MADE_BY_A_RUN = {"checksums.txt", "latest_checkpointed_iteration.txt"}


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name != "docs/files.md"])
def test_files_that_are_named_exist(document):
    text = (ROOT / document).read_text()
    named = re.findall(
        r"`([\w./]+(?:\.(?:py|sh|sbatch|yaml|txt|md)|/))`|\]\(((?!https:)[^)]+)\)", text
    )
    folders = ("", "docs", "examples", "megatron_untied", "megatron_untied/context_parallel")
    places = [ROOT / folder for folder in folders]
    for path in {code or link for code, link in named} - MADE_BY_A_RUN:
        file = path.partition("#")[0]
        assert any((place / file).exists() for place in places), path


def test_gpu_requirements_can_be_read():
    lines = (ROOT / "requirements-gpu.txt").read_text().splitlines()
    names = [Requirement(line).name for line in lines if line and not line.startswith(("#", "--"))]
    blackwell = ["nvidia-cutlass-dsl", "quack-kernels", "flash-attn-4"]
    assert names == ["flash-attn-3", "flash-attn", "transformer-engine", *blackwell]
    # The image, and the comment for builds by hand, take FlashAttention-3 at flash-attn-4's tag.
    version = next(line for line in lines if line.startswith("flash-attn-4")).partition("==")[2]
    assert any(f"--branch fa4-v{version.replace('b', '.beta')} " in line for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tiny_example(tmp_path):
    out = tmp_path / "tiny"
    said = run(f"bash examples/pretrain_tiny.sh {out}", timeout=1700)
    assert "unigram entropy of the corpus" in said
    assert (out / "loss.png").stat().st_size > 10_000
    assert list((out / "tensorboard").iterdir())
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    iterations = [line["iteration"] for line in metrics if "lm_loss" in line]
    last = int((out / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert iterations == list(range(1, last + 1))  # over the restart too
