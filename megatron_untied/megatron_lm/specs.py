"""Layer specs, and the adapters by which Megatron-LM builds and calls our layers."""

from typing import ClassVar, Literal

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_untied.config import MemoryConfig, RotaryConfig
from megatron_untied.megatron_lm.limits import check_arguments
from megatron_untied.megatron_lm.model_context import LatestModelContext, LayerOptions
from megatron_untied.streaming.layer import StreamedTransformerLayer


class _MegatronLMLayer:
    """Mixin for a layer: submodules come from the model's context, positions from angles."""

    streamed: ClassVar[bool]

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        *,
        model_context: LatestModelContext,
        pg_collection: ProcessGroupCollection,
        **kwargs: object,
    ):
        context = model_context.of(config, pg_collection)
        if self.streamed:
            kwargs["streaming"] = context.streaming
        super().__init__(
            config, context.submodules, layer_number, pg_collection=pg_collection, **kwargs
        )
        self.model_context = context

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor | None = None,
        **unsupported_kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """[n, b, m] -> [n, b, m], and None for the context of cross-attention.

        Raises:
            ValueError: for an argument that our layers do not support.
        """
        check_arguments(attention_mask=attention_mask, **unsupported_kwargs)
        sequence = self.model_context.sequence(hidden_states, rotary_pos_emb)
        return super().forward(hidden_states, packed_seq_params=sequence)


class StandardLayer(_MegatronLMLayer, TransformerLayer):
    """Megatron-core's layer with our attention in its slot."""

    streamed = False


class StreamedLayer(_MegatronLMLayer, StreamedTransformerLayer):
    """The streamed layer; :class:`.StreamedTransformerLayer` overwrites its input."""

    streamed = True


def untied_layer_spec(
    *,
    heads_per_chunk: int | Literal["all"] | None = None,
    cp_overlap: bool = True,
    memory: MemoryConfig | None = None,
    rotary: RotaryConfig | None = None,
) -> ModuleSpec:
    """A layer spec for megatron-core's GPTModel.

    Args:
        heads_per_chunk: query heads per exchange, over all ranks of the all-to-all. None is one
            per rank, the least memory; "all" is one exchange.
        cp_overlap: exchange the next chunk while the current one attends, at the cost of a second
            set of buffers.
        memory: what streamed layers save. None is the standard layer, with Megatron-LM's own
            recomputation.
        rotary: exact rotary tables of this rank's positions, for --position-embedding-type none.
            None uses the angles that Megatron-LM computes by its flags.

    Raises:
        ValueError: for an option that has no effect in a layer.
    """
    memory = memory or MemoryConfig()
    if memory.loss_chunk_size is not None:
        raise ValueError(
            f"loss_chunk_size {memory.loss_chunk_size} has no effect in a layer: the loss is "
            "Megatron-LM's own; leave it None."
        )
    layer = StandardLayer if memory.recompute_granularity is None else StreamedLayer
    options = LayerOptions(
        heads_per_chunk=heads_per_chunk,
        cp_overlap=cp_overlap,
        memory=memory,
        rotary=rotary,
        streamed=layer.streamed,
    )
    return ModuleSpec(module=layer, params={"model_context": LatestModelContext(options)})


untied_spec = untied_layer_spec()
streamed_spec = untied_layer_spec(memory=MemoryConfig(recompute_granularity="full"))
