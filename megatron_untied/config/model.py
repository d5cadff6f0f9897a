"""What a run is made of, as values: the model, how it is split over ranks, and what it keeps.

``cli/arguments.py`` builds these from Megatron's flags once; nothing behind it sees flags.
Letters in shapes: s tokens of the sequence, p context-parallel ranks, b micro-batch, m hidden
size, h/g query/key-value heads, d head width, u query heads exchanged at a time.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryConfig:
    """Rotary position embedding; see :mod:`megatron_untied.rope`."""

    base: float = 10000.0
    """Wave length base (theta)."""
    percent: float = 1.0
    """Part of the head width that is rotated."""
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    scaling_factor: float = 1.0
    """How many times the original context the positions are stretched over."""
    original_max_positions: int = 8192
    """Context length the unscaled model was trained at (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """Llama 3.1 rule: wave lengths above original/low are stretched, below original/high kept."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """YaRN: multiplies cos and sin; None is 0.1 ln(scaling_factor) + 1."""
    truncate: bool = True
    """YaRN: round the correction range to whole dimensions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The architecture: everything a checkpoint's weights depend on, nothing a run may vary."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key-value heads (g); equal to ``num_attention_heads`` without grouping."""
    kv_channels: int
    """Head width (d); need not be hidden_size / num_attention_heads."""
    vocab_size: int
    """Tokens of the tokenizer. The weights are padded from it, the loss never sees the padding."""
    make_vocab_size_divisible_by: int = 128
    max_position_embeddings: int
    swiglu: bool = True
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    norm_epsilon: float = 1e-5
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    untie_embeddings_and_output_weights: bool = True
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    window_size: int | None = None
    """Keys a query sees, itself included; None is all before it."""
    init_method_std: float = 0.02

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Rows of the embedding: a multiple of make_vocab_size_divisible_by on every rank."""
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How tokens, heads and weights are split over ranks. Data parallelism takes what is left."""

    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    context_parallel_size: int = 1
    cp_comm_type: Literal["a2a", "p2p", "a2a+p2p"] = "a2a"
    hierarchical_context_parallel_sizes: tuple[int, int] | None = None
    """(Ulysses ranks, ring ranks), for a2a+p2p."""
    heads_per_chunk: int | Literal["all", "auto"] = "all"
    """Query heads (u) exchanged at a time, over all Ulysses ranks; a chunk buffer is
    s/p * b * u * d elements. "all" is one exchange, DeepSpeed-Ulysses. "auto" is decided before
    the model is built; see :mod:`megatron_untied.planner.search`."""
    cp_overlap: bool = True
    """Exchange the next chunk while this one attends: a second set of chunk buffers."""

    @property
    def num_ulysses_and_ring(self) -> tuple[int, int]:
        """Ranks that trade sequence for heads (A), and ranks that trade blocks (P): p = A x P."""
        p = self.context_parallel_size
        return {"a2a": (p, 1), "p2p": (1, p)}.get(
            self.cp_comm_type, self.hierarchical_context_parallel_sizes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """What a step keeps for its backward, and where; see :mod:`megatron_untied.streaming`."""

    recompute_granularity: Literal["full", "selective", "auto"] | None = None
    """None: ordinary autograd. full: keep the layer input. selective: also the attention output
    and its log-sum-exp, so that attention runs once a step. "auto" is decided before the model is
    built."""
    recompute_num_layers: int = 1
    """Keep the layer input only every so many layers."""
    cpu_offloading_num_layers: int = 0
    """Layers whose stash goes to the host."""
    park_during_attention: bool = False
    """Move the residual, gradient and slots to the host while attention runs."""
    sequence_tile_size: int = 8192
    """Tokens a token-wise module sees at a time in a streamed layer."""
    loss_chunk_size: int | None = None
    """Tokens whose logits are alive at a time; None is all of a micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Compute in bf16 with fp32 main parameters and gradients, or everything in fp32."""

    bf16: bool = False

    @property
    def params_dtype(self) -> torch.dtype:
        """The dtype that weights and activations compute in."""
        return torch.bfloat16 if self.bf16 else torch.float32
