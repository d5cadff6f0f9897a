"""Builds the model from configurations: megatron-core's GPTModel with our attention and layer.

The layer is passed to megatron-core as a ``ModuleSpec``; nothing in it is patched. What has to
bend megatron-core's classes is in :mod:`megatron_untied.gpt_model`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
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
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_untied.backends import Backend, choose_backend
from megatron_untied.config import MemoryConfig, ModelConfig, ParallelConfig, Precision
from megatron_untied.config.parameters import (
    TRAIN_ALL,
    AdaptationConfig,
    first_layer_with_backward,
    qkv_rows,
)
from megatron_untied.config.run import RunConfig, TransformerImpl
from megatron_untied.context_parallel.head_schedule import head_schedule
from megatron_untied.context_parallel.kernels import AttentionKernel, choose_kernel
from megatron_untied.context_parallel.kernels.split_calls import Shape
from megatron_untied.context_parallel.ring import Ring
from megatron_untied.context_parallel.self_attention import (
    AttentionContext,
    UntiedUlyssesSelfAttention,
)
from megatron_untied.context_parallel.sequence import SequenceLayout
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.gpt_model import ChunkedLossGPTModel, NoCoreAttention, deferred
from megatron_untied.lora import adapted
from megatron_untied.platform.device import current_device
from megatron_untied.rope import RotaryTable
from megatron_untied.step_progress import StepProgress
from megatron_untied.streaming.activation_policy import ActivationPolicy
from megatron_untied.streaming.activation_store import ActivationStore
from megatron_untied.streaming.host_arena import HostArena
from megatron_untied.streaming.layer import StreamedTransformerLayer, StreamingContext
from megatron_untied.streaming.projections import UNREAD


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """Objects of this process that a model uses; None is the right one for this machine."""

    kernel: AttentionKernel | None = None
    """Computes attention."""
    arena: HostArena | None = None
    """Where streamed layers store what is offloaded to the host, and on to disks."""
    progress: StepProgress | None = None
    """Receives the phases of a step; None for a model that another training loop runs."""


def build_model(
    model: ModelConfig,
    parallel: ParallelConfig,
    memory: MemoryConfig,
    precision: Precision,
    groups: ProcessGroupCollection,
    *,
    runtime: Runtime | None = None,
    transformer_impl: TransformerImpl = "local",
    adaptation: AdaptationConfig = TRAIN_ALL,
) -> ChunkedLossGPTModel:
    """The model of this rank, with uninitialized weights, on the current default device.

    Parameters that ``adaptation`` does not train need no gradient.
    """
    runtime = runtime or Runtime()
    kernel = runtime.kernel or choose_kernel(
        "auto",
        current_device(),
        dtype=precision.params_dtype,
        head_width=model.kv_channels,
        window=model.window_size,
    )
    arena = runtime.arena or HostArena.for_device(current_device(), memory)
    if (progress := runtime.progress) is not None:
        arena.engine.waits.phase = lambda: progress.current_phase
    backend = choose_backend(transformer_impl, model.normalization)
    config = transformer_config(model, parallel, precision, transformer_impl)
    context = attention_context(model, parallel, groups, kernel, runtime.progress)
    layer = layer_spec(
        config,
        backend,
        context,
        memory,
        arena,
        ends_on_host=True,
        adaptation=adaptation,
        first_with_backward=first_layer_with_backward(model, adaptation),
    )
    built = ChunkedLossGPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            # One spec for all layers: they share the workspace and the store in its params.
            layer_specs=[layer] * model.num_layers,
            layer_norm=deferred(backend.norm),
        ),
        vocab_size=model.padded_vocab_size(parallel.tensor_model_parallel_size),
        logical_vocab_size=model.vocab_size,
        max_sequence_length=model.max_position_embeddings,
        loss_chunk_size=memory.loss_chunk_size,
        attention_context=context,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        pg_collection=groups,
    )
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(adaptation.trains(name))
    return built


def build_run_model(
    config: RunConfig, groups: ProcessGroupCollection, progress: StepProgress
) -> ChunkedLossGPTModel:
    """The model of the run ``config``, which records its phases in ``progress``."""
    return build_model(
        config.model,
        config.parallel,
        config.memory,
        config.precision,
        groups,
        runtime=Runtime(kernel=attention_kernel(config), progress=progress),
        transformer_impl=config.transformer_impl,
        adaptation=config.adaptation,
    )


def attention_kernel(config: RunConfig) -> AttentionKernel:
    """The kernel of ``config`` on this rank's device; see :func:`choose_kernel`.

    A kernel that cannot index the run's sequences is passed over here, before anything is
    allocated.
    """
    model, parallel, batch = config.model, config.parallel, config.batch
    num_ulysses, num_ring = parallel.num_ulysses_and_ring
    num_tensor = parallel.tensor_model_parallel_size
    schedule = head_schedule(
        model.num_attention_heads // num_tensor,
        model.num_query_groups // num_tensor,
        num_ulysses,
        parallel.heads_per_chunk,
    )
    # A ring attends to blocks of at most its rank's rows.
    rows, b = batch.seq_length // num_ring, batch.micro_batch_size
    return choose_kernel(
        config.attention_backend,
        current_device(),
        dtype=config.precision.params_dtype,
        head_width=model.kv_channels,
        window=model.window_size,
        documents=config.data.dataloader_inter_document_masking,
        shapes=[
            Shape(num_queries=rows, num_keys=rows, b=b, h=h, g=g, d=model.kv_channels)
            for h, g in sorted(schedule.heads_of_calls)
        ],
    )


def enter_stage(model: ChunkedLossGPTModel, config: RunConfig, kernel: AttentionKernel) -> None:
    """Make a live ``model`` that of another stage of the run, which is ``config`` now.

    Its rotary embedding, heads per exchange and kernel may be others. Buffers on the device and on
    the host were sized by the old sequence length: they are freed, and made by the next step.
    """
    context = replace(
        model.attention_context,
        heads_per_chunk=config.parallel.heads_per_chunk,
        kernel=kernel,
        rotary=RotaryTable(config.model.rotary, config.model.kv_channels),
    )
    model.attention_context = context
    for layer in model.decoder.layers:
        layer.self_attention.use(context)
        if isinstance(layer, StreamedTransformerLayer):
            layer.progress = layer.self_attention.ulysses.progress
    context.workspace.release()
    if model.store is not None:
        model.store.arena.trim()


def attention_context(
    model: ModelConfig,
    parallel: ParallelConfig,
    groups: ProcessGroupCollection,
    kernel: AttentionKernel,
    progress: StepProgress | None = None,
) -> AttentionContext:
    """The objects that all attention modules of one model share."""
    ulysses, ring = context_parallel_groups(parallel, groups)
    assert groups.cp.size() == parallel.context_parallel_size
    return AttentionContext(
        layout=SequenceLayout.of(parallel, rank=groups.cp.rank()),
        ulysses=ulysses,
        ring=None if ring is None else Ring(ring),
        heads_per_chunk=parallel.heads_per_chunk,
        overlap=parallel.cp_overlap,
        kernel=kernel,
        window=model.window_size,
        rotary=RotaryTable(model.rotary, model.kv_channels),  # one table serves all layers
        workspace=Workspace(),  # so do the buffers: layers run one after the other
        progress=progress or StepProgress(),
    )


def context_parallel_groups(
    parallel: ParallelConfig, groups: ProcessGroupCollection
) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """The groups of the all-to-all and of the ring; None for a group of one rank."""
    num_ulysses, num_ring = parallel.num_ulysses_and_ring
    if num_ring == 1:
        return groups.cp, None
    if num_ulysses == 1:
        return None, groups.cp
    ulysses, ring = groups.hcp  # in the order of --hierarchical-context-parallel-sizes
    return ulysses, ring


def layer_spec(
    config: TransformerConfig,
    backend: Backend,
    context: AttentionContext,
    memory: MemoryConfig,
    arena: HostArena,
    *,
    ends_on_host: bool = False,
    adaptation: AdaptationConfig = TRAIN_ALL,
    first_with_backward: int = 0,
) -> ModuleSpec:
    """The streamed layer if layers recompute, else megatron-core's standard one."""
    is_streamed = memory.recompute_granularity is not None
    submodules = layer_submodules(config, backend, context, adaptation, is_streamed=is_streamed)
    if not is_streamed:
        return ModuleSpec(module=TransformerLayer, submodules=submodules)
    streaming = streaming_context(
        config.num_layers,
        memory,
        context.workspace,
        arena,
        ends_on_host=ends_on_host,
        first_with_backward=first_with_backward,
    )
    return ModuleSpec(
        module=StreamedTransformerLayer, params={"streaming": streaming}, submodules=submodules
    )


