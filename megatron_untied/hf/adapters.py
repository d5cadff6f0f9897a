"""Adapters (LoRA) in a checkpoint: merged into the weights they belong to, or as PEFT's files.

PEFT names the pair of a matrix after the matrix, so both of ours have a name that follows from a
Hugging Face tensor's.
"""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_untied.checkpoint.compatibility import TensorFiles
from megatron_untied.checkpoint.directory import find_checkpoint
from megatron_untied.checkpoint.global_tensor import GlobalTensor, TensorReader
from megatron_untied.checkpoint.run_config import (
    RUN_CONFIG,
    adaptation_of,
    model_config_of,
    read_provenance,
    section,
)
from megatron_untied.config import AdaptationConfig, ModelConfig
from megatron_untied.config.parameters import ADAPTERS, parameters
from megatron_untied.hf.folder import finite
from megatron_untied.hf.names import hf_layouts
from megatron_untied.sharding.parameter_layout import GlobalSlice


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of one checkpoint."""

    checkpoint: Path
    model: ModelConfig
    adaptation: AdaptationConfig
    reader: TensorReader

    @classmethod
    def open(cls, checkpoint: Path) -> "Adapters | None":
        """Read everything but the values; None if the checkpoint is one of whole weights.

        Raises:
            ValueError: it is damaged.
        """
        model, adaptation = model_config_of(checkpoint), adaptation_of(checkpoint)
        if adaptation.lora_rank is None:
            return None
        found = parameters(model, 1, adaptation)
        expected = {f"model.{name}": its.shape for name, its in found.items() if its.is_trained}
        TensorFiles.open(checkpoint).require(expected, allow_more="optimizer.")
        return cls(checkpoint, model, adaptation, TensorReader(checkpoint))

    def pretrained(self, given: Path | None) -> Path:
        """The checkpoint with the weights that they belong to.

        Args:
            given: its folder of checkpoints; None is the one that training was given.

        Raises:
            ValueError: there is no checkpoint, or it is another one.
        """
        settings = section(self.checkpoint / RUN_CONFIG, "checkpoint")
        folder = given or settings.get("pretrained_checkpoint")
        found = find_checkpoint(Path(folder)) if isinstance(folder, str | Path) else None
        expected = read_provenance(self.checkpoint).pretrained
        if found is None:
            raise ValueError(
                f"{self.checkpoint} has adapters, and {folder} no checkpoint with the weights that "
                "they belong to; give its folder as --pretrained-checkpoint"
            )
        here = f"{read_provenance(found).run_id}, {found.name}"
        if expected and expected != here:
            raise ValueError(
                f"{self.checkpoint} has adapters of another checkpoint ({expected}) than {found} "
                f"({here}); give that one as --pretrained-checkpoint"
            )
        return found

    def names(self) -> Iterator[tuple[str, str]]:
        """Each Hugging Face tensor that has an adapter, and what ours begin with."""
        for theirs, layout in hf_layouts(self.model).items():
            linear, target = layout.name.removesuffix(".weight"), theirs.split(".")[-2]
            if theirs.endswith(".weight") and target in self.adaptation.lora_targets:
                yield theirs, f"model.{linear}{ADAPTERS}{target}."

    def pair(self, ours: str) -> tuple[Tensor, Tensor]:
        """A [r, columns] and B [rows, r], fp32."""
        shapes = parameters(self.model, 1, self.adaptation)
        pair = []
        for part in ("lora_A", "lora_B"):
            shape = shapes[f"{ours.removeprefix('model.')}{part}"].shape
            values = torch.empty(shape, dtype=torch.float32)
            whole = GlobalTensor(shape, [GlobalSlice((0, 0), values)])
            self.reader.read({f"{ours}{part}": whole})
            pair.append(values)
        return pair[0], pair[1]

    def merge_(self, theirs: str, block: Tensor, first_row: int) -> None:
        """Add ``alpha / r B A`` to rows of a Hugging Face tensor from ``first_row`` on, fp32."""
        ours = dict(self.names()).get(theirs)
        if ours is not None:
            a, b = _pair_of(self, ours)
            rows, adaptation = b[first_row : first_row + len(block)], self.adaptation
            block.addmm_(rows, a, alpha=adaptation.lora_alpha / adaptation.lora_rank)

    def write_peft(self, out: Path, dtype: torch.dtype) -> int:
        """Write PEFT's two files into the folder ``out``; returns the bytes of the weights.

        Raises:
            ValueError: there is something in ``out``.
        """
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"--hf-path {out} exists and is not empty; give another")
        tensors = {}
        for theirs, ours in self.names():
            name = f"base_model.model.{theirs.removesuffix('.weight')}"
            for part, values in zip(("lora_A", "lora_B"), self.pair(ours), strict=True):
                tensors[f"{name}.{part}.weight"] = finite(values, dtype, f"{name}.{part}")
        swiglu = self.model.swiglu
        targets = [t for t in self.adaptation.lora_targets if swiglu or t != "gate_proj"]
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": self.adaptation.lora_rank,
            "lora_alpha": self.adaptation.lora_alpha,
            "lora_dropout": 0.0,
            "target_modules": targets,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        out.mkdir(parents=True, exist_ok=True)
        save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
        (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        return sum(tensor.nbytes for tensor in tensors.values())


@functools.lru_cache(maxsize=1)  # blocks of one matrix follow each other
def _pair_of(adapters: Adapters, ours: str) -> tuple[Tensor, Tensor]:
    return adapters.pair(ours)
