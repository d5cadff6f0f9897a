"""The sizes that one rank computes on, from the configuration of a run: integers only."""

from collections import Counter
from dataclasses import dataclass
from functools import cache

from megatron_untied.config.run import RunConfig
from megatron_untied.context_parallel.head_schedule import HeadSchedule, head_schedule
from megatron_untied.context_parallel.kernels.split_calls import Shape
from megatron_untied.context_parallel.kernels.traced import TracedKernel
from megatron_untied.phases import MemoryCategory
from megatron_untied.planner.kernels import planned_kernel
from megatron_untied.planner.machine import Machine

Bytes = Counter[MemoryCategory]
"""Bytes by category. ``+`` adds them up and drops categories without bytes."""


# A search plans thousands of lengths and settings, which share few schedules.
@cache
def _cached_schedule(*sizes, overlap: bool) -> tuple[HeadSchedule, list[tuple[int, int]]]:
    schedule = head_schedule(*sizes, overlap=overlap)
    return schedule, sorted(schedule.heads_of_calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The sizes of one rank. Single letters are those of the architecture page."""

    config: RunConfig
    world_size: int

    num_tensor: int
    """Tensor-parallel ranks."""
    num_context: int
    """Context-parallel ranks, Ulysses x ring."""
    num_ulysses: int
    """Ranks that exchange tokens for heads."""
    num_ring: int
    """Ranks that pass keys and values around."""
    num_sharding: int
    """Data- x context-parallel ranks, which shard optimizer states (ZeRO-1) or everything."""
    num_token_parts: int
    """Tensor-parallel ranks that shard the residual's tokens: 1 without sequence parallelism."""
    num_micro_batches: int
    """Forwards and backwards of a step."""
    num_layers: int

    n: int
    """Tokens of the sequence per rank, as attention sees them."""
    b: int
    """Samples of a micro-batch."""
    m: int
    """Hidden size."""
    h: int
    """Query heads per tensor-parallel rank."""
    g: int
    """Key-value heads per tensor-parallel rank."""
    d: int
    """Width of a head."""
    f: int
    """Width of the MLP per tensor-parallel rank."""
    v: int
    """Rows of the vocabulary per tensor-parallel rank, with padding."""
    itemsize: int
    """Bytes of an activation, and of a weight in use."""

    schedule: HeadSchedule
    """The heads of each rank in each chunk."""
    kernel: TracedKernel
    """The attention kernel, which allocates and does not compute."""
    is_streamed: bool
    """Whether layers recompute; otherwise they keep all that autograd saves."""
    tokens: int
    """n x b."""
    residual_tokens: int
    """Of those, the tokens of this rank's residual."""
    tile_tokens: int
    """Tokens x samples of one tile, over all tensor-parallel ranks that are gathered."""
    num_tiles: int
    loss_tokens: int
    """Tokens x samples of one chunk of the loss, of this rank's residual."""
    residual_bytes: int
    """H: the residual of this rank's tokens."""
    output_bytes: int
    """The attention output of this rank's tokens, all heads: as large as H if h x d is m."""
    lse_bytes: int
    """The log-sum-exps of one layer, fp32."""

    @classmethod
    def of(cls, config: RunConfig, machine: Machine) -> "Geometry":
        """The sizes of each rank of ``machine``, which share the run ``config``.

        Raises:
            ValueError: heads per chunk that do not divide over the ranks, or no attention kernel
                fits the model and the GPU.
        """
        world_size = machine.world_size
        model, parallel, batch = config.model, config.parallel, config.batch
        num_tensor = parallel.tensor_model_parallel_size
        num_context = parallel.context_parallel_size
        num_ulysses, num_ring = parallel.num_ulysses_and_ring
        num_sharding = world_size // num_tensor
        num_token_parts = num_tensor if parallel.sequence_parallel else 1
        n, b = batch.seq_length // num_context, batch.micro_batch_size
        h, g = model.num_attention_heads // num_tensor, model.num_query_groups // num_tensor
        own_rows = n // num_token_parts
        # A tile is cut from the rank's own tokens and gathered, so it is a multiple of the parts.
        tile_rows = min(max(1, config.memory.sequence_tile_size // num_token_parts), own_rows)
        tile_tokens = tile_rows * num_token_parts * b
        itemsize = config.precision.params_dtype.itemsize
        schedule, heads_of_calls = _cached_schedule(
            h,
            g,
            num_ulysses,
            parallel.heads_per_chunk,
            # One rank exchanges nothing, so there is nothing to overlap and to buffer twice.
            overlap=parallel.cp_overlap and num_ulysses > 1,
        )
        rows, d = n * num_ulysses, model.kv_channels
        shapes = [
            Shape(num_queries=rows, num_keys=rows, b=b, h=h_call, g=g_call, d=d)
            for h_call, g_call in heads_of_calls
        ]
        chunk = config.memory.loss_chunk_size or own_rows * b * num_token_parts
        return cls(
            config=config,
            world_size=world_size,
            num_tensor=num_tensor,
            num_context=num_context,
            num_ulysses=num_ulysses,
            num_ring=num_ring,
            num_sharding=num_sharding,
            num_token_parts=num_token_parts,
            num_micro_batches=batch.num_micro_batches(num_sharding // num_context),
            num_layers=model.num_layers,
            n=n,
            b=b,
            m=model.hidden_size,
            h=h,
            g=g,
            d=d,
            f=model.ffn_hidden_size // num_tensor,
            v=model.padded_vocab_size(num_tensor) // num_tensor,
            itemsize=itemsize,
            schedule=schedule,
            kernel=planned_kernel(config, machine.gpu, shapes, machine.kernels),
            is_streamed=config.memory.recompute_granularity is not None,
            tokens=n * b,
            residual_tokens=own_rows * b,
            tile_tokens=tile_tokens,
            num_tiles=-(-n * b // tile_tokens),
            loss_tokens=min(own_rows * b, max(chunk // num_token_parts, 1)),
            residual_bytes=own_rows * b * model.hidden_size * itemsize,
            output_bytes=n * b * h * d * itemsize,
            lse_bytes=n * b * h * 4,
        )
