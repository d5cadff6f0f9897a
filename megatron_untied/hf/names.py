"""The table of names: the rows of our parameters that each tensor of a Hugging Face folder holds.

Only names and the order of rows differ. A Hugging Face tensor is a part of one of our global
parameters, as a tensor-parallel rank's parameter is, so it has a :class:`ParameterLayout` too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_untied.config import ModelConfig
from megatron_untied.config.parameters import qkv_rows
from megatron_untied.config.problems import first_few
from megatron_untied.sharding.parameter_layout import ParameterLayout, SliceMapping
from megatron_untied.sharding.tensor_slice import TensorSlice

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
MAX_LISTED = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMapping:
    """A Hugging Face tensor as rows of one of our parameters."""

    theirs: str
    """Name of the Hugging Face tensor."""
    ours: str
    """Name of our parameter."""
    num_rows: int
    """Rows of our parameter."""
    runs: tuple[range, ...]
    """Rows of our parameter, in the order of the Hugging Face tensor."""
    columns: int | None
    """Columns of both; None for a vector, whose rows are its elements."""

    def layout(self) -> ParameterLayout:
        """The same as slices of both tensors; the Hugging Face tensor is the local one."""
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
    """The layout of every tensor of a Hugging Face folder, by its name there."""
    return {mapping.theirs: mapping.layout() for mapping in tensor_mappings(model)}


def tensor_mappings(model: ModelConfig) -> Iterator[TensorMapping]:
    """The table: every tensor of a Hugging Face folder with its place in our model."""
    m, v = model.hidden_size, model.vocab_size
    # Not padded: the global embedding has v rows for any tensor-parallel size.
    yield _whole(EMBEDDING, "embedding.word_embeddings.weight", v, m)
    for number in range(model.num_layers):
        theirs, ours = f"model.layers.{number}.", f"decoder.layers.{number}."
        yield _whole(f"{theirs}input_layernorm.weight", f"{ours}input_layernorm.weight", m)
        yield from _attention(model, f"{theirs}self_attn.", f"{ours}self_attention.")
        norm = "post_attention_layernorm.weight"
        yield _whole(f"{theirs}{norm}", f"{ours}pre_mlp_layernorm.weight", m)
        yield from _mlp(model, f"{theirs}mlp.", f"{ours}mlp.")
    yield _whole("model.norm.weight", "decoder.final_layernorm.weight", m)
    if model.untie_embeddings_and_output_weights:  # tied: the folder need not hold it
        yield _whole(OUTPUT, "output_layer.weight", v, m)


def _attention(model: ModelConfig, theirs: str, ours: str) -> Iterator[TensorMapping]:
    m, d, bias = model.hidden_size, model.kv_channels, model.add_bias_linear
    rows = qkv_rows(model.num_attention_heads, model.num_query_groups, d)
    num_rows = sum(len(run) for runs in rows.values() for run in runs)
    # Theirs are three tensors of whole heads; ours interleaves them by group, so that a
    # tensor-parallel rank holds whole groups in one piece.
    for name, runs in rows.items():
        qkv = f"{ours}linear_qkv"
        yield from _linear(f"{theirs}{name}", qkv, num_rows, runs, m, bias or model.add_qkv_bias)
    if model.qk_layernorm:
        for part in "qk":
            yield _whole(f"{theirs}{part}_norm.weight", f"{ours}{part}_layernorm.weight", d)
    heads = model.num_attention_heads * d
    yield from _linear(f"{theirs}o_proj", f"{ours}linear_proj", m, (range(m),), heads, bias)


def _mlp(model: ModelConfig, theirs: str, ours: str) -> Iterator[TensorMapping]:
    m, f, bias = model.hidden_size, model.ffn_hidden_size, model.add_bias_linear
    # linear_fc1 is [2f, m]: the gate projection above the up projection.
    for part, rows in (("gate", range(f)), ("up", range(f, 2 * f))):
        yield from _linear(f"{theirs}{part}_proj", f"{ours}linear_fc1", 2 * f, (rows,), m, bias)
    yield from _linear(f"{theirs}down_proj", f"{ours}linear_fc2", m, (range(m),), f, bias)


def _linear(
    theirs: str, ours: str, num_rows: int, runs: tuple[range, ...], columns: int, bias: bool
) -> Iterator[TensorMapping]:
    parts = {"weight": columns, "bias": None} if bias else {"weight": columns}
    # A bias is permuted as the rows of its matrix are.
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
        ValueError: with the tensors that are missing, those that the model does not have and those
            of another shape, with both shapes.
    """
    missing = [name for name in layouts if name not in found]
    unknown = [name for name in found if name not in layouts]
    shapes = [
        f"{name} {list(found[name])} instead of {list(layout.local_shape)}"
        for name, layout in layouts.items()
        if name in found and found[name] != layout.local_shape
    ]
    problems = {"missing": missing, "not in the model": unknown, "of another shape": shapes}
    listed = [
        f"{kind}: {first_few(names, MAX_LISTED)}" for kind, names in problems.items() if names
    ]
    if listed:
        raise ValueError(f"{source} does not fit its config.json; {'; '.join(listed)}")
