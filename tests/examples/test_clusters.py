"""Slurm, Docker and Kubernetes tell a launcher the same: which node it is on, of how many."""

import re
from pathlib import Path

import pytest
import yaml

from tests.examples.launching import EXAMPLES, ROOT, fake_program, run

TELL = 'echo "$NODE_RANK of $NNODES at $MASTER_ADDR:$MASTER_PORT, $GPUS_PER_NODE GPUs: $@"\n'
"""A launcher that says what it was told."""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A repository whose launcher only tells."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/pretrain_32b_4m.sh").write_text(TELL)
    return tmp_path


# Slurm


def header() -> dict[str, str]:
    """What sbatch reads: the comments before the first command."""
    text = (EXAMPLES / "slurm_multinode.sbatch").read_text()
    comments = re.match(r"(?:#.*\n)+", text)[0]
    assert text.count("#SBATCH") == comments.count("#SBATCH")
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", comments, re.M))


def test_sbatch_is_asked_for_whole_nodes_with_one_task_each():
    asked = header()
    assert (asked["nodes"], asked["gpus-per-node"], asked["ntasks-per-node"]) == ("2", "8", "1")
    assert asked["mem"] == "0"  # all of it
    assert "exclusive" in asked


def test_slurm_starts_the_launcher_on_every_node(folder):
    # Whoever stops reading after the first line ends a slow writer.
    names = "echo node4; sleep 0.2; echo node5"
    answer = f'[[ "$*" == "show hostnames node[4-5]" ]] && {{ {names}; }}'
    fake_program(folder, "scontrol", answer)
    each = 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done'
    path = fake_program(folder, "srun", each)
    job = {"SLURM_JOB_NODELIST": "node[4-5]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "123456"}
    script, launcher = EXAMPLES / "slurm_multinode.sbatch", "examples/pretrain_32b_4m.sh"
    told = {"GPUS_PER_NODE": "8", "PATH": path} | job
    done = run("bash", script, launcher, "a b", "--lr", "1", folder=folder, **told)
    assert done.stdout.splitlines() == [
        f"{rank} of 2 at node4:23456, 8 GPUs: a b --lr 1" for rank in (0, 1)
    ], done.stderr


def test_slurm_without_a_launcher_says_so():
    done = run("bash", EXAMPLES / "slurm_multinode.sbatch")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no launcher; give one, such as examples/")


# Docker


def test_docker_gets_the_node_and_what_the_launcher_needs(folder):
    path = fake_program(folder, "docker", 'printf "%s\\n" "$@"')
    done = run(
        "bash", EXAMPLES / "docker_multinode.sh", "--volume", "/data:/data", "--",
        "examples/pretrain_32b_4m.sh", "/data/a b", "--lr", "1",
        PATH=path, MASTER_ADDR="node4", NODE_RANK="1", IMAGE="mine",
    )  # fmt: skip
    words = done.stdout.splitlines()
    assert words[:2] == ["run", "--rm"]
    assert words[words.index("mine") + 1 :] == [
        "bash", "examples/pretrain_32b_4m.sh", "/data/a b", "--lr", "1",
    ]  # fmt: skip
    options = " ".join(words[: words.index("mine")])
    for expected in (
        "--gpus all --volume /data:/data --ipc=host --ulimit memlock=-1 --network=host",
        "--env MASTER_ADDR=node4",
        "--env NODE_RANK=1",
    ):
        assert expected in options
    assert "NNODES" not in options


def test_docker_without_a_launcher_says_so(folder):
    done = run("bash", EXAMPLES / "docker_multinode.sh", "--volume", "/data:/data", "--")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no launcher; give one, such as examples/")


# Kubernetes


def replicas() -> dict[str, dict]:
    job = yaml.safe_load((EXAMPLES / "kubernetes_pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    return job["spec"]["pytorchReplicaSpecs"]


def container(role: str) -> dict:
    (only,) = replicas()[role]["template"]["spec"]["containers"]
    return only


def test_kubernetes_has_as_many_nodes_and_gpus_as_it_says():
    assert sum(spec["replicas"] for spec in replicas().values()) == 2
    for role in ("Master", "Worker"):
        told = {variable["name"]: variable["value"] for variable in container(role)["env"]}
        assert told == {"NNODES": "2", "GPUS_PER_NODE": "8"}
        assert container(role)["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert container(role)["name"] == "pytorch"


def test_kubernetes_mounts_what_it_declares():
    for role in ("Master", "Worker"):
        declared = [volume["name"] for volume in replicas()[role]["template"]["spec"]["volumes"]]
        assert [mount["name"] for mount in container(role)["volumeMounts"]] == declared
        assert container(role)["volumeMounts"][1]["mountPath"] == "/dev/shm"


@pytest.mark.parametrize(("role", "rank"), [("Master", "0"), ("Worker", "1")])
def test_kubernetes_runs_the_launcher_as_the_operator_numbers_the_pods(folder, role, rank):
    told = {variable["name"]: variable["value"] for variable in container(role)["env"]}
    operator = {"MASTER_ADDR": "untied-master-0", "MASTER_PORT": "23456", "RANK": rank}
    done = run(*container(role)["command"], folder=folder, **told, **operator)
    assert done.stdout == (
        f"{rank} of 2 at untied-master-0:23456, 8 GPUs: /runs/checkpoints /runs/tensorboard\n"
    )


def test_commands_name_launchers_that_exist():
    for file in ("slurm_multinode.sbatch", "docker_multinode.sh", "kubernetes_pytorchjob.yaml"):
        for name in re.findall(r"examples/\w+\.\w+", (EXAMPLES / file).read_text()):
            assert (ROOT / name).exists(), name
