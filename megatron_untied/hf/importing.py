"""Imports a Hugging Face folder as a checkpoint of iteration 0."""

import functools
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from megatron_untied.checkpoint import Progress, Provenance
from megatron_untied.checkpoint import directory as disk
from megatron_untied.checkpoint.checksums import write_checksums
from megatron_untied.checkpoint.global_tensor import GlobalTensor, row_blocks, write_tensors
from megatron_untied.checkpoint.run_config import write_run_config
from megatron_untied.checkpoint.state import StoredState
from megatron_untied.config import ModelConfig
from megatron_untied.hf.config import model_config_from_hf
from megatron_untied.hf.folder import (
    CONFIG,
    FOLDER,
    SafetensorsFolder,
    TensorSpec,
    copy_small_files,
    finite,
    read_config,
)
from megatron_untied.hf.names import EMBEDDING, OUTPUT, check_tensors, hf_layouts
from megatron_untied.sharding.parameter_layout import ParameterLayout
from megatron_untied.sharding.tensor_slice import TensorSlice

Advance = Callable[[int], None]
"""Called with the bytes that were processed since the last call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """A checked folder, ready to be written as a checkpoint."""

    folder: Path
    model: ModelConfig
    tensors: SafetensorsFolder
    layouts: Mapping[str, ParameterLayout]
    """The place of each tensor of the folder in our parameters, by its name there."""
    dtype: torch.dtype | None
    """Dtype of the checkpoint; None keeps each tensor's own."""

    @classmethod
    def open(cls, folder: Path, dtype: torch.dtype | None = None) -> "Import":
        """Read everything but the weights.

        Raises:
            ValueError: the folder is incomplete, its architecture is not supported, or its tensors
                are not those of its architecture.
        """
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; download the model and give its folder")
        model = model_config_from_hf(read_config(folder), str(folder / CONFIG))
        tensors, layouts = SafetensorsFolder(folder), hf_layouts(model)
        found = {
            name: spec.shape
            for name, spec in tensors.specs.items()
            # Old Llama files hold the rotary frequencies, which follow from config.json.
            if not name.endswith(".rotary_emb.inv_freq")
        }
        if OUTPUT in found and OUTPUT not in layouts:
            _require_tied(tensors, folder)
            del found[OUTPUT]
        check_tensors(found, layouts, str(folder))
        opened = cls(folder=folder, model=model, tensors=tensors, layouts=layouts, dtype=dtype)
        # Tensors that become one parameter, such as q, k and v, need one dtype.
        first: dict[str, str] = {}
        for name, layout in layouts.items():
            other = first.setdefault(layout.name, name)
            other_dtype, name_dtype = opened._spec(other).dtype, opened._spec(name).dtype
            if other_dtype != name_dtype:
                raise ValueError(
                    f"{folder}: {other} is {other_dtype} and {name} {name_dtype}, but they become "
                    "one tensor; give --dtype"
                )
        return opened

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights that :meth:`write` will write."""
        return sum(self._spec(name).nbytes for name in self.layouts)

    def write(self, save: Path, advance: Advance) -> list[str]:
        """Write the checkpoint, one block of a tensor at a time.

        Args:
            save: must not hold checkpoints yet.
            advance: see :data:`Advance`.

        Returns:
            The names of the small files that were copied.

        Raises:
            ValueError: there are checkpoints in ``save``.
        """
        if disk.checkpoint_names(save):
            raise ValueError(f"{save} holds checkpoints already; give another --save")
        # Kept for the export after training, whose checkpoints are fp32: twice the size of bf16.
        dtypes = Counter(self._spec(name).dtype for name in self.layouts)
        source_dtype = str(dtypes.most_common(1)[0][0]).removeprefix("torch.")
        provenance = Provenance(run_id=uuid.uuid4().hex, source_dtype=source_dtype)
        own = save, 0, provenance.run_id
        staging = disk.staging_folder(*own)
        disk.start(*own)
        state = StoredState(progress=Progress(), ranks=None, optimizer_step=None, scheduler=None)
        try:
            parts = write_tensors(staging, self._tensors(advance))  # reads each block to write it
            state.write(staging)
            write_run_config(staging, self.model, None, provenance)
            write_checksums(staging, parts)
            copied = copy_small_files(self.folder, save / FOLDER, config=True)
            disk.publish(*own)  # last: from here on the checkpoint exists
        except BaseException:  # no later import has this id, so none would delete the folder
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return copied

    def _tensors(self, advance: Advance) -> dict[str, GlobalTensor]:
        tensors: dict[str, LazyTensor] = {}
        for name, layout in self.layouts.items():
            key = f"model.{layout.name}"
            unread = tensors.setdefault(key, LazyTensor(layout.global_shape, advance))
            for mapping in layout.mappings:
                for tensor_slice in row_blocks(mapping.local):
                    inside = tensor_slice.shifted([-offset for offset in mapping.local.offsets])
                    place = inside.shifted(mapping.global_offsets)
                    dtype = self._spec(name).dtype
                    # Blocks are whole rows of the file's tensor, in one piece there.
                    start = tensor_slice.offsets[0]
                    stop = start + tensor_slice.sizes[0]
                    read = functools.partial(self._rows, name, start, stop)
                    unread.add(place, dtype, read)
        return tensors

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        rows, where = self.tensors.rows(name, start, stop), f"{self.folder}: {name}"
        return finite(rows, self._spec(name).dtype, where)

    def _spec(self, name: str) -> TensorSpec:
        stored = self.tensors.specs[name]
        return TensorSpec(stored.shape, self.dtype or stored.dtype)


class LazyTensor(GlobalTensor):
    """A tensor of a checkpoint whose slices are read only when they are written."""

    def __init__(self, shape: tuple[int, ...], advance: Advance):
        super().__init__(shape, [])
        self._reads: dict[torch.Size, Callable[[], Tensor]] = {}
        self._advance = advance

    def add(
        self, tensor_slice: TensorSlice, dtype: torch.dtype, read: Callable[[], Tensor]
    ) -> None:
        """Add a slice; ``read`` returns its elements in ``dtype``."""
        offsets = torch.Size(tensor_slice.offsets)
        # DCP plans by shape and dtype: a tensor without memory will do.
        self.slices[offsets] = torch.empty(tensor_slice.sizes, dtype=dtype, device="meta")
        self._reads[offsets] = read

    @override
    def to_write(self, offsets: torch.Size) -> Tensor:
        part = self._reads[offsets]()
        self._advance(part.nbytes)
        return part


def _require_tied(tensors: SafetensorsFolder, folder: Path) -> None:
    """Refuse an output matrix that differs from the embedding which config.json ties it to."""
    embedding, output = tensors.specs.get(EMBEDDING), tensors.specs[OUTPUT]
    same = embedding == output
    # By value, in blocks: some folders hold a tied matrix twice, of 1 GiB and more each.
    for block in row_blocks(TensorSlice((0,) * len(output.shape), output.shape)):
        rows = block.offsets[0], block.offsets[0] + block.sizes[0]
        same = same and torch.equal(tensors.rows(EMBEDDING, *rows), tensors.rows(OUTPUT, *rows))
    if not same:
        raise ValueError(
            f"{folder}: config.json ties the embeddings (tie_word_embeddings), but {OUTPUT} is "
            f"there and differs from {EMBEDDING}; correct config.json or remove the tensor"
        )
