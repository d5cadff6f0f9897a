"""The launchers on a machine that has none of their GPUs: their plans, messages and commands."""

import re
import shutil
import sys

import pytest
import torch

from megatron_untied.cli.arguments import parse_arguments, parse_flags
from tests.examples.launching import (
    EXAMPLES,
    LAUNCHERS,
    ROOT,
    fake_program,
    run,
    torchrun_command,
)

SCRIPTS = sorted([*EXAMPLES.rglob("*.sh"), *EXAMPLES.glob("*.sbatch"), *ROOT.glob("tests/*.sh")])


def option(options: list[str], name: str) -> str:
    return options[options.index(name) + 1]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_bash_reads_every_script(script):
    assert run("bash", "-n", script).returncode == 0


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_finds_nothing():
    flags = ["-x", "-P", "SCRIPTDIR", "-P", ROOT, "-s", "bash", "--severity=warning"]
    found = run("shellcheck", *flags, *SCRIPTS, ROOT / "tools/environment.sh")
    assert found.stdout == ""


@pytest.mark.parametrize(
    ("launcher", "num_ranks", "tokens"),
    [
        ("pretrain_8b_5m.sh", 8, 5_242_880),
        ("pretrain_8b_10m.sh", 8, 10_485_760),
        ("pretrain_32b_4m.sh", 16, 4_194_304),
        ("finetune_8b_1m.sh", 8, 1_048_576),
        ("finetune_8b_1m_one_gpu.sh", 1, 1_048_576),
    ],
)
def test_a_dry_run_plans_for_the_nodes_it_is_meant_for(launcher, num_ranks, tokens, tmp_path):
    done = run("bash", EXAMPLES / launcher, "--dry-run", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    command = torchrun_command(done.stdout)
    ranks = int(option(command.options, "--nnodes")) * int(
        option(command.options, "--nproc-per-node")
    )
    assert ranks == num_ranks
    config = parse_arguments(command.flags, world_size=ranks)
    assert config.parallel.context_parallel_size == ranks
    assert config.batch.seq_length == tokens
    assert config.data.mock_data
    assert not list(tmp_path.iterdir())
    assert config.loop.exit_signal_handler
    assert config.memory.cpu_offloading_num_layers == config.model.num_layers


@pytest.fixture
def without_plan(tmp_path) -> dict[str, str]:
    """Variables with which the planner, whose seconds most tests need not spend, agrees."""
    return {"PATH": fake_program(tmp_path, "python", "exit 0")}


def test_paths_and_further_flags_reach_the_ranks(without_plan, tmp_path):
    paths = ["a b", "board", "t.model", "3 text 7 more"]
    further = ["--seq-length", "1048576", "--lr", "3e-5", "--dry-run", "--seed", "7"]
    done = run("bash", EXAMPLES / LAUNCHERS[0], *paths, *further, **without_plan)
    flags = parse_flags(torchrun_command(done.stdout).flags)
    assert (flags["save"], flags["load"], flags["tensorboard_dir"]) == ("a b", "a b", "board")
    assert (flags["tokenizer_type"], flags["tokenizer_model"]) == (
        "SentencePieceTokenizer",
        "t.model",
    )
    assert flags["data_path"] == ["3", "text", "7", "more"]
    assert (flags["seq_length"], flags["lr"], flags["seed"]) == (2**20, 3e-5, 7)


@pytest.mark.parametrize("launcher", ["pretrain_8b_10m.sh", "finetune_8b_1m_one_gpu.sh"])
def test_drives_are_used_where_a_variable_names_them(launcher, without_plan):
    """What goes there is up to the planner."""
    folders = {"ACTIVATION_DISK": "/nvme0,/nvme1", "DISK_GIB": "7000"}
    done = run("bash", EXAMPLES / launcher, "--dry-run", **folders, **without_plan)
    flags = torchrun_command(done.stdout).flags
    memory = parse_arguments(flags, world_size=8 if "8b_10m" in launcher else 1).memory
    assert memory.activation_disk == ("/nvme0", "/nvme1")
    assert (memory.activation_disk_gib, memory.attention_output_layers) == ("auto", "auto")


def test_nodes_meet_where_the_variables_say(without_plan):
    told = {"MASTER_ADDR": "node4", "MASTER_PORT": "23456", "NODE_RANK": "3", "NNODES": "4"}
    done = run(
        "bash", EXAMPLES / LAUNCHERS[1], "--dry-run", GPUS_PER_NODE="4", **told, **without_plan
    )
    assert (
        torchrun_command(done.stdout).options
        == (
            "--numa-binding node --nnodes 4 --nproc-per-node 4 --node-rank 3 --master-addr node4 "
            "--master-port 23456"
        ).split()
    )


def test_a_dry_run_without_the_nodes_name_says_what_stands_for_it(without_plan):
    done = run("bash", EXAMPLES / LAUNCHERS[1], "--dry-run", **without_plan)
    options = torchrun_command(done.stdout).options
    assert option(options, "--master-addr") == "MASTER_ADDR"
    assert option(options, "--node-rank") == "NODE_RANK"
    assert "this command works once MASTER_ADDR NODE_RANK in it are replaced" in done.stdout
    told = {"MASTER_ADDR": "node4", "NODE_RANK": "0"}
    done = run("bash", EXAMPLES / LAUNCHERS[1], "--dry-run", **told, **without_plan)
    assert "are replaced" not in done.stdout


def test_further_flags_come_last(without_plan):
    further = ["--save", "mine", "--lr", "1"]
    done = run("bash", EXAMPLES / LAUNCHERS[0], "--dry-run", *further, **without_plan)
    assert torchrun_command(done.stdout).flags[-4:] == further


def test_fine_tuning_starts_from_the_converted_checkpoint_and_goes_on_from_its_own(
    without_plan, tmp_path
):
    own = tmp_path / "own"
    (tmp_path / "converted").mkdir()
    command = ["bash", EXAMPLES / LAUNCHERS[2], tmp_path / "converted", own, "--dry-run"]
    first = parse_flags(torchrun_command(run(*command, **without_plan).stdout).flags)
    assert (first["load"], first["finetune"]) == (str(tmp_path / "converted"), True)
    assert first["use_checkpoint_args"]
    assert first["tokenizer_model"] == str(tmp_path / "converted/tokenizer")
    own.mkdir()
    (own / "latest_checkpointed_iteration.txt").write_text("20\n")
    second = parse_flags(torchrun_command(run(*command, **without_plan).stdout).flags)
    assert (second["load"], "finetune" in second) == (str(own), False)
    assert second["use_checkpoint_args"]


@pytest.mark.parametrize(
    ("launcher", "arguments", "variables", "message"),
    [
        (0, ["c", "t", "k", "d", "more"], {}, "'more' is no path that a launcher takes"),
        (0, ["c", "t", "MOCK", "corpus"], {}, "DATA corpus needs the TOKENIZER that made it"),
        (1, [], {}, "2 nodes meet at MASTER_ADDR, which is not set"),
        (1, [], {"MASTER_ADDR": "node0"}, "NODE_RANK is not set; give each of the 2 nodes its own"),
        (1, [], {"MASTER_ADDR": "node0", "NODE_RANK": "2"},
         "NODE_RANK '2' is not an integer from 0 to 1"),
        (0, [], {"NNODES": "0"}, "NNODES '0' is not an integer from 1 to 100000"),
        (0, [], {"GPUS_PER_NODE": "eight"}, "GPUS_PER_NODE 'eight' is not an integer from 1"),
        (0, [], {"MASTER_PORT": "99999"}, "MASTER_PORT '99999' is not an integer from 1 to 65535"),
        (2, ["nowhere"], {}, "no checkpoint in nowhere; tools/convert_checkpoint.py"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(launcher, arguments, variables, message):
    done = run("bash", EXAMPLES / LAUNCHERS[launcher], *arguments, **variables)
    assert done.returncode == 1
    assert re.fullmatch(rf"error: {re.escape(message)}.*\n", done.stderr)


@pytest.mark.parametrize("threads", ["", "3"])
def test_ranks_share_the_cores_of_their_node_unless_told(tmp_path, threads):
    """An empty OMP_NUM_THREADS is one that is not set."""
    path = fake_program(tmp_path, "python", 'echo "$OMP_NUM_THREADS threads for $*"')
    fake_program(tmp_path, "nproc", "echo 96")
    done = run("bash", EXAMPLES / LAUNCHERS[0], PATH=path, OMP_NUM_THREADS=threads)
    started = done.stdout.splitlines()[-1]
    assert started.startswith(f"{threads or 12} threads for {ROOT}/tools/torchrun.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without GPUs")
def test_ranks_on_cpus_are_not_bound_to_gpus(tmp_path):
    path = fake_program(tmp_path, "python", 'echo "$*"')
    done = run("bash", EXAMPLES / LAUNCHERS[0], PATH=path)
    assert "torchrun.py --nnodes 1" in done.stdout.splitlines()[-1]
    assert "numa-binding" not in done.stdout


@pytest.mark.parametrize("status", [1, 2])
def test_nothing_starts_if_the_planner_objects(status, tmp_path):
    refuses = fake_program(tmp_path, "python", f'[[ "$*" != *plan_memory.py* ]] || exit {status}')
    done = run("bash", EXAMPLES / LAUNCHERS[0], PATH=refuses)
    assert (done.returncode, done.stdout) == (status, "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without GPUs")
def test_nothing_starts_on_a_node_without_gpus(tmp_path):
    agrees = f'[[ "$*" == *plan_memory.py* ]] || exec {sys.executable} "$@"'
    path = fake_program(tmp_path, "python", agrees)
    done = run("bash", EXAMPLES / LAUNCHERS[0], PATH=path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: this node has 0 GPUs, and 8 are needed; ")
    assert re.search(r"GiB of host memory +needed +1,7\d\d", done.stdout)


def test_the_plan_is_for_the_gpu_and_the_memory_that_the_variables_name(tmp_path):
    path = fake_program(tmp_path, "python", 'echo "PLANNED $*"')
    command = ["bash", EXAMPLES / LAUNCHERS[0], "--dry-run"]
    usual = run(*command, PATH=path).stdout
    assert "--gpu h100-80" in usual
    assert "--gpu-memory-gib" not in usual
    told = run(*command, PATH=path, GPU="h200", GPU_MEMORY_GIB="140", HOST_MEMORY_GIB="900").stdout
    assert "--gpu h200 --gpu-memory-gib 140 --host-memory-gib 900" in told


def test_a_torch_with_cuda_that_the_environment_would_not_use_is_named(tmp_path):
    """In an image with a mounted checkout. No Python is there to make .venv with."""
    (tmp_path / "tools").mkdir()
    script = shutil.copy(ROOT / "tools/environment.sh", tmp_path / "tools")
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    for has_cuda in (True, False):
        body = f'[[ "$*" == *torch.version.cuda* ]] && exit {int(not has_cuda)}; exit 1'
        path = fake_program(tmp_path, "python", body)
        done = run("bash", "-c", f"source {script}", folder=tmp_path, PATH=path, PYTHON="false")
        assert ("has torch with CUDA" in done.stderr) == has_cuda
        assert (f"pip install --no-deps -e {tmp_path}" in done.stderr) == has_cuda


@pytest.mark.parametrize(("version", "said"), [("3.10", "is no Python 3.11"), ("3.12", "no index")])
def test_an_environment_that_was_not_finished_is_not_used(version, said, tmp_path):
    """Sourced from a prompt, where no ``set -e`` ends what follows a failure."""
    (tmp_path / "tools").mkdir()
    script = shutil.copy(ROOT / "tools/environment.sh", tmp_path / "tools")
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    pip, old = "echo 'no index' >&2; exit 1", int(version == "3.10")
    body = f"""[[ "$1" == -c ]] && exit {old}; [[ "$1" == -I ]] && exit 1; mkdir -p "$3/bin"
        echo "{pip}" > "$3/bin/pip"; chmod +x "$3/bin/pip" """
    path = fake_program(tmp_path, "python", body)
    for _ in range(2):  # what the first one leaves does not count for the second
        done = run("bash", "-c", f"source {script}; echo $?", PATH=path, PYTHON="python")
        assert done.stdout.splitlines()[-1] == "1"
        assert said in done.stderr
    assert not (tmp_path / ".venv/requirements.stamp").exists()


def test_the_allocator_is_set_before_torch_is_imported():
    command = "import os, pretrain_gpt; print(os.environ['PYTORCH_ALLOC_CONF'])"
    default = run(sys.executable, "-c", command).stdout.strip()
    assert default == "expandable_segments:True,pinned_max_round_threshold_mb:1"
    own = run(sys.executable, "-c", command, PYTORCH_ALLOC_CONF="max_split_size_mb:64")
    assert own.stdout.strip() == "max_split_size_mb:64"