def streaming_context(
    num_layers: int,
    memory: MemoryConfig,
    workspace: Workspace,
    arena: HostArena,
    *,
    ends_on_host: bool = False,
    first_with_backward: int = 0,
) -> StreamingContext:
    """The objects that all streamed layers of one model share; see its fields."""
    policy = ActivationPolicy.of(memory, num_layers, first_with_backward)
    store = ActivationStore(policy=policy, arena=arena, workspace=workspace)
    return StreamingContext(
        tile_size=memory.sequence_tile_size, store=store, ends_on_host=ends_on_host
    )


def layer_submodules(
    config: TransformerConfig,
    backend: Backend,
    context: AttentionContext,
    adaptation: AdaptationConfig = TRAIN_ALL,
    *,
    is_streamed: bool = False,
) -> TransformerLayerSubmodules:
    """Megatron-core's standard layer with our self-attention in its slot.

    Its linear layers have the adapters of ``adaptation``.
    """
    head_norm = backend.norm if config.qk_layernorm else None
    column, row = backend.column_parallel_linear, backend.row_parallel_linear
    m, t = config.hidden_size, config.tensor_model_parallel_size
    f, h, g = (
        size // t
        for size in (config.ffn_hidden_size, config.num_attention_heads, config.num_query_groups)
    )
    # On this rank: rows of the fused matrices, and all of the others.
    up = {"gate_proj": [range(f)], "up_proj": [range(f, 2 * f)]}
    up = up if config.gated_linear_unit else {"up_proj": [range(f)]}
    fc1 = adapted(column, up, adaptation)
    fc2 = adapted(row, {"down_proj": [range(m)]}, adaptation)
    qkv = adapted(column, qkv_rows(h, g, config.kv_channels), adaptation)
    # Adapters add to what a layer returns; norms of queries and keys read it in backward too.
    if is_streamed and fc2 is row:
        fc2 = UNREAD.get(row, row)
    if is_streamed and qkv is column and head_norm is None:
        qkv = UNREAD.get(column, column)
    return TransformerLayerSubmodules(
        input_layernorm=backend.norm,
        self_attention=ModuleSpec(
            module=UntiedUlyssesSelfAttention,
            params={"attn_mask_type": AttnMaskType.causal, "context": context},
            submodules=SelfAttentionSubmodules(
                linear_qkv=qkv,
                core_attention=NoCoreAttention,
                linear_proj=adapted(row, {"o_proj": [range(m)]}, adaptation),
                q_layernorm=head_norm,
                k_layernorm=head_norm,
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=backend.norm,
        mlp=mlp_slot(config, MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2)),
        mlp_bda=get_bias_dropout_add,
    )


def mlp_slot(
    config: TransformerConfig, submodules: MLPSubmodules
) -> ModuleSpec | Callable[..., MLP]:
    """Megatron-core's MLP, in the form that the layer's slot of the installed version takes."""
    width = {"ffn_hidden_size": config.ffn_hidden_size}
    # After 0.16 the slot takes a builder; the spec can go when the pin has moved past it.
    if hasattr(MLP, "as_mlp_submodule"):
        return functools.partial(MLP.as_mlp_submodule, submodules=submodules, **width)
    return ModuleSpec(module=MLP, params=width, submodules=submodules)


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
        hidden_dropout=0.0,  # recomputation replays no random numbers
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        context_parallel_size=parallel.context_parallel_size,
        cp_comm_type=parallel.cp_comm_type,
        params_dtype=precision.params_dtype,
        bf16=precision.bf16,
        # Losses are divided by the global token count before backward, so gradients are summed.
        calculate_per_token_loss=True,
        # initialize_weights draws the weights. The initializers still have to run, since they put
        # the tensor-parallel attributes on parameters.
        # For megatron-core's own layers True means the default device, which may be a GPU.
        use_cpu_initialization=transformer_impl == "local",
        init_method=_leave_uninitialized,
        output_layer_init_method=_leave_uninitialized,
        embedding_init_method=_leave_uninitialized,
        cuda_graph_scope=None,  # the default warns of its own deprecation
        transformer_impl=transformer_impl,
    )


def _leave_uninitialized(weight: Tensor) -> Tensor:
    return weight
