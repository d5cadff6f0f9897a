"""The specs that ``--spec`` can name, and the function that makes them."""

from typing import Literal

from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_untied.config import MemoryConfig, RotaryConfig
from megatron_untied.megatron_lm.layers import StandardLayer, StreamedLayer
from megatron_untied.megatron_lm.model_parts import Choices, PartsOfLatestModel


def untied_layer_spec(
    *,
    heads_per_chunk: int | Literal["all"] | None = None,
    cp_overlap: bool = True,
    memory: MemoryConfig | None = None,
    rotary: RotaryConfig | None = None,
) -> ModuleSpec:
    """A layer spec for megatron-core's GPTModel.

    Args:
        heads_per_chunk: query heads exchanged at a time, over all ranks that trade sequence for
            heads. None is one a rank, the least memory; "all" is one exchange.
        cp_overlap: exchange the next chunk while this one attends, for a second set of buffers.
        memory: what a step keeps, in streamed layers. None is the standard layer, under
            Megatron-LM's own recomputation.
        rotary: exact rotary tables of this rank's positions, for --position-embedding-type none.
            None rotates by the angles that Megatron-LM makes, by its flags.

    Raises:
        ValueError: for a choice that has no effect in a layer.
    """
    memory = memory or MemoryConfig()
    if memory.loss_chunk_size is not None:
        raise ValueError(
            f"loss_chunk_size {memory.loss_chunk_size} has no effect in a layer: the loss is "
            "Megatron-LM's own; leave it None."
        )
    choices = Choices(
        heads_per_chunk=heads_per_chunk, cp_overlap=cp_overlap, memory=memory, rotary=rotary
    )
    layer = StreamedLayer if choices.streamed else StandardLayer
    return ModuleSpec(module=layer, params={"model_parts": PartsOfLatestModel(choices)})


untied_spec = untied_layer_spec()
streamed_spec = untied_layer_spec(memory=MemoryConfig(recompute_granularity="full"))
