"""The layer slot as Megatron-LM builds and calls it."""

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_untied.megatron_lm.limits import check_arguments
from megatron_untied.megatron_lm.model_parts import ModelParts, PartsOfLatestModel
from megatron_untied.streaming.layer import UntiedTransformerLayer


class _MegatronLMLayer:
    """What a layer needs before it: its submodules from a config, its sequence from angles."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        *,
        model_parts: PartsOfLatestModel,
        pg_collection: ProcessGroupCollection,
        **slot_arguments: object,
    ):
        parts = model_parts.of(config, pg_collection)
        super().__init__(
            config,
            parts.submodules,
            layer_number,
            pg_collection=pg_collection,
            **self.own_arguments(parts),
            **slot_arguments,
        )
        self.model_parts = parts

    @staticmethod
    def own_arguments(parts: ModelParts) -> dict[str, Any]:
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
        sequence = self.model_parts.sequence(hidden_states, rotary_pos_emb)
        return super().forward(hidden_states, packed_seq_params=sequence)


class StandardLayer(_MegatronLMLayer, TransformerLayer):
    """Megatron-core's layer with our attention in its slot."""


class StreamedLayer(_MegatronLMLayer, UntiedTransformerLayer):
    """The streamed layer; see :class:`.UntiedTransformerLayer` for what it does to its input."""

    @staticmethod
    def own_arguments(parts: ModelParts) -> dict[str, Any]:
        """See :class:`_MegatronLMLayer`."""
        return {"streaming": parts.streaming}
