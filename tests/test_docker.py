"""The Dockerfile, built and used without a Docker engine; see ``docker.sh``."""

import configparser
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import pip_settings

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("buildah", "debootstrap")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.geteuid() != 0, reason="chroot and debootstrap need root")
@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {' and '.join(TOOLS)}")
def test_image_trains_the_tiny_example_on_the_torch_of_its_base(tmp_path):
    done = subprocess.run(
        ["bash", "tests/docker.sh", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-10_000:]
    assert "the tiny example trained in the image" in done.stdout


def test_the_environment_wins_over_pips_files():
    listed = ":env:.index-url='https://mirror/simple'\nglobal.index-url='https://other/simple'\n"
    assert pip_settings.settings(listed) == {"index-url": ["https://mirror/simple"]}


def test_pip_reads_what_was_written():
    values = {"find-links": ["/wheels", "/more"], "timeout": ["60"]}
    parser = configparser.RawConfigParser()
    parser.read_string(pip_settings.configuration(values))
    assert {name: value.split() for name, value in parser["global"].items()} == values


def test_local_indices_are_mounted_in_whole():
    urls = ["file:///srv/pypi/simple", "https://index/simple"]
    found = pip_settings.paths({"extra-index-url": urls, "cert": ["/etc/ca.crt"]})
    assert found == ["/etc/ca.crt", "/srv/pypi"]


def test_what_git_ignores_stays_out_of_the_image():
    ignored = {line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()}
    left_out = {line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().split()}
    assert ignored <= left_out
