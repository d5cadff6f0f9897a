"""Layer specs, the adapters by which Megatron-LM builds and calls our layers, and what they share.

Megatron-LM imports a spec before there is a model, so the spec itself holds only options. The
objects that the layers of one model share are a :class:`ModelContext`, created when the first layer
is built.
"""

import weakref
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config as concentration_factor,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor

from megatron_untied.backends import choose_backend
from megatron_untied.config import MemoryConfig, RotaryConfig
from megatron_untied.context_parallel.kernels import choose_kernel
from megatron_untied.context_parallel.ring import Ring
from megatron_untied.context_parallel.self_attention import AttentionContext
from megatron_untied.context_parallel.sequence import SequenceInfo, SequenceLayout
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.megatron_lm.limits import check_arguments, check_config, comm_types
from megatron_untied.megatron_lm.zigzag import ZigzagReorder
from megatron_untied.model import layer_submodules, streaming_context
from megatron_untied.platform.device import current_device
from megatron_untied.rope import RotaryTable
from megatron_untied.streaming.host_arena import HostArena
from megatron_untied.streaming.layer import StreamedTransformerLayer

CHECKPOINT_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Names of our norms in Megatron-LM's distributed checkpoints: those of its own specs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOptions:
    """Arguments of :func:`untied_layer_spec`, described there."""

    heads_per_chunk: int | Literal["all"] | None
    cp_overlap: bool
    memory: MemoryConfig
    rotary: RotaryConfig | None
    streamed: bool
    """Layers recompute by themselves."""


@dataclass(eq=False, kw_only=True, slots=True)
class LatestModelContext:
    """The context of the model that is being built; all its layers have the same config object."""

    options: LayerOptions
    latest: "weakref.ref[ModelContext] | None" = None

    def of(self, config: TransformerConfig, groups: ProcessGroupCollection) -> "ModelContext":
        """The context of the model with this very ``config``."""
        context = None if self.latest is None else self.latest()
        if context is None or context.config is not config:
            context = ModelContext(self.options, config, groups)
            # Weak: the layers hold it, so it lives as long as the model and no longer.
            self.latest = weakref.ref(context)
        return context


class ModelContext:
    """Objects that the layers of one model share.

    Raises:
        ValueError: for settings of Megatron-LM that these layers do not support.
    """

    def __init__(
        self, options: LayerOptions, config: TransformerConfig, groups: ProcessGroupCollection
    ):
        check_config(config, streamed=options.streamed)
        self.config = config
        self.attention = attention_context(options, config, groups)
        backend = choose_backend(config.transformer_impl, config.normalization)
        submodules = layer_submodules(config, backend, self.attention, is_streamed=options.streamed)
        self.submodules: TransformerLayerSubmodules = replace(
            submodules, sharded_state_dict_keys_map=CHECKPOINT_NAMES
        )
        self.streaming = streaming_context(
            config.num_layers,
            options.memory,
            self.attention.workspace,
            HostArena.for_device(current_device(), options.memory),
        )
        # Under sequence parallelism hidden states are [n/t, b, m], and attention gathers them.
        self._gathered = groups.tp.size() if config.sequence_parallel else 1
        self._angles: Tensor | None = None
        self._cos_sin: tuple[Tensor, Tensor] | None = None

    def sequence(self, hidden_states: Tensor, angles: Tensor | None) -> SequenceInfo:
        """Positions of a micro-batch with hidden states [n, b, m] and Megatron-LM's rotary angles.

        Args:
            hidden_states: the layer's input; gives length, dtype and device.
            angles: fp32 [n, 1, 1, rot], or None where Megatron-LM does not rotate.

        Raises:
            ValueError: if both Megatron-LM and the spec rotate.
        """
        if self.attention.rotary is not None:
            if angles is not None:
                raise ValueError(
                    "the layer spec has a rotary table and Megatron-LM rotates too; give "
                    "--position-embedding-type none, or a spec without rotary."
                )
            return SequenceInfo()
        if angles is None:  # absolute positions or none: 0 of a head's dimensions rotate
            angles = hidden_states.new_empty(len(hidden_states) * self._gathered, 1, 1, 0)
        # GPTModel caches its angles, and recomputation passes them as another tensor of the same
        # memory. The reference held here keeps that memory from being reused for other angles.
        key = angles.data_ptr(), angles.shape
        if self._angles is None or key != (self._angles.data_ptr(), self._angles.shape):
            factor = concentration_factor(self.config)  # YaRN's; 1 without
            # The second half repeats the first.
            half = angles[..., : angles.shape[-1] // 2].float()
            self._cos_sin = half.cos().mul_(factor), half.sin().mul_(factor)  # [n, 1, 1, rot/2]
            self._angles = angles
        return SequenceInfo(cos_sin=self._cos_sin)


def attention_context(
    options: LayerOptions, config: TransformerConfig, groups: ProcessGroupCollection
) -> AttentionContext:
    """Objects that the attention modules share, for sequences split as in Megatron-LM."""
    p, workspace = groups.cp.size(), Workspace()
    ring = groups.cp if p > 1 and comm_types(config) == {"p2p"} else None
    # Megatron-LM counts the tokens before a query, we count the query too.
    window = None if config.window_size is None else config.window_size[0] + 1
    kernel = choose_kernel(
        config.attention_backend.name,
        current_device(),
        dtype=config.params_dtype,
        head_width=config.kv_channels,
        window=window,
    )
    return AttentionContext(
        # Megatron-LM always deals shards in zigzag order, as our ring does.
        layout=SequenceLayout(num_ulysses=1, num_ring=p, rank=groups.cp.rank()),
        ulysses=groups.cp if ring is None else None,
        ring=None if ring is None else Ring(ring),
        heads_per_chunk=options.heads_per_chunk or (1 if ring else p),
        overlap=options.cp_overlap,
        kernel=kernel if ring or p == 1 else ZigzagReorder(kernel, p, workspace),
        window=window,
        rotary=options.rotary and RotaryTable(options.rotary, config.kv_channels),
        workspace=workspace,
    )


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
        if self.streamed:  # Megatron-core's own layer takes no such argument
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
        # The one argument that megatron-core's layer hands to attention unread.
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
    return ModuleSpec(module=layer, params={"model_context": LatestModelContext(options=options)})


untied_spec = untied_layer_spec()
streamed_spec = untied_layer_spec(memory=MemoryConfig(recompute_granularity="full"))
