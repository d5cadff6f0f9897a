"""The model: megatron-core's GPTModel with our attention, rotary positions and loss.

The layer is handed to megatron-core as a ``ModuleSpec``; nothing in it is patched.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from megatron_untied.backends import Backend, choose_backend
from megatron_untied.config import MemoryConfig, ModelConfig, ParallelConfig, Precision
from megatron_untied.config.run import AttentionBackend, TransformerImpl
from megatron_untied.context_parallel.kernels import AttentionKernel, choose_kernel
from megatron_untied.context_parallel.ring import Ring
from megatron_untied.context_parallel.self_attention import (
    AttentionContext,
    UntiedUlyssesSelfAttention,
)
from megatron_untied.context_parallel.sequence import SequenceInfo, SequenceLayout
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.loss.chunked_cross_entropy import chunked_cross_entropy
from megatron_untied.norms import deferred
from megatron_untied.phases import MemoryCategory, Phase, allocating
from megatron_untied.platform.device import current_device
from megatron_untied.rope import RotaryTable
from megatron_untied.step_progress import StepProgress
from megatron_untied.streaming.activation_policy import ActivationPolicy
from megatron_untied.streaming.activation_store import ActivationStore
from megatron_untied.streaming.host_arena import HostArena
from megatron_untied.streaming.layer import StreamingContext, UntiedTransformerLayer


class UntiedGPTModel(GPTModel):
    """A GPTModel that turns hidden states into a loss without ever holding all logits."""

    def __init__(
        self,
        *args,
        logical_vocab_size: int,
        loss_chunk_size: int | None,
        attention_context: AttentionContext,
        **kwargs,
    ):
        super().__init__(*args, position_embedding_type="none", **kwargs)
        self.attention_context = attention_context
        self.loss = Loss(
            functools.partial(
                chunked_cross_entropy,
                vocab_size=logical_vocab_size,
                chunk_size=loss_chunk_size,
                tp_group=self.pg_collection.tp,
                sequence_parallel=self.config.sequence_parallel,
            ),
            attention_context.progress,
        )

    def describe(self) -> str:
        """Which code was chosen for it, in a few words."""
        return f"attention kernel {self.attention_context.kernel.name}"

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        token_weights: Tensor | None = None,
        sequence: SequenceInfo | None = None,
    ) -> Tensor:
        """The weighted sum of this rank's token losses, an fp32 scalar; without labels, logits.

        Args:
            tokens: int64 [b, n], this rank's shard.
            labels: int64 [b, n], the token that follows each.
            token_weights: fp32 [b, n]: 1 / (trained-on tokens of the global batch), or 0 where a
                token is not trained on. Losses and gradients then sum over all ranks.
            sequence: positions and documents of these sequences, if they are not plain.

        Returns:
            The loss, the same on every tensor-parallel rank; or logits [b, n, padded v / t].
        """
        return super().forward(
            tokens, None, None, labels=labels, loss_mask=token_weights, packed_seq_params=sequence
        )

    def _preprocess(self, *args, **kwargs) -> tuple:
        with allocating(MemoryCategory.RESIDUAL):  # the embedding's output
            return super()._preprocess(*args, **kwargs)

    def _postprocess(self, hidden_states, labels=None, loss_mask=None, **kwargs) -> Tensor:
        if labels is None:
            if isinstance(self, FSDPModule) and torch.is_grad_enabled():
                raise ValueError(
                    "logits of a fully sharded model have no backward: its output matrix is "
                    "gathered in forward only. Ask for them under torch.no_grad()."
                )
            normalized = self.decoder.final_layernorm.normalize(hidden_states)
            return super()._postprocess(normalized, labels=None, **kwargs)
        norm = self.decoder.final_layernorm
        # The loss needs none of attention's buffers, and their memory.
        self.attention_context.workspace.release()
        return self.loss(hidden_states, self._output_matrix, labels, loss_mask, norm)

    def _output_matrix(self) -> Tensor:
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight


class Loss(nn.Module):
    """A loss as a module, so that full sharding can gather the output matrix for the call."""

    def __init__(self, cross_entropy: Callable[..., Tensor], progress: StepProgress):
        super().__init__()
        self.cross_entropy, self.progress = cross_entropy, progress

    def forward(
        self,
        hidden: Tensor,
        matrix: Callable[[], Tensor],
        labels: Tensor,
        token_weights: Tensor,
        norm: nn.Module,
    ) -> Tensor:
        """See :func:`chunked_cross_entropy`. ``matrix`` is asked for when it has been gathered."""
        with self.progress.phase(Phase.LOSS):
            return self.cross_entropy(hidden, matrix(), labels, token_weights, norm=norm)


def build_model(
    model: ModelConfig,
    parallel: ParallelConfig,
    memory: MemoryConfig,
    precision: Precision,
    groups: ProcessGroupCollection,
    *,
    kernel: AttentionKernel | None = None,
    arena: HostArena | None = None,
    transformer_impl: TransformerImpl = "local",
    progress: StepProgress | None = None,
) -> UntiedGPTModel:
    """The model of this rank, with uninitialized weights, on the current default device.

    ``kernel`` computes its attention and ``arena`` is where its layers keep what goes to the host;
    None takes what is right for this machine. The model states its phases to ``progress``, None is
    for a model that is trained by another loop.
    """
    if kernel is None:
        kernel = attention_kernel(model, precision)
    if arena is None:
        arena = HostArena.for_device(current_device())
    backend = choose_backend(transformer_impl, model.normalization)
    config = transformer_config(model, parallel, precision, transformer_impl)
    context = attention_context(model, parallel, groups, kernel, progress)
    layer = layer_spec(config, backend, context, memory, arena)
    return UntiedGPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer] * model.num_layers, layer_norm=deferred(backend.norm)
        ),
        vocab_size=model.padded_vocab_size(parallel.tensor_model_parallel_size),
        logical_vocab_size=model.vocab_size,
        max_sequence_length=model.max_position_embeddings,
        loss_chunk_size=memory.loss_chunk_size,
        attention_context=context,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        pg_collection=groups,
    )


def attention_kernel(
    model: ModelConfig,
    precision: Precision,
    backend: AttentionBackend = "auto",
    *,
    documents: bool = False,
) -> AttentionKernel:
    """The kernel of ``backend`` for a model on this rank's device; see :func:`choose_kernel`."""
    return choose_kernel(
        backend,
        current_device(),
        dtype=precision.params_dtype,
        head_width=model.kv_channels,
        window=model.window_size,
        documents=documents,
    )


