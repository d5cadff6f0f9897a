"""The tiny model with megatron-core's optimizer, at any split, for tests of its state."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megatron_untied.checkpoint import CheckpointState
from megatron_untied.config import ModelConfig, Precision
from megatron_untied.sharding.initialize_weights import initialize_weights
from megatron_untied.sharding.parameter_layout import parameter_layouts
from megatron_untied.sharding.zero1 import OptimizerShards
from tests.support.tiny_model import tiny
from tests.support.whole_model import part_of

MODEL = tiny(add_qkv_bias=True, qk_layernorm=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How a small run is spread over ranks; data parallelism takes what is left."""

    tensor: int = 1
    context: int = 1
    distributed_optimizer: bool = True
    bf16: bool = False


@dataclass(frozen=True, slots=True)
class SmallRun:
    """A run whose gradients are made up from the iteration and the parameter's name."""

    model: GPTModel
    wrapped: DistributedDataParallel
    optimizer: MegatronOptimizer
    state: CheckpointState

    def train(self, iterations: range) -> None:
        """One optimizer step an iteration; the same numbers at every split."""
        for iteration in iterations:
            self.wrapped.zero_grad_buffer()
            for name, parameter in self.model.named_parameters():
                for part in self.state.layouts[name].global_slices(parameter.main_grad):
                    shape = self.state.layouts[name].global_shape
                    part.tensor.copy_(part_of(made_up_gradient(name, shape, iteration), part))
            self.optimizer.step()
            self.state.scheduler.step(increment=4)


def made_up_gradient(name: str, shape: tuple[int, ...], iteration: int) -> torch.Tensor:
    """The global gradient of a parameter in an iteration."""
    generator = torch.Generator().manual_seed(iteration * 1000 + len(name))
    return torch.randn(shape, generator=generator)


def small_run(
    split: Split, model_config: ModelConfig = MODEL, seed: int = 7, dropout: float = 0.0
) -> SmallRun:
    """Build it; collective over all ranks."""
    groups = make_groups(split)
    model = build_model(split, model_config, groups, dropout)
    initialize_weights(model, model_config, seed, groups.tp)
    wrapped = DistributedDataParallel(
        config=model.config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=split.distributed_optimizer,
            overlap_grad_reduce=True,  # else there is one bucket, whatever its size
            bucket_size=15000,  # several buckets, so that parameters are cut in many places
        ),
        module=model,
        pg_collection=groups,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=1e-3,
            weight_decay=0.1,
            clip_grad=0.0,
            bf16=split.bf16,
            use_distributed_optimizer=split.distributed_optimizer,
        ),
        [wrapped],
        use_gloo_process_groups=False,
        pg_collection=groups,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=8,
        lr_decay_steps=40,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=40,
        wd_incr_style="constant",
    )
    layouts = parameter_layouts(
        model, model_config, tp_rank=groups.tp.rank(), tp_size=groups.tp.size()
    )
    state = CheckpointState(
        model_config=model_config,
        layouts=layouts,
        shards=OptimizerShards(optimizer, model),
        scheduler=scheduler,
        groups=groups,
    )
    return SmallRun(model, wrapped, optimizer, state)


def make_groups(split: Split, seed: int = 7) -> ProcessGroupCollection:
    """Process groups of a split, and seeded generators; collective over all ranks."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=split.tensor,
        context_parallel_size=split.context,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return ProcessGroupCollection.use_mpu_process_groups()


def build_model(
    split: Split, model: ModelConfig, groups: ProcessGroupCollection, dropout: float = 0.0
) -> GPTModel:
    """megatron-core's own GPT; its attention knows no context parallelism, so it is not told."""
    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        gated_linear_unit=model.swiglu,
        activation_func=F.silu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        normalization=model.normalization,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        qk_layernorm=model.qk_layernorm,
        persist_layer_norm=False,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        tensor_model_parallel_size=split.tensor,
        params_dtype=Precision(bf16=split.bf16).params_dtype,
        bf16=split.bf16,
        use_cpu_initialization=True,
        cuda_graph_scope=None,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(
            qk_layernorm=model.qk_layernorm, normalization=model.normalization
        ),
        vocab_size=model.padded_vocab_size(split.tensor),
        max_sequence_length=model.max_position_embeddings,
        position_embedding_type="none",
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        pg_collection=groups,
    )
