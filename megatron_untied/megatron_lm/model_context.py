"""What the layers of one model share, made when its first layer is built.

Megatron-LM imports a spec before there is a model, so the spec itself holds choices alone.
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
class Choices:
    """See :func:`.specs.untied_layer_spec`."""

    heads_per_chunk: int | Literal["all"] | None
    cp_overlap: bool
    memory: MemoryConfig
    rotary: RotaryConfig | None

    @property
    def streamed(self) -> bool:
        """Whether layers recompute by themselves."""
        return self.memory.recompute_granularity is not None


class LatestModelContext:
    """The parts of the model that is being built; its layers have one config between them."""

    def __init__(self, choices: Choices):
        self.choices = choices
        self._latest: weakref.ref[ModelContext] | None = None

    def of(self, config: TransformerConfig, groups: ProcessGroupCollection) -> "ModelContext":
        """Those of the model with this very ``config``."""
        parts = self._latest and self._latest()
        if parts is None or parts.config is not config:
            parts = ModelContext(self.choices, config, groups)
            self._latest = weakref.ref(parts)  # layers hold them: they live as long as the model
        return parts


class ModelContext:
    """What the layers of one model share.

    Raises:
        ValueError: for what Megatron-LM's configuration asks and these layers do not do.
    """

    def __init__(self, choices: Choices, config: TransformerConfig, groups: ProcessGroupCollection):
        check_config(config, streamed=choices.streamed)
        self.config = config
        self.attention = attention_context(choices, config, groups)
        backend = choose_backend(config.transformer_impl, config.normalization)
        submodules = layer_submodules(config, backend, self.attention)
        self.submodules: TransformerLayerSubmodules = replace(
            submodules, sharded_state_dict_keys_map=CHECKPOINT_NAMES
        )
        self.streaming = streaming_context(
            config.num_layers,
            choices.memory,
            self.attention.workspace,
            HostArena.for_device(current_device()),
        )
        self._gathered = groups.tp.size() if config.sequence_parallel else 1
        self._angles: Tensor | None = None
        self._cos_sin: tuple[Tensor, Tensor] | None = None

    def sequence(self, hidden_states: Tensor, angles: Tensor | None) -> SequenceInfo:
        """What attention is told of a micro-batch that Megatron-LM rotates by ``angles``.

        Raises:
            ValueError: if both Megatron-LM and the spec rotate.
        """
        if self.attention.rotary is None:
            if angles is None:  # absolute positions or none: nothing of a head is rotated
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
        # GPTModel keeps its angles. Recomputation hands them over as another tensor of the same
        # memory, which the reference held here keeps from being used again.
        key = angles.data_ptr(), angles.shape
        if self._angles is None or key != (self._angles.data_ptr(), self._angles.shape):
            factor = concentration_factor(self.config)  # YaRN's; 1 without
            half = angles[..., : angles.shape[-1] // 2].float()
            self._cos_sin = half.cos().mul_(factor), half.sin().mul_(factor)
            self._angles = angles
        return self._cos_sin


def attention_context(
    choices: Choices, config: TransformerConfig, groups: ProcessGroupCollection
) -> AttentionContext:
    """What the attention modules share, for sequences cut as Megatron-LM cuts them."""
    p, workspace = groups.cp.size(), Workspace()
    ring = groups.cp if p > 1 and comm_types(config) == {"p2p"} else None
    window = None if config.window_size is None else config.window_size[0] + 1
    kernel = choose_kernel(
        config.attention_backend.name,
        current_device(),
        dtype=config.params_dtype,
        head_width=config.kv_channels,
        window=window,
    )
    return AttentionContext(
        # Its shards are those of a ring, whatever the ranks then trade.
        layout=SequenceLayout(num_ulysses=1, num_ring=p, rank=groups.cp.rank()),
        ulysses=groups.cp if ring is None else None,
        ring=ring and Ring(ring),
        heads_per_chunk=choices.heads_per_chunk or (1 if ring else p),
        overlap=choices.cp_overlap,
        kernel=kernel if ring or p == 1 else ZigzagReorder(kernel, p, workspace),
        window=window,
        rotary=choices.rotary and RotaryTable(choices.rotary, config.kv_channels),
        workspace=workspace,
    )
