"""Objects that the layers of one model share, created when its first layer is built.

Megatron-LM imports a spec before there is a model, so the spec itself holds only options.
"""

import weakref
from dataclasses import dataclass, replace
from typing import Literal

from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config as concentration_factor,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor

from megatron_untied.backends import choose_backend
from megatron_untied.config import MemoryConfig, RotaryConfig
from megatron_untied.context_parallel.kernels import choose_kernel
from megatron_untied.context_parallel.ring import Ring
from megatron_untied.context_parallel.self_attention import AttentionContext
from megatron_untied.context_parallel.sequence import SequenceInfo, SequenceLayout
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.megatron_lm.limits import check_config, comm_types
from megatron_untied.megatron_lm.zigzag import ZigzagReorder
from megatron_untied.model import layer_submodules, streaming_context
from megatron_untied.platform.device import current_device
from megatron_untied.rope import RotaryTable
from megatron_untied.streaming.host_arena import HostArena

CHECKPOINT_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Names of our norms in Megatron-LM's distributed checkpoints: those of its own specs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOptions:
    """Arguments of :func:`.specs.untied_layer_spec`, described there."""

    heads_per_chunk: int | Literal["all"] | None
    cp_overlap: bool
    memory: MemoryConfig
    rotary: RotaryConfig | None
    streamed: bool
    """Layers recompute by themselves."""


class LatestModelContext:
    """The context of the model that is being built; all its layers have the same config object."""

    def __init__(self, options: LayerOptions):
        self.options = options
        self._latest: weakref.ref[ModelContext] | None = None

    def of(self, config: TransformerConfig, groups: ProcessGroupCollection) -> "ModelContext":
        """The context of the model with this very ``config``."""
        context = None if self._latest is None else self._latest()
        if context is None or context.config is not config:
            context = ModelContext(self.options, config, groups)
            # Weak: the layers hold it, so it lives as long as the model and no longer.
            self._latest = weakref.ref(context)
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
        submodules = layer_submodules(config, backend, self.attention)
        self.submodules: TransformerLayerSubmodules = replace(
            submodules, sharded_state_dict_keys_map=CHECKPOINT_NAMES
        )
        self.streaming = streaming_context(
            config.num_layers,
            options.memory,
            self.attention.workspace,
            HostArena.for_device(current_device()),
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
        if self.attention.rotary is None:
            if angles is None:  # absolute positions or none: 0 of a head's dimensions rotate
                angles = hidden_states.new_empty(len(hidden_states) * self._gathered, 1, 1, 0)
            return SequenceInfo(cos_sin=self._rotation(angles))
        if angles is not None:
            raise ValueError(
                "the layer spec has a rotary table and Megatron-LM rotates too; give "
                "--position-embedding-type none, or a spec without rotary."
            )
        return SequenceInfo()

    def _rotation(self, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin of angles [n, 1, 1, rot]: fp32 [n, 1, 1, rot/2]; remembers the last ones."""
        # GPTModel caches its angles, and recomputation passes them as another tensor of the same
        # memory. The reference held here keeps that memory from being reused for other angles.
        key = angles.data_ptr(), angles.shape
        if self._angles is None or key != (self._angles.data_ptr(), self._angles.shape):
            factor = concentration_factor(self.config)  # YaRN's; 1 without
            # The second half repeats the first.
            half = angles[..., : angles.shape[-1] // 2].float()
            self._cos_sin = half.cos().mul_(factor), half.sin().mul_(factor)
            self._angles = angles
        return self._cos_sin


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
