"""The sizes that one rank computes on, from the configuration of a run: integers only."""

from dataclasses import dataclass
from functools import cached_property

from megatron_untied.config.run import RunConfig
from megatron_untied.context_parallel.head_schedule import HeadSchedule, head_schedule


@dataclass(frozen=True)
class Geometry:
    """One rank of ``world_size`` that share a run. Letters are those of the architecture page."""

    config: RunConfig
    world_size: int

    @property
    def t(self) -> int:
        """Tensor-parallel ranks."""
        return self.config.parallel.tensor_model_parallel_size

    @property
    def p(self) -> int:
        """Context-parallel ranks."""
        return self.config.parallel.context_parallel_size

    @property
    def num_ulysses(self) -> int:
        """Ranks that trade sequence for heads."""
        return self.config.parallel.num_ulysses_and_ring[0]

    @property
    def num_ring(self) -> int:
        """Ranks that pass keys and values round."""
        return self.config.parallel.num_ulysses_and_ring[1]

    @property
    def num_sharding(self) -> int:
        """Data- x context-parallel ranks: those that share optimizer states, or everything."""
        return self.world_size // self.t

    @property
    def num_micro_batches(self) -> int:
        """Forwards and backwards of a step."""
        return self.config.batch.num_micro_batches(self.num_sharding // self.p)

    @property
    def b(self) -> int:
        """Samples of a micro-batch."""
        return self.config.batch.micro_batch_size

    @property
    def n(self) -> int:
        """Tokens of the sequence on one rank, as attention sees them."""
        return self.config.batch.seq_length // self.p

    @property
    def num_token_parts(self) -> int:
        """Tensor-parallel ranks that share the residual's tokens."""
        return self.t if self.config.parallel.sequence_parallel else 1

    @property
    def itemsize(self) -> int:
        """Bytes of an activation and of a weight in use."""
        return self.config.precision.params_dtype.itemsize

    @property
    def m(self) -> int:
        """Hidden size."""
        return self.config.model.hidden_size

    @property
    def h(self) -> int:
        """Query heads of a tensor-parallel rank."""
        return self.config.model.num_attention_heads // self.t

    @property
    def g(self) -> int:
        """Key-value heads of a tensor-parallel rank."""
        return self.config.model.num_query_groups // self.t

    @property
    def d(self) -> int:
        """Width of a head."""
        return self.config.model.kv_channels

    @property
    def f(self) -> int:
        """Width of the MLP on a tensor-parallel rank."""
        return self.config.model.ffn_hidden_size // self.t

    @property
    def v(self) -> int:
        """Rows of the vocabulary on a tensor-parallel rank, with padding."""
        return self.config.model.padded_vocab_size(self.t) // self.t

    @property
    def num_layers(self) -> int:
        """Transformer layers."""
        return self.config.model.num_layers

    @cached_property
    def schedule(self) -> HeadSchedule:
        """Which heads travel in which chunk."""
        return head_schedule(
            self.h,
            self.g,
            self.num_ulysses,
            self.config.parallel.heads_per_chunk,
            overlap=self.config.parallel.cp_overlap and self.num_ulysses > 1,
        )

    @property
    def residual_bytes(self) -> int:
        """H: the residual of this rank's tokens."""
        return self.n // self.num_token_parts * self.b * self.m * self.itemsize

    @property
    def output_bytes(self) -> int:
        """The attention output of this rank's tokens, all heads: as large as H if h x d is m."""
        return self.n * self.b * self.h * self.d * self.itemsize

    @property
    def lse_bytes(self) -> int:
        """The log-sum-exps of one layer, fp32."""
        return self.n * self.b * self.h * 4

    @property
    def tile(self) -> int:
        """Tokens x samples that a streamed layer works on at a time, over all that are gathered."""
        most = max(1, self.config.memory.sequence_tile_size // self.num_token_parts)
        return min(most, self.n // self.num_token_parts) * self.num_token_parts * self.b

    @property
    def num_tiles(self) -> int:
        """Tiles of this rank's tokens."""
        return -(-self.n * self.b // self.tile)
