"""Configuration of the model, its parallelism, its activation memory and its precision.

``cli/arguments.py`` builds these from Megatron's flags. No other module sees flags.
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
    """Base of the wavelengths (theta)."""
    percent: float = 1.0
    """Fraction of the head width that is rotated."""
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    scaling_factor: float = 1.0
    """Factor by which the context is extended."""
    original_max_positions: int = 8192
    """Context length that the unscaled model was trained with (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """llama3: wavelengths above original / low are scaled, those below original / high are kept."""
    beta_fast: float = 32.0  # yarn: pairs with more rotations in the original context are kept
    beta_slow: float = 1.0  # yarn: pairs with fewer are scaled fully
    attention_factor: float | None = None
    """yarn: multiplies cos and sin; None is 0.1 ln(scaling_factor) + 1."""
    truncate: bool = True
    """yarn: round the correction range to whole dimensions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The architecture: everything that the weights of a checkpoint depend on."""

    num_layers: int
    hidden_size: int  # m
    ffn_hidden_size: int
    num_attention_heads: int  # h
    num_query_groups: int  # g
    """Key-value heads; equal to ``num_attention_heads`` without grouping."""
    kv_channels: int  # d
    """Head width; may differ from hidden_size / num_attention_heads."""
    vocab_size: int
    """Rows of the embedding before padding. The softmax of the loss excludes the padding."""
    make_vocab_size_divisible_by: int = 128  # odd row counts slow matrix products down
    max_position_embeddings: int  # a limit on s; rotary embedding has no weights for it
    swiglu: bool = True
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    norm_epsilon: float = 1e-5
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    untie_embeddings_and_output_weights: bool = True
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    window_size: int | None = None  # Megatron's flag does not count the query itself
    """Keys that a query attends to, including itself; None is no limit."""
    init_method_std: float = 0.02

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Rows of the embedding with padding, as Megatron pads them.

        Args:
            tensor_model_parallel_size: ranks that share the rows; each gets a multiple of
                ``make_vocab_size_divisible_by``.
        """
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Parallel sizes; the data-parallel size is the world size divided by them."""

    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    context_parallel_size: int = 1  # p = a r
    cp_comm_type: Literal["a2a", "p2p", "a2a+p2p"] = "a2a"
    hierarchical_context_parallel_sizes: tuple[int, int] | None = None
    """(Ulysses ranks, ring ranks), for a2a+p2p."""
    heads_per_chunk: int | Literal["all", "auto"] = "all"
    """Query heads (u) per exchange, over all Ulysses ranks; a chunk buffer has s/p * b * u * d
    elements. "all" is a single exchange, as in DeepSpeed-Ulysses. "auto" is chosen by the planner
    before the model is built; see :mod:`megatron_untied.planner.automatic`."""
    cp_overlap: bool | Literal["auto"] = True
    """Overlap the exchange of the next chunk with attention; needs a second set of buffers. "auto":
    see :mod:`megatron_untied.planner.geometry`."""

    @property
    def num_ulysses_and_ring(self) -> tuple[int, int]:
        """Sizes (a, r) of a Ulysses group and of a ring."""
        p = self.context_parallel_size
        return {"a2a": (p, 1), "p2p": (1, p)}.get(
            self.cp_comm_type, self.hierarchical_context_parallel_sizes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """What is saved for backward, and where; see :mod:`megatron_untied.streaming`."""

    recompute_granularity: Literal["full", "selective", "auto"] | None = None
    """None: ordinary autograd. full: save the layer input. selective: also save the attention
    output and its log-sum-exp, so attention is not recomputed. "auto", here and in the next four,
    is chosen by the planner."""
    attention_output_layers: int | Literal["auto"] | None = None
    """selective: layers, from the last one backwards, that save the attention output; None is all.
    The backward of others recomputes attention, in memory that the last layers' backward left."""
    recompute_num_layers: int | Literal["auto"] = 1
    """Layers per checkpoint group, of which only the first input is saved."""
    cpu_offloading_num_layers: int | Literal["auto"] = 0
    """Layers whose saved activations are offloaded to the host."""
    activation_disk: tuple[str, ...] = ()
    """Folders on local disks; the saved activations of those layers go on from the host to there,
    except for the last two. Each rank stripes its own over all folders."""
    activation_disk_gib: float | Literal["auto"] | None = None
    """The most that a rank stores there: later layers stay on the host. None is no limit; "auto" is
    what the host cannot hold, chosen by the planner."""
    activation_disk_checksums: bool = True
    """Compare what is read from the disk with the crc32 of what was written."""
    park_during_attention: bool | Literal["auto"] = False
    """Keep the residual, its gradient, attention outputs and dK and dV on the host, from where they
    pass the device by tiles and by chunks of heads."""
    sequence_tile_size: int | Literal["auto"] = 8192
    """Tokens per tile in the token-wise parts of a streamed layer. "auto", here and below: see
    :mod:`megatron_untied.planner.geometry`."""
    loss_chunk_size: int | Literal["auto"] | None = None
    """Tokens whose logits are materialized at a time; None is a whole micro-batch."""

    def first_kept_output(self, num_layers: int) -> int:
        """The first layer that keeps its attention output for backward; ``num_layers``: none."""
        kept = self.attention_output_layers
        if kept is None:
            kept = num_layers if self.recompute_granularity == "selective" else 0
        return num_layers - kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """bf16 compute with fp32 main parameters and gradients, or everything in fp32."""

    bf16: bool = False

    @property
    def params_dtype(self) -> torch.dtype:
        """Dtype of weights and activations in compute.

        Main parameters, gradients and moments are fp32 either way.
        """
        return torch.bfloat16 if self.bf16 else torch.float32
