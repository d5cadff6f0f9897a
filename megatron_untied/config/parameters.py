"""Names and shapes of a model's parameters, and which of them a run trains.

The names are those of the built model and of its checkpoints. Letters in shapes: m hidden size, h/g
query/key-value heads and f width of the MLP per tensor-parallel rank, d head width, r rank of an
adapter.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal, NamedTuple, get_args

from megatron_untied.config.model import ModelConfig

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
ADAPTERS = ".adapters."
"""In the names of an adapter's parameters, between those of the linear layer and of the target."""

LoraTarget = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
]  # fmt: skip
LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)
"""Hugging Face's names of the matrices of a layer, as in PEFT's ``target_modules``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptationConfig:
    """Which parameters are trained: all but some, or low-rank adapters alone."""

    freeze: tuple[str, ...] = ()
    """Patterns, as in file names, of parameters that are not trained."""
    lora_rank: int | None = None
    """Width r of the adapters, beside which nothing is trained; None is no adapters."""
    lora_alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""
    lora_targets: tuple[LoraTarget, ...] = LORA_TARGETS
    """Matrices that get an adapter, in every layer."""

    def trains(self, name: str) -> bool:
        """Whether the parameter ``name`` is trained."""
        if self.lora_rank is not None:
            return ADAPTERS in name
        return not any(fnmatchcase(name, pattern) for pattern in self.freeze)

    def targets(self, *names: str) -> list[str]:
        """Those of ``names`` that have an adapter."""
        return [name for name in names if self.lora_rank and name in self.lora_targets]


TRAIN_ALL = AdaptationConfig()


class Parameter(NamedTuple):
    """One tensor-parallel rank's part of a parameter."""

    shape: tuple[int, ...]
    is_trained: bool


@cache
def parameters(
    model: ModelConfig, num_tensor: int = 1, adaptation: AdaptationConfig = TRAIN_ALL
) -> dict[str, Parameter]:
    """Every parameter that one of ``num_tensor`` tensor-parallel ranks holds, by name.

    The vocabulary is padded.
    """
    matrix = model.padded_vocab_size(num_tensor) // num_tensor, model.hidden_size
    shapes = {EMBEDDING: matrix}
    of_layer = _layer(model, num_tensor, adaptation)
    for number in range(model.num_layers):
        shapes |= {f"decoder.layers.{number}.{name}": shape for name, shape in of_layer.items()}
    shapes |= _norm("decoder.final_layernorm", model, model.hidden_size)
    if model.untie_embeddings_and_output_weights:
        shapes[OUTPUT] = matrix
    return {name: Parameter(shape, adaptation.trains(name)) for name, shape in shapes.items()}


@cache
def first_layer_with_backward(model: ModelConfig, adaptation: AdaptationConfig) -> int:
    """The layer at which the backward pass ends, counted from 0; all of them if no layer has one.

    Nothing before it is trained, so gradients of its input, and all that backward needs of the
    layers before it, are not made.
    """
    trained = [name for name, its in parameters(model, 1, adaptation).items() if its.is_trained]
    if EMBEDDING in trained:
        return 0
    numbers = [int(name.split(".")[2]) for name in trained if name.startswith("decoder.layers.")]
    return min(numbers, default=model.num_layers)


def qkv_rows(num_heads: int, num_groups: int, d: int) -> dict[str, tuple[range, ...]]:
    """Rows of megatron-core's linear_qkv that are q, k and v: per group its q heads, k, v.

    The order keeps the rows of a group in one piece, for tensor parallelism.
    """
    queries = num_heads // num_groups * d
    starts = range(0, num_groups * (queries + 2 * d), queries + 2 * d)  # of the groups
    return {
        "q_proj": tuple(range(start, start + queries) for start in starts),
        "k_proj": tuple(range(start + queries, start + queries + d) for start in starts),
        "v_proj": tuple(range(start + queries + d, start + queries + 2 * d) for start in starts),
    }


def _layer(
    model: ModelConfig, num_tensor: int, adaptation: AdaptationConfig
) -> dict[str, tuple[int, ...]]:
    """The shapes of one layer's parameters by name, in the order of a forward."""
    m, d, f = model.hidden_size, model.kv_channels, model.ffn_hidden_size // num_tensor
    h, g = model.num_attention_heads // num_tensor, model.num_query_groups // num_tensor
    # By linear layer: its shape, whether it has a bias, and the widths of its targets.
    up = {"gate_proj": f, "up_proj": f} if model.swiglu else {"up_proj": f}
    bias = model.add_bias_linear
    qkv = {"q_proj": h * d, "k_proj": g * d, "v_proj": g * d}
    linears = {
        "self_attention.linear_qkv": (m, bias or model.add_qkv_bias, qkv),
        "self_attention.linear_proj": (h * d, bias, {"o_proj": m}),
        "mlp.linear_fc1": (m, bias, up),
        "mlp.linear_fc2": (f, bias, {"down_proj": m}),
    }
    shapes = _norm("input_layernorm", model, m)
    for name, (width, has_bias, rows) in linears.items():
        if name == "mlp.linear_fc1":
            shapes |= _norm("pre_mlp_layernorm", model, m)
        shapes[f"{name}.weight"] = sum(rows.values()), width
        if has_bias:
            shapes[f"{name}.bias"] = (sum(rows.values()),)
        for target in adaptation.targets(*rows):
            shapes[f"{name}{ADAPTERS}{target}.lora_A"] = adaptation.lora_rank, width
            shapes[f"{name}{ADAPTERS}{target}.lora_B"] = rows[target], adaptation.lora_rank
        # Over one head, so tensor-parallel ranks hold them whole.
        if name == "self_attention.linear_qkv" and model.qk_layernorm:
            for part in "qk":
                shapes |= _norm(f"self_attention.{part}_layernorm", model, d)
    return shapes


def _norm(name: str, model: ModelConfig, width: int) -> dict[str, tuple[int, ...]]:
    parts = ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",)
    return {f"{name}.{part}": (width,) for part in parts}
