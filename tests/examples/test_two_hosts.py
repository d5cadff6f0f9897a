"""Two torchrun agents, a host each, through a launcher: the losses of two ranks on one host."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import pretrain_gpt
from megatron_untied.cli.arguments import parse_arguments
from megatron_untied.training.loop import pretrain
from tests.examples.launching import EXAMPLES, TINY, finish, free_port, start, torchrun_command
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import launch_of

LAUNCHER = EXAMPLES / "pretrain_8b_5m.sh"


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line["lm_loss"] for line in map(json.loads, lines) if "lm_loss" in line]


def train_on_two_hosts(folder: Path, prefixes=((), ()), **variables: str) -> list[str]:
    """The flags that the launcher gave to each rank. ``prefixes`` go before hosts' commands."""
    paths = [folder / "checkpoints", folder / "tensorboard"]
    further = [*TINY, "--context-parallel-size", "2", "--metrics-jsonl", folder / "metrics.jsonl"]
    command = ["bash", LAUNCHER, *paths, *further]
    variables |= {"NNODES": "2", "GPUS_PER_NODE": "1", "MASTER_PORT": free_port()}
    hosts = [
        start(*prefix, *command, NODE_RANK=str(rank), **variables)
        for rank, prefix in enumerate(prefixes)
    ]
    for done in [finish(host) for host in hosts]:
        assert done.returncode == 0, done.stdout + done.stderr
    return torchrun_command(done.stdout).flags


def train(group, flags: list[str]) -> None:
    pretrain(
        parse_arguments(flags, world_size=group.size()),
        launch_of(group),
        model_provider=pretrain_gpt.model_provider,
        datasets_provider=pretrain_gpt.datasets_provider,
        get_batch=pretrain_gpt.get_batch,
        forward_step=pretrain_gpt.forward_step,
    )


def losses_on_one_host(flags: list[str], there: Path, here: Path) -> list[float]:
    own = [flag.replace(str(there), str(here)) for flag in flags]
    run_on_ranks(train, 2, own)
    return losses(here)


def test_two_agents_train_as_one_host_does(tmp_path):
    there = tmp_path / "two"
    flags = train_on_two_hosts(there, MASTER_ADDR="127.0.0.1")
    assert len(losses(there)) == 3
    assert losses(there) == losses_on_one_host(flags, there, tmp_path / "one")
    assert (there / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "3\n"


NAMES = ("untied0", "untied1")
ADDRESSES = ("192.0.2.1", "192.0.2.2")  # of RFC 5737: no real host has them


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


@pytest.fixture
def hosts():
    """Two network namespaces joined by a cable; each is a host as far as sockets can see."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    try:
        for name in NAMES:
            ip(f"netns add {name}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        ip(f"link add cable netns {NAMES[0]} type veth peer name cable netns {NAMES[1]}")
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip(f"-n {name} address add {address}/24 dev cable")
            ip(f"-n {name} link set cable up")
            ip(f"-n {name} link set lo up")
        yield
    finally:
        for name in NAMES:
            ip(f"netns delete {name}")


@pytest.mark.slow
def test_two_network_namespaces_train_as_one_host_does(hosts, tmp_path):
    prefixes = [("ip", "netns", "exec", name) for name in NAMES]
    there = tmp_path / "two"
    # gloo listens where the host's name leads, which here is the same for both.
    flags = train_on_two_hosts(
        there, prefixes, MASTER_ADDR=ADDRESSES[0], GLOO_SOCKET_IFNAME="cable"
    )
    assert losses(there) == losses_on_one_host(flags, there, tmp_path / "one")
