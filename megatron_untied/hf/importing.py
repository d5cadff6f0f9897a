"""A Hugging Face folder becomes a checkpoint."""

import functools
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_untied.checkpoint import Progress, Provenance
from megatron_untied.checkpoint import directory as disk
from megatron_untied.checkpoint.global_tensor import GlobalTensor, row_blocks, write_tensors
from megatron_untied.checkpoint.run_config import write_run_config
from megatron_untied.checkpoint.state import StoredState
from megatron_untied.config import ModelConfig
from megatron_untied.hf.config import model_config_from_hf
from megatron_untied.hf.names import EMBEDDING, OUTPUT, check_tensors, hf_layouts
from megatron_untied.hf.safetensors_folder import SafetensorsFolder, TensorSpec, finite
from megatron_untied.hf.tokenizer_files import CONFIG, FOLDER, copy_small_files, read_config
from megatron_untied.sharding.parameter_layout import ParameterLayout
from megatron_untied.sharding.tensor_slice import TensorSlice

Advance = Callable[[int], None]
"""Told about every so many bytes that are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """A folder that was checked and can be written as a checkpoint of iteration 0."""

    folder: Path
    model: ModelConfig
    tensors: SafetensorsFolder
    layouts: Mapping[str, ParameterLayout]
    """Where each tensor of the folder lies in our parameters."""
    dtype: torch.dtype | None
    """Of the checkpoint; None keeps each tensor's."""

    @classmethod
    def open(cls, folder: Path, dtype: torch.dtype | None = None) -> "Import":
        """Read everything but the weights.

        Raises:
            ValueError: the folder is incomplete, of an architecture that does not exist here, or
                its tensors are not those of its architecture.
        """
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; download the model and give its folder")
        model = model_config_from_hf(read_config(folder), str(folder / CONFIG))
        tensors, layouts = SafetensorsFolder(folder), hf_layouts(model)
        found = {name: spec.shape for name, spec in tensors.specs.items() if not _derived(name)}
        if OUTPUT in found and OUTPUT not in layouts:
            _require_tied(tensors, folder)
            del found[OUTPUT]
        check_tensors(found, layouts, str(folder))
        opened = cls(folder=folder, model=model, tensors=tensors, layouts=layouts, dtype=dtype)
        opened._require_one_dtype_each()
        return opened

    @property
    def num_bytes(self) -> int:
        """What :meth:`write` will write."""
        return sum(self._spec(name).nbytes for name in self.layouts)

    def write(self, save: Path, advance: Advance) -> list[str]:
        """Write the checkpoint, one block of a tensor after the other.

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
        provenance = Provenance(run_id=uuid.uuid4().hex, source_dtype=self._usual_dtype())
        own = save, 0, provenance.run_id
        staging = disk.staging_folder(*own)
        disk.start(*own)
        state = StoredState(progress=Progress(), ranks=None, optimizer_step=None, scheduler=None)
        try:
            write_tensors(staging, self._tensors(advance))
            state.write(staging)
            write_run_config(staging, self.model, None, provenance)
            copied = copy_small_files(self.folder, save / FOLDER, config=True)
            disk.publish(*own)
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
                    unread.add(place, dtype, functools.partial(self._rows, name, tensor_slice))
        return tensors

    def _rows(self, name: str, tensor_slice: TensorSlice) -> Tensor:
        return finite(self.tensors.rows(name, *_range(tensor_slice)), self._spec(name).dtype, name)

    def _spec(self, name: str) -> TensorSpec:
        stored = self.tensors.specs[name]
        return TensorSpec(stored.shape, self.dtype or stored.dtype)

    def _usual_dtype(self) -> str:
        """Of most tensors of the checkpoint, by its name in torch and in ``config.json``."""
        dtypes = Counter(self._spec(name).dtype for name in self.layouts)
        return str(dtypes.most_common(1)[0][0]).removeprefix("torch.")

    def _require_one_dtype_each(self) -> None:
        first: dict[str, str] = {}
        for name, layout in self.layouts.items():
            other = first.setdefault(layout.name, name)
            one, two = self._spec(other).dtype, self._spec(name).dtype
            if one != two:
                raise ValueError(
                    f"{self.folder}: {other} is {one} and {name} {two}, but they become one "
                    "tensor; give --dtype"
                )


class LazyTensor(GlobalTensor):
    """A tensor of a checkpoint whose slices are read when it is their turn to be written."""

    def __init__(self, shape: tuple[int, ...], advance: Advance):
        super().__init__(shape, [])
        self._reads: dict[torch.Size, Callable[[], Tensor]] = {}
        self._advance = advance

    def add(
        self, tensor_slice: TensorSlice, dtype: torch.dtype, read: Callable[[], Tensor]
    ) -> None:
        """One more part: ``tensor_slice`` of the tensor is what ``read`` will return."""
        offsets = torch.Size(tensor_slice.offsets)
        self.slices[offsets] = torch.empty(tensor_slice.sizes, dtype=dtype, device="meta")
        self._reads[offsets] = read

    def to_write(self, offsets: torch.Size) -> Tensor:
        """Read the part at ``offsets``."""
        part = self._reads[offsets]()
        self._advance(part.nbytes)
        return part


def _derived(name: str) -> bool:
    """Old Llama files hold the rotary frequencies, which follow from config.json."""
    return name.endswith(".rotary_emb.inv_freq")


def _require_tied(tensors: SafetensorsFolder, folder: Path) -> None:
    embedding, output = tensors.specs.get(EMBEDDING), tensors.specs[OUTPUT]
    same = embedding == output and all(
        torch.equal(*(tensors.rows(name, *_range(tensor_slice)) for name in (EMBEDDING, OUTPUT)))
        for tensor_slice in row_blocks(TensorSlice((0,) * len(output.shape), output.shape))
    )
    if not same:
        raise ValueError(
            f"{folder}: config.json ties the embeddings (tie_word_embeddings), but {OUTPUT} is "
            f"there and differs from {EMBEDDING}; correct config.json or remove the tensor"
        )


def _range(tensor_slice: TensorSlice) -> tuple[int, int]:
    return tensor_slice.offsets[0], tensor_slice.offsets[0] + tensor_slice.sizes[0]
