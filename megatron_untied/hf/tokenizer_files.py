"""Copies the small files that belong to the weights: the tokenizer's and ``config.json``.

A converted checkpoint keeps them in ``tokenizer/`` beside its iterations, where
``--tokenizer-type HuggingFaceTokenizer --tokenizer-model SAVE/tokenizer`` finds them.
"""

import shutil
from pathlib import Path
from typing import Any

from megatron_untied.checkpoint.directory import read_json
from megatron_untied.checkpoint.run_config import RUN_CONFIG

FOLDER = "tokenizer"
CONFIG = "config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def copy_small_files(source: Path, target: Path, *, config: bool) -> list[str]:
    """Copy the tokenizer's files, with ``config`` also ``config.json``; returns their names."""
    candidates = (*TOKENIZER_FILES, CONFIG) if config else TOKENIZER_FILES
    names = [name for name in candidates if (source / name).is_file()]
    if names:
        target.mkdir(exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def tokenizer_folder(directory: Path, checkpoint: Path) -> Path | None:
    """The Hugging Face folder with the tokenizer that the weights were trained with, if known.

    Either the one in ``directory``, from an import, or the ``--tokenizer-model`` of the run that
    wrote ``checkpoint``.
    """
    if (directory / FOLDER).is_dir():
        return directory / FOLDER
    data = read_json(checkpoint / RUN_CONFIG).get("data", {})
    if data.get("tokenizer_type") != "HuggingFaceTokenizer":
        return None
    folder = Path(data["tokenizer_model"])
    return folder if folder.is_dir() else None


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's ``config.json``.

    Raises:
        ValueError: it is missing or not JSON.
    """
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder / CONFIG} is missing: {folder} is no Hugging Face model folder")
    return read_json(folder / CONFIG)
