"""The sizes that one rank computes on, from the configuration of a run: integers only.

Tile, chunk of the loss and overlap that are "auto" follow from the model and the sequence alone, so
that a run computes the same on every machine.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

from megatron_untied.config.run import RunConfig
from megatron_untied.context_parallel.head_schedule import HeadSchedule, head_schedule
from megatron_untied.context_parallel.kernels.split_calls import Shape
from megatron_untied.context_parallel.kernels.traced import TracedKernel
from megatron_untied.phases import MemoryCategory
from megatron_untied.planner.kernels import planned_kernel
from megatron_untied.planner.machine import Machine
from megatron_untied.platform.device import GIB

Bytes = Counter[MemoryCategory]
"""Bytes by category. ``+`` adds them up and drops categories without bytes."""

LARGEST_TILE = 8192
"""Tokens; larger ones are hardly faster."""
_TEMPORARY_BYTES = 2 * GIB
"""The most that a tile's MLP takes in backward, or the logits of a chunk."""
_ATTENTION_HIDES = 1 << 20
"""Keys per query from which an exchange takes less than half a percent of attention's time."""


def by_sizes(config: RunConfig) -> RunConfig:
    """``config`` with tile, chunk of the loss and overlap in place of "auto"; valid sizes only."""
    model, memory, parallel = config.model, config.memory, config.parallel
    itemsize, t = config.precision.params_dtype.itemsize, parallel.tensor_model_parallel_size
    tile_size, chunk_size = memory.sequence_tile_size, memory.loss_chunk_size
    if tile_size == "auto":
        # The gate, what it multiplies, what autograd saves of both, and their gradients; x, y.
        inner = (7 if model.swiglu else 3) * model.ffn_hidden_size // t
        token_bytes = (inner + 4 * model.hidden_size) * itemsize * config.batch.micro_batch_size
        tile_size = min(LARGEST_TILE, _power_of_two(_TEMPORARY_BYTES // token_bytes))
    if chunk_size == "auto":
        # fp32 logits, and in bf16 the copy that enters the matrix products.
        token_bytes = model.padded_vocab_size(t) // t * (4 + itemsize % 4)
        chunk_size = _power_of_two(_TEMPORARY_BYTES // token_bytes)
    overlap, s = parallel.cp_overlap, config.batch.seq_length
    if overlap == "auto":
        overlap = min(model.window_size or s, s) < _ATTENTION_HIDES
    return replace(
        config,
        memory=replace(memory, sequence_tile_size=tile_size, loss_chunk_size=chunk_size),
        parallel=replace(parallel, cp_overlap=overlap),
    )


def _with_disk_limit(config: RunConfig, machine: Machine) -> RunConfig:
    """``config`` with all that ``machine`` has in place of "auto"."""
    if config.memory.activation_disk_gib != "auto":
        return config
    # The least that a plan can take of the host: the search for the limit starts there.
    gib = None if math.isinf(machine.disk_bytes) else machine.disk_bytes / GIB
    return replace(config, memory=replace(config.memory, activation_disk_gib=gib))


def _power_of_two(most: int) -> int:
    """The greatest one up to ``most``, at least 256: fewer tokens leave a GPU idle."""
    return max(256, 1 << max(most, 1).bit_length() - 1)


# A search plans thousands of lengths and settings, which share few schedules.
@cache
def _cached_schedule(*sizes, overlap: bool) -> tuple[HeadSchedule, list[tuple[int, int]]]:
    schedule = head_schedule(*sizes, overlap=overlap)
    return schedule, sorted(schedule.heads_of_calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The sizes of one rank. Single letters are those of the architecture page."""

    config: RunConfig
    """With :func:`by_sizes` applied."""
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

    @property
    def recomputed(self) -> float:
        """Share of the layers that run attention once more for their backward."""
        first_kept = self.config.memory.first_kept_output(self.num_layers)
        return first_kept / self.num_layers if self.is_streamed else 0.0

    @classmethod
    def of(cls, config: RunConfig, machine: Machine) -> "Geometry":
        """The sizes of each rank of ``machine``, which share the run ``config``.

        Raises:
            ValueError: heads per chunk that do not divide over the ranks, or no attention kernel
                fits the model and the GPU.
        """
        config, world_size = _with_disk_limit(by_sizes(config), machine), machine.world_size
        model, memory = config.model, config.memory
        parallel, batch = config.parallel, config.batch
        num_tensor = parallel.tensor_model_parallel_size
        num_context = parallel.context_parallel_size
        num_ulysses, num_ring = parallel.num_ulysses_and_ring
        num_sharding = world_size // num_tensor
        num_token_parts = num_tensor if parallel.sequence_parallel else 1
        n, b = batch.seq_length // num_context, batch.micro_batch_size
        h, g = model.num_attention_heads // num_tensor, model.num_query_groups // num_tensor
        own_rows = n // num_token_parts
        # A tile is cut from the rank's own tokens and gathered, so it is a multiple of the parts.
        tile_rows = min(max(1, memory.sequence_tile_size // num_token_parts), own_rows)
        tile_tokens = tile_rows * num_token_parts * b
        itemsize = config.precision.params_dtype.itemsize
        schedule, calls = _cached_schedule(
            h,
            g,
            num_ulysses,
            parallel.heads_per_chunk,
            # One rank exchanges nothing, so there is nothing to overlap and to buffer twice.
            overlap=parallel.cp_overlap and num_ulysses > 1,
        )
        rows, d = n * num_ulysses, model.kv_channels
        shapes = [Shape(num_queries=rows, num_keys=rows, b=b, h=x, g=y, d=d) for x, y in calls]
        chunk = memory.loss_chunk_size or own_rows * b * num_token_parts
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
            is_streamed=memory.recompute_granularity is not None,
            tokens=n * b,
            residual_tokens=own_rows * b,
            tile_tokens=tile_tokens,
            num_tiles=-(-n * b // tile_tokens),
            loss_tokens=min(own_rows * b, max(chunk // num_token_parts, 1)),
            residual_bytes=own_rows * b * model.hidden_size * itemsize,
            output_bytes=n * b * h * d * itemsize,
            lse_bytes=n * b * h * 4,
        )