def attention_context(
    model: ModelConfig,
    parallel: ParallelConfig,
    groups: ProcessGroupCollection,
    kernel: AttentionKernel,
    progress: StepProgress | None = None,
) -> AttentionContext:
    """What the attention modules of one model share: layout, rotary table, kernel, buffers."""
    ulysses, ring = context_parallel_groups(parallel, groups)
    assert groups.cp.size() == parallel.context_parallel_size
    return AttentionContext(
        layout=SequenceLayout.of(parallel, rank=groups.cp.rank()),
        ulysses=ulysses,
        ring=ring and Ring(ring),
        heads_per_chunk=parallel.heads_per_chunk,
        overlap=parallel.cp_overlap,
        kernel=kernel,
        window=model.window_size,
        rotary=RotaryTable(model.rotary, model.kv_channels),
        workspace=Workspace(),
        progress=progress or StepProgress(),
    )


def context_parallel_groups(
    parallel: ParallelConfig, groups: ProcessGroupCollection
) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """The ranks that trade sequence for heads, and those of the ring; None is one rank alone."""
    num_ulysses, num_ring = parallel.num_ulysses_and_ring
    if num_ring == 1:
        return groups.cp, None
    if num_ulysses == 1:
        return None, groups.cp
    ulysses, ring = groups.hcp
    return ulysses, ring


