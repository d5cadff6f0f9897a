"""Sizes of the parts: for a GPU, and toy ones with which the tests run every part on a CPU."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

KI = 1 << 10
MI = 1 << 20

# A small vocabulary: weights are drawn on the host, at 100 M per second.
LLAMA = (
    "--model llama3-8b --num-layers {layers} --vocab-size 8191 --bf16 --loss-chunk-size 2048 "
    "--cp-heads-per-chunk 1 --recompute-granularity selective --sequence-tile-size 8192 "
)
SMALL = (
    "--num-layers {layers} --hidden-size 128 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --vocab-size 499 --bf16 --cp-heads-per-chunk 1 "
    "--recompute-granularity selective --sequence-tile-size 32 --loss-chunk-size 32 "
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much each part does; lengths are in tokens."""

    model: str
    """Flags of the model whose layer and memory are measured; ``{layers}`` is replaced."""
    kernel_lengths: tuple[int, ...]
    layer_lengths: tuple[int, ...]
    copy_bytes: int
    offload_length: int
    memory_length: int
    context_window: int
    """Keys that a query sees in the search of the longest context, so that attention takes no time
    there. No buffer depends on it."""
    small_length: int
    """Of the training that a CPU repeats."""


FULL = Sizes(
    model=LLAMA,
    kernel_lengths=(16 * KI, 64 * KI, 256 * KI),
    layer_lengths=(64 * KI, 256 * KI, 512 * KI, MI),
    copy_bytes=2 << 30,
    offload_length=128 * KI,
    memory_length=128 * KI,
    context_window=4096,
    small_length=KI,
)
TOY = Sizes(
    model=SMALL,
    kernel_lengths=(128, 256),
    layer_lengths=(64, 128),
    copy_bytes=1 << 20,
    offload_length=128,
    memory_length=128,
    context_window=16,
    small_length=64,
)
