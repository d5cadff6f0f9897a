"""Architectures of published models, one JSON file each, for ``--model NAME``.

A file holds ``source`` (where its values are published), ``num_parameters`` (the publisher's
count), ``vocab_size`` (rows of the embedding, no padding of ours) and ``flags``: Megatron's flags
that make the architecture, with their values, or true. The context length of the published weights
is not among them: rotary positions extend beyond it, which is the purpose of this package.
"""

import importlib.resources
import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One published architecture."""

    name: str
    source: str
    num_parameters: int
    vocab_size: int
    """Rows of the embedding: the tokenizer's tokens, and rows that no token uses."""
    flags: Mapping[str, str | int | float | bool]

    @property
    def argv(self) -> list[str]:
        """The flags as words of a command line."""
        words = []
        for name, value in self.flags.items():
            words += [name] if value is True else [name, str(value)]  # true is a flag without value
        return words


def preset_names() -> list[str]:
    """Names of all presets, sorted."""
    # Not os.listdir: the package may be installed as an archive.
    files = importlib.resources.files(__name__).iterdir()
    return sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json"))


def read_preset(name: str) -> Preset:
    """The architecture of one of ``preset_names()``."""
    text = (importlib.resources.files(__name__) / f"{name}.json").read_text()
    return Preset(name=name, **json.loads(text))
