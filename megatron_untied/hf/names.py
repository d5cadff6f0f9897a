"""Which rows of our parameters the tensors of a Hugging Face folder are: the one table of names.

Everything that differs is the names and the order of rows. A Hugging Face tensor is to one of our
global parameters what a tensor-parallel rank's share is, so it has a :class:`ParameterLayout` too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_untied.config import ModelConfig
from megatron_untied.sharding.parameter_layout import ParameterLayout, SliceMapping
from megatron_untied.sharding.tensor_slice import TensorSlice

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMapping:
    """The rows of one of our parameters that a Hugging Face tensor consists of."""

    theirs: str
    ours: str
    num_rows: int
    """Of our parameter."""
    runs: tuple[range, ...]
    """Rows of our parameter, in the order in which the Hugging Face tensor has them."""
    columns: int | None
    """None is a vector, whose rows are its elements."""

    def layout(self) -> ParameterLayout:
        """The same as slices of both."""
        rest = () if self.columns is None else (self.columns,)
        zeros, mappings, start = (0,) * len(rest), [], 0
        for run in self.runs:
            local = TensorSlice((start, *zeros), (len(run), *rest))
            mappings.append(SliceMapping(local, (run.start, *zeros)))
            start += len(run)
        return ParameterLayout(
            name=self.ours,
            global_shape=(self.num_rows, *rest),
            local_shape=(start, *rest),
            mappings=tuple(mappings),
        )


def hf_layouts(model: ModelConfig) -> dict[str, ParameterLayout]:
    """Where every tensor of a Hugging Face folder lies in our parameters, by its name there."""
    return {partner.theirs: partner.layout() for partner in tensor_mappings(model)}


def tensor_mappings(model: ModelConfig) -> Iterator[TensorMapping]:
    """The table: every tensor of a Hugging Face folder, and where it is in our model."""
    m, v = model.hidden_size, model.vocab_size
    yield _whole(EMBEDDING, "embedding.word_embeddings.weight", v, m)
    for number in range(model.num_layers):
        theirs, ours = f"model.layers.{number}.", f"decoder.layers.{number}."
        yield _whole(f"{theirs}input_layernorm.weight", f"{ours}input_layernorm.weight", m)
        yield from _attention(model, f"{theirs}self_attn.", f"{ours}self_attention.")
        norm = "post_attention_layernorm.weight"
        yield _whole(f"{theirs}{norm}", f"{ours}pre_mlp_layernorm.weight", m)
        yield from _mlp(model, f"{theirs}mlp.", f"{ours}mlp.")
    yield _whole("model.norm.weight", "decoder.final_layernorm.weight", m)
    if model.untie_embeddings_and_output_weights:
        yield _whole(OUTPUT, "output_layer.weight", v, m)


def qkv_rows(model: ModelConfig) -> tuple[tuple[range, ...], ...]:
    """Rows of megatron-core's linear_qkv that are q, k and v: by group its q heads, k, v."""
    d, g = model.kv_channels, model.num_query_groups
    queries = model.num_attention_heads // g * d
    starts = range(0, g * (queries + 2 * d), queries + 2 * d)
    return (
        tuple(range(start, start + queries) for start in starts),
        tuple(range(start + queries, start + queries + d) for start in starts),
        tuple(range(start + queries + d, start + queries + 2 * d) for start in starts),
    )


def _attention(model: ModelConfig, theirs: str, ours: str) -> Iterator[TensorMapping]:
    m, d, bias = model.hidden_size, model.kv_channels, model.add_bias_linear
    rows = qkv_rows(model)
    num_rows = sum(len(run) for runs in rows for run in runs)
    for part, runs in zip("qkv", rows, strict=True):
        name, qkv = f"{theirs}{part}_proj", f"{ours}linear_qkv"
        yield from _linear(name, qkv, num_rows, runs, m, bias or model.add_qkv_bias)
    if model.qk_layernorm:
        for part in "qk":
            yield _whole(f"{theirs}{part}_norm.weight", f"{ours}{part}_layernorm.weight", d)
    heads = model.num_attention_heads * d
    yield from _linear(f"{theirs}o_proj", f"{ours}linear_proj", m, (range(m),), heads, bias)


def _mlp(model: ModelConfig, theirs: str, ours: str) -> Iterator[TensorMapping]:
    m, f, bias = model.hidden_size, model.ffn_hidden_size, model.add_bias_linear
    for part, rows in (("gate", range(f)), ("up", range(f, 2 * f))):
        yield from _linear(f"{theirs}{part}_proj", f"{ours}linear_fc1", 2 * f, (rows,), m, bias)
    yield from _linear(f"{theirs}down_proj", f"{ours}linear_fc2", m, (range(m),), f, bias)


def _linear(
    theirs: str, ours: str, num_rows: int, runs: tuple[range, ...], columns: int, bias: bool
) -> Iterator[TensorMapping]:
    parts = {"weight": columns, "bias": None} if bias else {"weight": columns}
    for part, width in parts.items():
        yield TensorMapping(
            theirs=f"{theirs}.{part}",
            ours=f"{ours}.{part}",
            num_rows=num_rows,
            runs=runs,
            columns=width,
        )


def _whole(theirs: str, ours: str, rows: int, columns: int | None = None) -> TensorMapping:
    return TensorMapping(
        theirs=theirs, ours=ours, num_rows=rows, runs=(range(rows),), columns=columns
    )


def check_tensors(
    found: Mapping[str, tuple[int, ...]], layouts: Mapping[str, ParameterLayout], source: str
) -> None:
    """Check that the tensors of a folder are those of the model, with their shapes.

    Args:
        found: shapes by name.
        layouts: see :func:`hf_layouts`.
        source: the folder, for messages.

    Raises:
        ValueError: with the tensors that are missing, those that the model has no place for and
            those of another shape, with both shapes.
    """
    missing = [name for name in layouts if name not in found]
    unknown = [name for name in found if name not in layouts]
    shapes = [
        f"{name} {list(found[name])} instead of {list(layout.local_shape)}"
        for name, layout in layouts.items()
        if name in found and found[name] != layout.local_shape
    ]
    problems = {"missing": missing, "without a partner": unknown, "of another shape": shapes}
    listed = [f"{what}: {_some(names)}" for what, names in problems.items() if names]
    if listed:
        raise ValueError(f"{source} does not fit its config.json; {'; '.join(listed)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
