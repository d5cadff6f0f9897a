"""Architectures of published models, a JSON file each; ``--model NAME`` takes one.

A file holds ``source`` (where its values are published), ``num_parameters`` (the publisher's
count), ``vocab_size`` (rows of the embedding, no padding of ours) and ``flags``: Megatron's flags
that make the architecture, with their values, or true. The longest context that the weights were
trained on is not among them: rotary positions go on, and this package is for going on.
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
    """Rows of the embedding: tokens of its tokenizer, and rows that no token uses."""
    flags: Mapping[str, str | int | float | bool]

    @property
    def argv(self) -> list[str]:
        """The flags as a command line has them."""
        words = []
        for name, value in self.flags.items():
            words += [name] if value is True else [name, str(value)]
        return words


def preset_names() -> list[str]:
    """All there are, sorted."""
    files = importlib.resources.files(__name__).iterdir()
    return sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json"))


def read_preset(name: str) -> Preset:
    """The architecture of one of ``preset_names()``."""
    text = (importlib.resources.files(__name__) / f"{name}.json").read_text()
    return Preset(name=name, **json.loads(text))
