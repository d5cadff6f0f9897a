"""Exports a checkpoint as a Hugging Face folder."""

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
from megatron_untied.checkpoint.run_config import model_config_of, read_provenance
from megatron_untied.checkpoint.state import StoredState
from megatron_untied.config import ModelConfig
from megatron_untied.hf.adapters import Adapters
from megatron_untied.hf.config import model_config_to_hf
from megatron_untied.hf.folder import (
    CONFIG,
    TensorSpec,
    copy_small_files,
    finite,
    read_config,
    tokenizer_folder,
    write_safetensors_folder,
)
from megatron_untied.hf.importing import Advance
from megatron_untied.hf.names import hf_layouts
from megatron_untied.sharding.parameter_layout import ParameterLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """A checked checkpoint, ready to be written as a Hugging Face folder."""

    checkpoint: Path
    model: ModelConfig
    layouts: Mapping[str, ParameterLayout]
    """The place of each tensor of the folder in our parameters, by its name there."""
    reader: TensorReader
    specs: Mapping[str, TensorSpec]
    """Shapes and dtypes of the tensors of the folder."""
    small_files: Path | None
    """Folder with the tokenizer, if known."""
    config: dict[str, object]
    """The folder's ``config.json``."""
    adapters: Adapters | None = None
    """Merged into the weights, if the checkpoint has adapters."""

    @classmethod
    def open(
        cls,
        load: Path,
        iteration: int | None = None,
        dtype: torch.dtype | None = None,
        pretrained: Path | None = None,
    ) -> "Export":
        """Read everything but the weights.

        Args:
            load: folder of checkpoints.
            iteration: which of them; None is the latest.
            dtype: of the folder; None is the dtype of the Hugging Face weights that training
                started from, or else the checkpoint's.
            pretrained: folder of the weights that adapters belong to, if it has moved.

        Raises:
            ValueError: there is no complete checkpoint, or no Hugging Face family can express it.
        """
        checkpoint = find_checkpoint(load, iteration)
        if checkpoint is None:
            raise ValueError(f"--load {load} has no checkpoint; check the path")
        model = model_config_of(checkpoint)
        layouts = hf_layouts(model)
        expected = {f"model.{layout.name}": layout.global_shape for layout in layouts.values()}
        adapters, weights = Adapters.open(checkpoint), checkpoint
        if adapters is not None:
            weights = adapters.pretrained(pretrained)
        elif pretrained is not None:
            raise ValueError(f"{checkpoint} has no adapters; leave out --pretrained-checkpoint")
        small_files = tokenizer_folder(load if adapters is None else weights.parent, checkpoint)
        like = read_config(small_files) if small_files and (small_files / CONFIG).exists() else {}
        TensorFiles.open(weights).require(expected, allow_more="optimizer.")
        reader = TensorReader(weights)
        source = read_provenance(checkpoint).source_dtype
        if dtype is None and source and StoredState.read(checkpoint).optimizer_step is not None:
            # Trained since the import: the checkpoint is fp32, twice the size of what came in.
            dtype = getattr(torch, source)
        specs = {
            name: TensorSpec(layout.local_shape, dtype or reader.dtype(f"model.{layout.name}"))
            for name, layout in layouts.items()
        }
        # config.json names one dtype, while the tensors may have several.
        (most_common, _), *_ = Counter(spec.dtype for spec in specs.values()).most_common(1)
        return cls(
            checkpoint=checkpoint,
            model=model,
            layouts=layouts,
            reader=reader,
            specs=specs,
            small_files=small_files,
            config=model_config_to_hf(model, most_common, like),
            adapters=adapters,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that :meth:`write` will write."""
        return sum(spec.nbytes for spec in self.specs.values())

    def write(self, out: Path, advance: Advance, *, max_shard_bytes: int) -> list[str]:
        """Write the folder, one block of a tensor at a time.

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
        # Renamed when complete: an interrupted export leaves nothing under the final name.
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
        staging.rename(out)  # also onto an empty folder, which POSIX allows
        return copied

    def _read(self, name: str, advance: Advance) -> Iterator[Tensor]:
        layout, dtype = self.layouts[name], self.specs[name].dtype
        # Merged in fp32 and rounded once.
        read_dtype = dtype if self.adapters is None else torch.float32
        # One block in memory at a time; the reader keeps the index between its calls.
        for tensor_slice in row_blocks(layout.whole):
            block = torch.empty(tensor_slice.sizes, dtype=read_dtype)  # [rows of the block, ...]
            # Views of the block: reading fills it, rounding to its dtype.
            slices = layout.global_slices(block, [tensor_slice])
            self.reader.read({f"model.{layout.name}": GlobalTensor(layout.global_shape, slices)})
            if self.adapters is not None:
                self.adapters.merge_(name, block, tensor_slice.offsets[0])
            yield finite(block, dtype, name)
            advance(block.numel() * dtype.itemsize)
