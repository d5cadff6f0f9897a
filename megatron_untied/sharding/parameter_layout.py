"""Maps the part of a parameter that a rank holds to the parameter of the whole model.

The global tensor is the logical one, the same for every sharding: the vocabulary is not padded, and
a SwiGLU's gate and up projections are rows [0, f) and [f, 2f) of one [2f, m] tensor, whatever the
tensor-parallel size. Initial weights, checkpoints and conversions use global tensors only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_untied.config import ModelConfig
from megatron_untied.sharding.tensor_slice import TensorSlice

VOCABULARY_PARAMETERS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters with one row per token, padded at the end; tied embeddings have only the first."""


@dataclass(frozen=True, slots=True)
class GlobalSlice:
    """A slice of the global tensor and the memory on this rank that holds it."""

    offsets: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class SliceMapping:
    """A slice of this tensor-parallel rank's parameter and its offsets in the global tensor."""

    local: TensorSlice
    global_offsets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterLayout:
    """One parameter: its global shape, and the slices of it that this tensor-parallel rank holds.

    Rows of vocabulary padding are in no mapping.
    """

    name: str
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    mappings: tuple[SliceMapping, ...]

    @property
    def whole(self) -> TensorSlice:
        """The local parameter as one slice."""
        return TensorSlice((0,) * len(self.local_shape), self.local_shape)

    @property
    def has_padding(self) -> bool:
        """Whether this rank holds vocabulary padding, which no mapping covers."""
        return sum(mapping.local.numel for mapping in self.mappings) < self.whole.numel

    def global_slices(
        self, tensor: Tensor, slices: Sequence[TensorSlice] | None = None
    ) -> list[GlobalSlice]:
        """Views of ``tensor``, each with its offsets in the global tensor.

        Args:
            tensor: contiguous; holds the elements of ``slices`` one slice after the other, in any
                shape (a flat shard of a distributed optimizer, rows of an FSDP shard).
            slices: slices of the local parameter; None is all of it.
        """
        flat, found, start = tensor.view(-1), [], 0
        for tensor_slice in (self.whole,) if slices is None else slices:
            held = flat[start : start + tensor_slice.numel].view(tensor_slice.sizes)
            start += tensor_slice.numel
            for mapping in self.mappings:
                if common := tensor_slice.intersect(mapping.local):
                    # The same elements by their place in the memory held, and in the global tensor.
                    in_slice = common.shifted([-offset for offset in tensor_slice.offsets])
                    in_mapping = common.shifted([-o for o in mapping.local.offsets])
                    offsets = in_mapping.shifted(mapping.global_offsets).offsets
                    found.append(GlobalSlice(offsets, in_slice.view(held)))
        assert start == tensor.numel(), f"{self.name}: {tensor.numel()} elements for {start}"
        return found


def parameter_layouts(
    model: torch.nn.Module, config: ModelConfig, *, tp_rank: int, tp_size: int
) -> dict[str, ParameterLayout]:
    """The layout of every parameter of a bare model (not wrapped for data parallelism), by name.

    Reads the attributes that megatron-core's parallel linear layers and embedding leave on their
    parameters; call it before FSDP, which replaces the parameters by shards without them.
    """
    _assert_partition_is_marked(model)
    return {
        name: parameter_layout(
            name,
            tuple(parameter.shape),
            # Megatron-core sets partition_dim on unsplit parameters too, to -1.
            partition_dim=parameter.partition_dim
            if getattr(parameter, "tensor_model_parallel", False)
            else None,
            stride=getattr(parameter, "partition_stride", 1),
            num_rows=config.vocab_size if name in VOCABULARY_PARAMETERS else None,
            tp_rank=tp_rank,
            tp_size=tp_size,
        )
        for name, parameter in model.named_parameters()
    }


def parameter_layout(
    name: str,
    local_shape: tuple[int, ...],
    *,
    partition_dim: int | None,
    stride: int = 1,
    num_rows: int | None = None,
    tp_rank: int,
    tp_size: int,
) -> ParameterLayout:
    """The layout of one parameter.

    Args:
        name: as in ``model.named_parameters()``.
        local_shape: the parameter on one tensor-parallel rank, padding included.
        partition_dim: dimension split over the ranks; None is a copy on every rank.
        stride: blocks that are each split over the ranks by themselves: 2 for gate and up, whose
            halves lie one after the other on every rank.
        num_rows: rows of the global tensor without padding; None is all of them.
        tp_rank: this rank in its tensor-parallel group.
        tp_size: ranks of that group.
    """
    global_shape, zeros = list(local_shape), (0,) * len(local_shape)
    if partition_dim is None:
        mappings = [SliceMapping(TensorSlice(zeros, local_shape), zeros)]
    else:
        dim, mappings = partition_dim, []
        width, remainder = divmod(local_shape[dim], stride)
        assert not remainder, f"{local_shape[dim]} rows do not split into {stride} blocks"
        sizes = (*local_shape[:dim], width, *local_shape[dim + 1 :])
        for block in range(stride):
            # Locally blocks follow each other, globally each is followed by other ranks' parts.
            local, in_global = block * width, (block * tp_size + tp_rank) * width
            local_offsets = (*zeros[:dim], local, *zeros[dim + 1 :])
            global_offsets = (*zeros[:dim], in_global, *zeros[dim + 1 :])
            mappings.append(SliceMapping(TensorSlice(local_offsets, sizes), global_offsets))
        global_shape[dim] *= tp_size
    if num_rows is not None:  # leave out the padding, which is at the end
        global_shape[0], padded, mappings = num_rows, mappings, []
        for mapping in padded:
            offsets, sizes = mapping.local.offsets, mapping.local.sizes
            kept = min(sizes[0], num_rows - mapping.global_offsets[0])
            if kept > 0:
                local = TensorSlice(offsets, (kept, *sizes[1:]))
                mappings.append(SliceMapping(local, mapping.global_offsets))
    return ParameterLayout(
        name=name,
        global_shape=tuple(global_shape),
        local_shape=local_shape,
        mappings=tuple(mappings),
    )


def _assert_partition_is_marked(model: torch.nn.Module) -> None:
    """Assert that split weights are marked: without the mark one would be taken for a copy.

    Megatron-core marks weights only while it initializes them: build models with
    ``perform_initialization=True``, and with an ``init_method`` that does nothing to save the time.
    """
    splits = ("output_size", "input_size", "num_embeddings")
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and any(hasattr(module, f"{s}_per_partition") for s in splits):
            assert getattr(weight, "tensor_model_parallel", False), (
                f"{name}.weight is not marked as split over tensor-parallel ranks"
            )
