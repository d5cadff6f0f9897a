"""The tiny model that tests build, on any ranks."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_untied.config import (
    AdaptationConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    Precision,
)
from megatron_untied.config.parameters import TRAIN_ALL
from megatron_untied.gpt_model import ChunkedLossGPTModel
from megatron_untied.model import Runtime, build_model
from megatron_untied.sharding.initialize_weights import initialize_weights
from megatron_untied.sharding.parameter_layout import ParameterLayout, parameter_layouts
from megatron_untied.sharding.shards import ModelShards, Shards
from megatron_untied.sharding.tensor_slice import TensorSlice
from megatron_untied.step_progress import StepProgress
from megatron_untied.streaming.host_arena import HostArena

TINY = ModelConfig(
    num_layers=2,
    hidden_size=48,
    ffn_hidden_size=72,
    num_attention_heads=8,  # together wider than the model
    num_query_groups=4,
    kv_channels=8,
    vocab_size=251,  # padded to 256, 256, 512 at 1, 2, 4 ranks of tensor parallelism
    max_position_embeddings=256,
    init_method_std=0.1,  # attention is far from uniform
)


def tiny(**changes) -> ModelConfig:
    """The tiny model with some fields changed."""
    return replace(TINY, **changes)


def parallel_groups(parallel: ParallelConfig) -> ProcessGroupCollection:
    """Megatron-core's groups of this process; data parallelism takes the ranks that are left."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        hierarchical_context_parallel_sizes=parallel.hierarchical_context_parallel_sizes,
    )
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    return ProcessGroupCollection.use_mpu_process_groups()


def make_model(
    model: ModelConfig = TINY,
    parallel: ParallelConfig | None = None,
    memory: MemoryConfig | None = None,
    precision: Precision | None = None,
    groups: ProcessGroupCollection | None = None,
    seed: int = 1,
    arena: HostArena | None = None,
    progress: StepProgress | None = None,
    adaptation: AdaptationConfig = TRAIN_ALL,
) -> ChunkedLossGPTModel:
    """A model with its initial weights, the same at every tensor-parallel size.

    Adapters have an effect already.
    """
    parallel = parallel or ParallelConfig()
    groups = groups or parallel_groups(parallel)
    memory, precision = memory or MemoryConfig(), precision or Precision()
    runtime = Runtime(arena=arena, progress=progress)
    built = build_model(
        model, parallel, memory, precision, groups, runtime=runtime, adaptation=adaptation
    )
    initialize_weights(built, model, seed, groups.tp)
    layouts = parameter_layouts(built, model, tp_rank=groups.tp.rank(), tp_size=groups.tp.size())
    draw_adapters(ModelShards(built), layouts)
    return built


@torch.no_grad()
def draw_adapters(shards: Shards, layouts: Mapping[str, ParameterLayout]) -> None:
    """Give every B of a pair values that depend on its name; they are zeros at first."""
    for shard in shards.shards(with_moments=False):
        if shard.name.endswith("lora_B"):
            layout = layouts[shard.name]
            generator = torch.Generator().manual_seed(sum(map(ord, shard.name)))
            values = 0.02 * torch.randn(layout.global_shape, generator=generator)
            for part in layout.global_slices(shard.value, shard.slices):
                part.tensor.copy_(TensorSlice(part.offsets, part.tensor.shape).view(values))
    shards.sync_model_params()


def batch(model: ModelConfig, s: int, b: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """A global batch [b, s] with unequal token weights, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(model.vocab_size, (b, s + 1), generator=generator)
    weights = torch.rand(b, s, generator=generator)
    weights[torch.rand(b, s, generator=generator) < 0.3] = 0.0
    return {"tokens": text[:, :-1], "labels": text[:, 1:], "token_weights": weights / weights.sum()}