def layer_spec(
    config: TransformerConfig,
    backend: Backend,
    context: AttentionContext,
    memory: MemoryConfig,
    arena: HostArena,
) -> ModuleSpec:
    """The streamed layer if anything is to be recomputed, else megatron-core's standard one."""
    submodules = layer_submodules(config, backend, context)
    if memory.recompute_granularity is None:
        return ModuleSpec(module=TransformerLayer, submodules=submodules)
    return ModuleSpec(
        module=UntiedTransformerLayer,
        params={
            "streaming": streaming_context(config.num_layers, memory, context.workspace, arena)
        },
        submodules=submodules,
    )


def streaming_context(
    num_layers: int, memory: MemoryConfig, workspace: Workspace, arena: HostArena
) -> StreamingContext:
    """What the streamed layers of one model share: tile size, and what is kept where."""
    store = ActivationStore(
        policy=ActivationPolicy.of(memory, num_layers), arena=arena, workspace=workspace
    )
    return StreamingContext(tile_size=memory.sequence_tile_size, store=store)


def layer_submodules(
    config: TransformerConfig, backend: Backend, context: AttentionContext
) -> TransformerLayerSubmodules:
    """Megatron-core's standard layer with our self-attention in its slot."""
    head_norm = backend.norm if config.qk_layernorm else None
    column, row = backend.column_parallel_linear, backend.row_parallel_linear
    return TransformerLayerSubmodules(
        input_layernorm=backend.norm,
        self_attention=ModuleSpec(
            module=UntiedUlyssesSelfAttention,
            params={"attn_mask_type": AttnMaskType.causal, "context": context},
            submodules=SelfAttentionSubmodules(
                linear_qkv=column,
                core_attention=NoCoreAttention,
                linear_proj=row,
                q_layernorm=head_norm,
                k_layernorm=head_norm,
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=backend.norm,
        mlp=mlp_slot(config, MLPSubmodules(linear_fc1=column, linear_fc2=row)),
        mlp_bda=get_bias_dropout_add,
    )


def mlp_slot(
    config: TransformerConfig, submodules: MLPSubmodules
) -> ModuleSpec | Callable[..., MLP]:
    """Megatron-core's MLP, as the slot of the installed megatron-core wants it."""
    width = {"ffn_hidden_size": config.ffn_hidden_size}
    if hasattr(MLP, "as_mlp_submodule"):  # after 0.16 the slot takes a builder
        return functools.partial(MLP.as_mlp_submodule, submodules=submodules, **width)
    return ModuleSpec(module=MLP, params=width, submodules=submodules)


class NoCoreAttention(nn.Module):
    """Fills a slot that megatron-core's SelfAttention insists on; ours attends elsewhere."""

    def __init__(self, **slot_arguments: object):
        super().__init__()


def transformer_config(
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: Precision,
    transformer_impl: TransformerImpl = "local",
) -> TransformerConfig:
    """Megatron-core's configuration of the same model."""
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        gated_linear_unit=model.swiglu,
        activation_func=F.silu if model.swiglu else F.gelu,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        context_parallel_size=parallel.context_parallel_size,
        cp_comm_type=parallel.cp_comm_type,
        params_dtype=precision.params_dtype,
        bf16=precision.bf16,
        # Losses are divided by the global token count before backward: gradients only sum.
        calculate_per_token_loss=True,
        # Weights are drawn by initialize_weights. The initializers still have to run: they are
        # what puts the tensor-parallel attributes on parameters.
        # For megatron-core's own layers True means: on the default device, whatever it is.
        use_cpu_initialization=transformer_impl == "local",
        init_method=_leave_uninitialized,
        output_layer_init_method=_leave_uninitialized,
        embedding_init_method=_leave_uninitialized,
        cuda_graph_scope=None,
        transformer_impl=transformer_impl,
    )


def _leave_uninitialized(weight: Tensor) -> Tensor:
    return weight
