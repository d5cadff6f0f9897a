"""A checkpoint becomes a Hugging Face folder."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_untied.checkpoint.compatibility import TensorFiles
from megatron_untied.checkpoint.directory import find_checkpoint
from megatron_untied.checkpoint.global_tensor import GlobalTensor, TensorReader, row_blocks
from megatron_untied.checkpoint.provenance import read_provenance
from megatron_untied.checkpoint.run_config import model_config_of
from megatron_untied.checkpoint.state import StoredState
from megatron_untied.config import ModelConfig
from megatron_untied.hf.config import model_config_to_hf
from megatron_untied.hf.importing import Advance
from megatron_untied.hf.names import hf_layouts
from megatron_untied.hf.safetensors_folder import TensorSpec, finite, write_safetensors_folder
from megatron_untied.hf.tokenizer_files import (
    CONFIG,
    copy_small_files,
    read_config,
    tokenizer_folder,
)
from megatron_untied.sharding.parameter_layout import ParameterLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """A checkpoint that was checked and can be written as a Hugging Face folder."""

    checkpoint: Path
    model: ModelConfig
    layouts: Mapping[str, ParameterLayout]
    """Where each tensor of the folder lies in our parameters."""
    reader: TensorReader
    specs: Mapping[str, TensorSpec]
    """Of the tensors of the folder."""
    small_files: Path | None
    """Folder with the tokenizer."""
    config: dict[str, object]
    """The folder's ``config.json``."""

    @classmethod
    def open(
        cls, load: Path, iteration: int | None = None, dtype: torch.dtype | None = None
    ) -> "Export":
        """Read everything but the weights.

        Args:
            load: folder of checkpoints.
            iteration: which of them; None is the latest.
            dtype: of the folder; None is the dtype that the weights came in from a Hugging Face
                folder before they were trained, or else the checkpoint's.

        Raises:
            ValueError: there is no whole checkpoint, or no Hugging Face architecture like it.
        """
        checkpoint = find_checkpoint(load, iteration)
        if checkpoint is None:
            raise ValueError(f"--load {load} has no checkpoint; check the path")
        model = model_config_of(checkpoint)
        layouts = hf_layouts(model)
        expected = {f"model.{one.name}": one.global_shape for one in layouts.values()}
        small_files = tokenizer_folder(load, checkpoint)
        like = read_config(small_files) if small_files and (small_files / CONFIG).exists() else {}
        TensorFiles.open(checkpoint).require(expected, allow_more="optimizer.")
        reader = TensorReader(checkpoint)
        dtype = dtype or _dtype_before_training(checkpoint)
        specs = {
            name: TensorSpec(one.local_shape, dtype or reader.dtype(f"model.{one.name}"))
            for name, one in layouts.items()
        }
        (usual, _), *_ = Counter(spec.dtype for spec in specs.values()).most_common(1)
        return cls(
            checkpoint=checkpoint,
            model=model,
            layouts=layouts,
            reader=reader,
            specs=specs,
            small_files=small_files,
            config=model_config_to_hf(model, usual, like),
        )

    @property
    def num_bytes(self) -> int:
        """What :meth:`write` will write."""
        return sum(spec.nbytes for spec in self.specs.values())

    def write(self, out: Path, advance: Advance, *, max_shard_bytes: int) -> list[str]:
        """Write the folder, one block of a tensor after the other.

        Args:
            out: must not exist, or be empty.
            advance: see :data:`Advance`.
            max_shard_bytes: of a safetensors file.

        Returns:
            The names of the tokenizer's files that were copied.

        Raises:
            ValueError: there is something in ``out``.
        """
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"--hf-path {out} exists and is not empty; give another")
        staging = out.with_name(f"{out.name}.incomplete")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        write_safetensors_folder(
            staging,
            self.specs,
            lambda name: self._read(name, advance),
            max_shard_bytes=max_shard_bytes,
        )
        (staging / CONFIG).write_text(json.dumps(self.config, indent=2) + "\n")
        copied = []
        if self.small_files is not None:
            copied = copy_small_files(self.small_files, staging, config=False)
        staging.rename(out)
        return copied

    def _read(self, name: str, advance: Advance) -> Iterator[Tensor]:
        layout, dtype = self.layouts[name], self.specs[name].dtype
        for tensor_slice in row_blocks(layout.whole):
            block = torch.empty(tensor_slice.sizes, dtype=dtype)
            slices = layout.global_slices(block, [tensor_slice])
            self.reader.read({f"model.{layout.name}": GlobalTensor(layout.global_shape, slices)})
            yield finite(block, dtype, name)
            advance(block.nbytes)


def _dtype_before_training(checkpoint: Path) -> torch.dtype | None:
    """What the weights came in as, if they have been trained since: training saves fp32."""
    source, trained = read_provenance(checkpoint).source_dtype, StoredState.read(checkpoint)
    return getattr(torch, source) if source and trained.optimizer_step is not None else None
