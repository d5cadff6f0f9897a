from email.message import Message
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from tools import pin_torch
from tools.pin_torch import constraints, main


class Installed(Distribution):
    """A package as an image has it, without its files."""

    def __init__(self, name: str, version: str, *requires: str):
        self._metadata = Message()
        for key, value in [("Name", name), ("Version", version)]:
            self._metadata[key] = value
        for requirement in requires:
            self._metadata["Requires-Dist"] = requirement

    @property
    def metadata(self):
        return self._metadata

    def read_text(self, filename):
        return self._metadata.as_string() if filename == "METADATA" else None

    def locate_file(self, path):
        raise NotImplementedError


TORCH = Installed("torch", "2.13.0a0+9186a08b2c.nv26.07", "sympy", "triton")


def test_torch_and_what_was_built_against_it_are_held():
    base = [
        TORCH,
        Installed("numpy", "2.1.0"),
        Installed("flash_attn", "2.7.4", "torch", "einops"),
        Installed("transformer.engine", "2.17", "torch>=2.1"),
        Installed("torchvision", "0.28", "numpy", "torch (==2.13.0)"),
        Installed("safetensors", "0.6.2", 'torch>=1.10; extra == "torch"'),
        Installed("torchmetrics", "1.0", "torchsomething"),
    ]
    assert constraints(base, "2.13.0") == [
        "flash-attn==2.7.4",
        "torch==2.13.0a0+9186a08b2c.nv26.07",
        "torchvision==0.28",
        "transformer-engine==2.17",
    ]


def test_a_base_without_torch_is_refused():
    with pytest.raises(ValueError, match="no torch.* choose a base with torch 2.13"):
        constraints([Installed("numpy", "2.1.0")], "2.13.0")


def test_a_base_with_another_torch_is_refused():
    with pytest.raises(ValueError, match="has torch 2.1.0, and requirements.txt.* with 2.13;"):
        constraints([Installed("torch", "2.1.0")], "2.13.0")


def test_reads_the_pin_of_the_requirements(capsys, tmp_path):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("numpy\ntorch==1.2.3\n")
    with pytest.raises(SystemExit, match="^error: the base image has torch .* with 1.2;"):
        main([str(requirements)])
    main([str(Path(__file__).parents[2] / "requirements.txt")])
    assert "torch==" in capsys.readouterr().out


def test_a_snapshot_from_before_the_release_is_named(capsys, monkeypatch):
    requirements = str(Path(__file__).parents[2] / "requirements.txt")
    for torch, is_snapshot in ((TORCH, True), (Installed("torch", "2.13.0+cu130"), False)):
        monkeypatch.setattr(pin_torch, "distributions", lambda torch=torch: [torch])
        pin_torch.main([requirements])
        said = capsys.readouterr()
        assert said.out == f"torch=={torch.version}\n"  # constraints alone
        assert ("is a snapshot from before the release" in said.err) == is_snapshot
