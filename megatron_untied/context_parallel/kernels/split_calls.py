"""Splits attention into calls within a kernel's limits: integers only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megatron_untied.context_parallel.kernels.mask import Mask, Run
from megatron_untied.context_parallel.kernels.tensors import Qkv, QkvGrads

Triple = TypeVar("Triple", Qkv, QkvGrads)

INDEX_LIMIT = 1 << 31
"""From this product of sizes on, kernels that compute in 32 bits address wrong elements."""

_ROW_PADDING = 128
"""The most rows by which kernels pad a segment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one call of a kernel."""

    dtypes: tuple[torch.dtype, ...]
    head_width_multiple: int = 1
    max_head_width: int | None = None
    head_width_padding: int = 1
    """Kernels pad the head width to a multiple of this inside."""
    alignment_bytes: int = 1
    """Of strides and of the offset of a tensor in its storage."""
    windows: bool = True
    documents: bool = True
    joins_segments: bool = False
    """Takes cumulative lengths; otherwise every segment is a call."""
    indexes_heads_in_32_bits: bool = False
    """The rows and padded width of one head must stay below :data:`INDEX_LIMIT` elements."""
    indexes_calls_in_32_bits: bool = False
    """All heads of a call together must."""
    materializes_scores: bool = False
    """Memory and time grow so fast with length that it does not stand in for a kernel that a long
    sequence is beyond."""

    def problems(
        self,
        *,
        dtype: torch.dtype,
        head_width: int,
        window: int | None = None,
        documents: bool = False,
        shapes: Sequence["Shape"] = (),
    ) -> Iterator[str]:
        """Why the kernel does not fit a model; ``shapes`` are those of its attention calls."""
        if dtype not in self.dtypes:
            names = " and ".join(str(x).removeprefix("torch.") for x in self.dtypes)
            yield f"computes in {names}, not {str(dtype).removeprefix('torch.')}"
        most = self.max_head_width or head_width
        if head_width % self.head_width_multiple or head_width > most:
            yield (
                f"takes heads of up to {most} channels in multiples of "
                f"{self.head_width_multiple}, not --kv-channels {head_width}"
            )
        if window is not None and not self.windows:
            yield "has no sliding window"
        if documents and not self.documents:
            yield "has no documents"
        for shape in shapes:
            rows = max(shape.num_queries, shape.num_keys) + _ROW_PADDING
            if isinstance(refusal := _batches(shape, range(shape.b), rows, self), str):
                yield f"cannot index {refusal.removesuffix('.')}"
                return

    def check_layout(self, **tensors: Tensor) -> None:
        """Raise ValueError for a tensor whose strides or offset the kernel cannot address."""
        for name, x in tensors.items():
            if x.stride(-1) != 1:
                raise ValueError(
                    f"{name} has strides {x.stride()}: the last dimension must be contiguous."
                )
            offsets = [x.storage_offset(), *x.stride()[:-1]]
            if any(offset * x.element_size() % self.alignment_bytes for offset in offsets):
                raise ValueError(
                    f"{name} starts at element {x.storage_offset()} with strides {x.stride()}: all "
                    f"of these but the last must be multiples of {self.alignment_bytes} bytes."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of one attention: q [s_q, b, h, d], k and v [s_k, b, g, d]."""

    num_queries: int
    num_keys: int
    b: int
    h: int
    g: int
    d: int

    @classmethod
    def of(cls, x: Qkv) -> "Shape":
        """The sizes of q, k and v; g must divide h."""
        (num_queries, b, h, d), (num_keys, _, g, _) = x.q.shape, x.k.shape
        assert h % g == 0, f"{h} query heads do not share {g} key-value heads evenly"
        assert x.k.shape == x.v.shape == (num_keys, b, g, d), [y.shape for y in x]
        return cls(num_queries=num_queries, num_keys=num_keys, b=b, h=h, g=g, d=d)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a kernel on a part of the tensors, which is never empty."""

    samples: slice
    heads: slice
    kv_heads: slice
    queries: slice
    keys: slice
    causal: bool
    window: int | None
    scale: float
    run: Run | None
    """Several segments of one sample, by cumulative lengths; None is one segment per sample."""

    def of_queries(self, x: Tensor) -> Tensor:
        """Its part of [s_q, b, h, d], a view."""
        return x[self.queries, self.samples, self.heads]

    def shape(self, d: int) -> Shape:
        """Its sizes, with heads of width ``d``."""
        parts = self.samples, self.heads, self.kv_heads, self.queries, self.keys
        b, h, g, num_queries, num_keys = (part.stop - part.start for part in parts)
        return Shape(num_queries=num_queries, num_keys=num_keys, b=b, h=h, g=g, d=d)

    def of(self, x: Triple) -> Triple:
        """Its parts of q, k and v, or of their gradients, as views."""
        q, *keys_and_values = x
        parts = (y[self.keys, self.samples, self.kv_heads] for y in keys_and_values)
        return type(x)(self.of_queries(q), *parts)


def split_calls(shape: Shape, mask: Mask, limits: Limits) -> list[Call]:
    """The calls that together are attention of ``shape`` under ``mask``.

    Segments without queries or without keys are in none of them. The scale of scores is the
    mask's, or 1 / sqrt(d).

    Raises:
        ValueError: if a single head, or the heads of one key-value head, are too large for a call.
    """
    # Samples, rows of q, rows of k, and the segments in them if they are several.
    parts: list[tuple[range, slice, slice, Run | None]] = []
    if mask.segments is None:
        rows = slice(0, shape.num_queries), slice(0, shape.num_keys)
        parts = [(range(shape.b), *rows, None)]
    else:
        assert len(mask.segments) == shape.b, (len(mask.segments), shape.b)
        for sample, segments in enumerate(mask.segments):
            ends = segments.queries[-1], segments.keys[-1]
            assert ends == (shape.num_queries, shape.num_keys), (ends, shape)
            for run in segments.runs if limits.joins_segments else segments.singles:
                several = run if len(run.queries) > 2 else None
                rows = slice(run.queries[0], run.queries[-1]), slice(run.keys[0], run.keys[-1])
                parts.append((range(sample, sample + 1), *rows, several))
    share = shape.h // shape.g
    calls = []
    for samples, queries, keys, run in parts:
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        # Kernels disagree on where the diagonal of a causal mask is, unless it is square.
        assert run is not None or not mask.causal or num_queries == num_keys, (queries, keys)
        rows = max(num_queries, num_keys) + _ROW_PADDING * (len(run.queries) - 1 if run else 1)
        # A window of a whole segment hides nothing: plain causal attention is the faster kernel.
        longest = run.longest[1] if run else num_keys
        batches = _batches(shape, samples, rows, limits)
        if isinstance(batches, str):
            raise ValueError(batches)
        for call_samples, kv_heads in batches:
            calls.append(
                Call(
                    samples=call_samples,
                    heads=slice(kv_heads.start * share, kv_heads.stop * share),
                    kv_heads=kv_heads,
                    queries=queries,
                    keys=keys,
                    causal=mask.causal,
                    window=mask.window if mask.window and mask.window < longest else None,
                    scale=shape.d**-0.5 if mask.scale is None else mask.scale,
                    run=run,
                )
            )
    return calls


def _batches(
    shape: Shape, samples: range, rows: int, limits: Limits
) -> list[tuple[slice, slice]] | str:
    """Samples and key-value heads of each call: all at once, or as many as indices allow.

    Or, if no split of heads makes ``rows``, padding included, small enough: why.
    """
    padding = limits.head_width_padding
    head = rows * (-(-shape.d // padding) * padding)  # elements of one head, as kernels index it
    is_limited = limits.indexes_heads_in_32_bits or limits.indexes_calls_in_32_bits
    if not is_limited or len(samples) * shape.h * head < INDEX_LIMIT:
        return [(slice(samples.start, samples.stop), slice(0, shape.g))]
    # The query heads of one key-value head stay together: the kernel sums their dK and dV.
    share, step, heads = shape.h // shape.g, shape.g, 1
    if limits.indexes_calls_in_32_bits:
        step, heads = (INDEX_LIMIT - 1) // (share * head), share
    if heads * head >= INDEX_LIMIT:
        fewer = "fewer --cp-heads-per-chunk or " if heads > 1 else ""
        return (
            f"{rows} rows x {shape.d} channels x {heads} heads are {heads * head} elements, and "
            f"the kernel's limit is {INDEX_LIMIT}; give {fewer}more ring ranks."
        )
    return [
        (slice(sample, sample + 1), slice(first, min(first + step, shape.g)))
        for sample in samples
        for first in range(0, shape.g, step)
    ]


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Consecutive rows of q and all rows of k that any of them sees."""

    queries: slice
    keys: slice
    hidden: Tensor | None
    """Bool [queries, keys]: True where a query does not see a key; None if it sees all of them."""


def query_blocks(
    num_queries: int, call: Call, block_size: int, device: torch.device
) -> Iterator[QueryBlock]:
    """Split the queries of a call of one segment into blocks of ``block_size``."""
    for first in range(0, num_queries, block_size):
        queries = slice(first, min(first + block_size, num_queries))
        if not call.causal:
            yield QueryBlock(queries, slice(0, call.keys.stop - call.keys.start), None)
            continue
        # A causal query sees no key after its own position, and a window ends there.
        keys = slice(max(0, first + 1 - (call.window or queries.stop)), queries.stop)
        rows, columns = (torch.arange(x.start, x.stop, device=device) for x in (queries, keys))
        distance = rows[:, None] - columns[None, :]  # [queries, keys]
        hidden = distance < 0
        if call.window is not None:
            hidden |= distance >= call.window
        yield QueryBlock(queries, keys, hidden)
