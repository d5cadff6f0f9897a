"""A Hugging Face folder: safetensors files, read and written by rows, and the small files.

The weights are one file, or several with an index. The small files are ``config.json`` and the
tokenizer's. An imported checkpoint keeps them in ``tokenizer/`` beside its iterations, where
``--tokenizer-type HuggingFaceTokenizer --tokenizer-model SAVE/tokenizer`` finds them.
"""

import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_untied.checkpoint.directory import read_json, require_content
from megatron_untied.checkpoint.run_config import RUN_CONFIG, section
from megatron_untied.config.problems import first_few

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes of weights; the safetensors format has more, for quantized weights."""

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


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFolder:
    """The tensors of a folder, read from its files on request."""

    def __init__(self, folder: Path):
        """Read the index and the header of every file that it lists.

        With an index, each tensor is read from the file that the index names. Other copies, and
        files that the index does not list, are ignored.

        Raises:
            ValueError: there are no safetensors, or several files without an index; the index or a
                file is missing or damaged; a tensor is not in its file, or has a quantized dtype.
        """
        self._files: dict[str, Path] = {}
        self.specs: dict[str, TensorSpec] = {}
        for path, names in _files(folder).items():
            found = _read_header(path, names)
            self.specs |= found
            self._files |= dict.fromkeys(found, path)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor, in the dtype of the file."""
        # Opened for each call: while a file stays mapped, the pages read stay resident.
        with safe_open(self._files[name], framework="pt") as file:
            return file.get_slice(name)[start:stop]


def finite(rows: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """``rows`` of the tensor ``name`` in ``dtype``.

    Raises:
        ValueError: they are NaN or infinite, or too large for ``dtype``.
    """
    converted = rows.to(dtype)  # no copy where the dtype is the same
    # After the conversion: 1e39 is finite in fp64 and infinite in bf16.
    if not converted.isfinite().all():
        raise ValueError(
            f"{name} holds NaN or infinity as {dtype}: too large for it, so that another --dtype "
            "helps, or damaged, so that another checkpoint does"
        )
    return converted


def write_safetensors_folder(
    folder: Path,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], Iterable[Tensor]],
    *,
    max_shard_bytes: int,
) -> None:
    """Write tensors block by block, without holding one as a whole.

    Args:
        folder: must exist.
        specs: the tensors, in order.
        read: yields the rows of a tensor in consecutive blocks.
        max_shard_bytes: largest file, unless one tensor is larger.
    """
    # A file is closed when the next tensor would exceed the limit; no tensor is split.
    shards, size = [[]], 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += spec.nbytes
    if len(shards) == 1:
        _write_file(folder / SINGLE, specs, shards[0], read)
        return
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file, specs, names, read)
        weight_map |= dict.fromkeys(names, file)
    # total_size counts the tensors' bytes, without headers, as transformers writes it.
    total = sum(spec.nbytes for spec in specs.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """The files to read and the names of the tensors in each; None for all of them."""
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        placed = _placed(folder / INDEX)
        if missing := sorted(placed.keys() - set(present)):
            raise ValueError(
                f"{folder} lacks {', '.join(missing)}, named by {INDEX}; download the rest"
            )
        if unlisted := [name for name in present if name not in placed]:
            logger.warning("%s: not in %s, so not read: %s", folder, INDEX, ", ".join(unlisted))
        return {folder / name: tensors for name, tensors in placed.items()}
    if SINGLE in present:
        return {folder / SINGLE: None}
    if present:
        raise ValueError(
            f"{folder} has {first_few(present, 3)} but "
            f"neither {INDEX} nor {SINGLE}, so which tensors count is unknown; download {INDEX}, "
            f"or rename a file that holds the whole model to {SINGLE}"
        )
    kinds = sorted({path.suffix for path in folder.glob("*model*") if path.is_file()})
    raise ValueError(
        f"{folder} has neither {SINGLE} nor {INDEX} (model files there end in "
        f"{', '.join(kinds) or 'nothing'}); only safetensors can be converted"
    )


def _placed(index: Path) -> dict[str, list[str]]:
    """The tensors that an index places in each file."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map that places tensors; download it again")
    placed: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(
                f"{index} places {name} in {file!r}, which is not a file of its folder; "
                "download it again"
            )
        placed.setdefault(file, []).append(name)
    return placed


def _read_header(path: Path, names: list[str] | None) -> dict[str, TensorSpec]:
    require_content(path)
    specs = {}
    try:
        with safe_open(path, framework="pt") as file:
            held = file.keys()  # only the header is read here
            if absent := sorted(set(names or ()) - set(held)):
                raise ValueError(f"{path} has no {absent[0]}, which {INDEX} places there")
            for name in held if names is None else names:
                view = file.get_slice(name)
                if view.get_dtype() not in DTYPES:
                    raise ValueError(
                        f"{path}: {name} is {view.get_dtype()}, a quantized checkpoint; convert "
                        f"one in {', '.join(DTYPES)}"
                    )
                specs[name] = TensorSpec(tuple(view.get_shape()), DTYPES[view.get_dtype()])
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); download it again") from error
    return specs


def _write_file(
    path: Path,
    specs: Mapping[str, TensorSpec],
    names: list[str],
    read: Callable[[str], Iterable[Tensor]],
) -> None:
    # Wide dtypes first: each tensor then starts at a multiple of its element size.
    names = sorted(names, key=lambda name: -specs[name].dtype.itemsize)
    with open(path, "wb") as file:
        file.write(_header(specs, names))
        start = file.tell()
        for name in names:
            for rows in read(name):
                assert rows.dtype == specs[name].dtype, name
                # As bytes: numpy has no bfloat16. The memoryview avoids a copy.
                file.write(memoryview(rows.contiguous().view(-1).view(torch.uint8).numpy()))
            assert file.tell() - start == specs[name].nbytes, name
            start = file.tell()
        file.flush()
        os.fsync(file.fileno())  # the folder is renamed to its final name when all are written


def _header(specs: Mapping[str, TensorSpec], names: list[str]) -> bytes:
    """Eight bytes with the length, then JSON: dtype, shape and place of every tensor."""
    codes, start = {dtype: code for code, dtype in DTYPES.items()}, 0
    entries: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    for name in names:
        spec = specs[name]
        stop = start + spec.nbytes
        offsets = (start, stop)  # from the end of the header
        entries[name] = {"dtype": codes[spec.dtype], "shape": spec.shape, "data_offsets": offsets}
        start = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the data start at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def copy_small_files(source: Path, target: Path, *, config: bool) -> list[str]:
    """Copy the tokenizer's files, with ``config`` also ``config.json``; returns their names."""
    # By name, not the whole folder: it may hold weights in other formats as well.
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
    data = section(checkpoint / RUN_CONFIG, "data")
    named = data.get("tokenizer_model")
    if data.get("tokenizer_type") != "HuggingFaceTokenizer" or not isinstance(named, str):
        return None
    return Path(named) if Path(named).is_dir() else None


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's ``config.json``.

    Raises:
        ValueError: it is missing or not JSON.
    """
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder / CONFIG} is missing: {folder} is no Hugging Face model folder")
    return read_json(folder / CONFIG)
