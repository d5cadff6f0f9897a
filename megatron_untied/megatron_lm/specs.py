"""The layer slot as Megatron-LM builds and calls it."""

from typing import Any, Literal

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_untied.config import MemoryConfig, RotaryConfig
from megatron_untied.megatron_lm.limits import check_arguments
from megatron_untied.megatron_lm.model_context import Choices, LatestModelContext, ModelContext
from megatron_untied.streaming.layer import UntiedTransformerLayer


class _MegatronLMLayer:
    """What a layer needs before it: its submodules from a config, its sequence from angles."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        *,
        model_context: LatestModelContext,
        pg_collection: ProcessGroupCollection,
        **slot_arguments: object,
    ):
        parts = model_context.of(config, pg_collection)
        super().__init__(
            config,
            parts.submodules,
            layer_number,
            pg_collection=pg_collection,
            **self.own_arguments(parts),
            **slot_arguments,
        )
        self.model_context = parts

    @staticmethod
    def own_arguments(parts: ModelContext) -> dict[str, Any]:
        """What the layer's constructor takes besides megatron-core's arguments."""
        return {}

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor | None = None,
        **slot_arguments: object,
    ) -> tuple[Tensor, Tensor | None]:
        """[n, b, m] -> [n, b, m], and no cross-attention context."""
        check_arguments(attention_mask=attention_mask, **slot_arguments)
        sequence = self.model_context.sequence(hidden_states, rotary_pos_emb)
        return super().forward(hidden_states, packed_seq_params=sequence)


class StandardLayer(_MegatronLMLayer, TransformerLayer):
    """Megatron-core's layer with our attention in its slot."""


class StreamedLayer(_MegatronLMLayer, UntiedTransformerLayer):
    """The streamed layer; see :class:`.UntiedTransformerLayer` for what it does to its input."""

    @staticmethod
    def own_arguments(parts: ModelContext) -> dict[str, Any]:
        """See :class:`_MegatronLMLayer`."""
        return {"streaming": parts.streaming}


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
    return ModuleSpec(module=layer, params={"model_context": LatestModelContext(choices)})


untied_spec = untied_layer_spec()
streamed_spec = untied_layer_spec(memory=MemoryConfig(recompute_granularity="full"))
