"""The parts that work without the trainer: attention, streamed layers and token shards.

The third part, ``chunked_cross_entropy``, needs nothing around it and is exported from
:mod:`megatron_untied.loss`. All three are attributes of ``megatron_untied``.

Letters in shapes: n tokens per rank, s = n * p tokens of the sequence over p context-parallel
ranks, b micro-batch, h query heads, g key-value heads, d head width, m hidden size.
"""

import functools
from collections.abc import Sequence
from typing import Literal

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_untied.backends import choose_backend
from megatron_untied.config import MemoryConfig, ParallelConfig, RotaryConfig
from megatron_untied.context_parallel.head_schedule import head_schedule
from megatron_untied.context_parallel.kernels import Mask, Segments, choose_kernel
from megatron_untied.context_parallel.ring import Ring, RingAttention
from megatron_untied.context_parallel.self_attention import (
    AttentionContext,
    AttentionFunction,
    Rotary,
)
from megatron_untied.context_parallel.sequence import SequenceInfo, SequenceLayout
from megatron_untied.context_parallel.ulysses import Attention, UntiedUlysses
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.megatron_lm.limits import check_config
from megatron_untied.model import context_parallel_groups, layer_spec
from megatron_untied.platform.device import current_device
from megatron_untied.rope import RotaryTable
from megatron_untied.streaming.host_arena import HostArena

_kernel = functools.lru_cache(choose_kernel)  # a kernel that is missing is looked for once


def sequence_layout(
    group: ProcessGroup | None = None, ring_group: ProcessGroup | None = None
) -> SequenceLayout:
    """Which tokens of the sequence this rank holds.

    ``layout.shard(x, dim)`` is this rank's part of a whole sequence, ``layout.positions(n)`` the
    positions of its n tokens, int64 [n]. Without a ring rank i holds tokens i*n .. (i+1)*n. With a
    ring each rank holds an early and a late part, so that causal work is even.

    Args:
        group: the Ulysses ranks; None is this rank alone.
        ring_group: the ring ranks; None is this rank alone.
    """
    num_ulysses, ulysses_rank = (group.size(), group.rank()) if group else (1, 0)
    num_ring, ring_rank = (ring_group.size(), ring_group.rank()) if ring_group else (1, 0)
    rank = ring_rank * num_ulysses + ulysses_rank
    return SequenceLayout(num_ulysses=num_ulysses, num_ring=num_ring, rank=rank)


def untied_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None = None,
    ring_group: ProcessGroup | None = None,
    heads_per_chunk: int | Literal["all"] | None = None,
    overlap: bool = True,
    window: int | None = None,
    documents: Sequence[Sequence[int]] | None = None,
    rotary: Rotary | None = None,
) -> Tensor:
    """Causal attention over a sequence that is sharded over ranks, differentiable in q, k and v.

    A few heads at a time are exchanged for the whole sequence, attended to, and sent back. Between
    forward and backward q, k, v, the output and the log-sum-exps are kept; all buffers are freed.
    Forward and backward are collective over ``group`` and ``ring_group``: every rank calls with
    the same n, b, number of heads and options.

    Example:
        ```python
        layout = megatron_untied.sequence_layout(group)
        q, k, v = (layout.shard(x, dim=0).requires_grad_() for x in whole_sequence)
        out = megatron_untied.untied_attention(q, k, v, group=group, heads_per_chunk=4)
        ```

    Args:
        q: [n, b, h, d], this rank's tokens of all heads, as ``sequence_layout`` deals them.
        k: [n, b, g, d]; g divides h.
        v: [n, b, g, d].
        group: the Ulysses ranks, which trade tokens for heads; None is this rank alone.
        ring_group: the ring ranks, which hold other tokens of the same heads; None is this rank
            alone. Together the two groups hold the sequence.
        heads_per_chunk: query heads exchanged at a time over all Ulysses ranks, a multiple of
            their number. None is one head per rank, the least memory; "all" is one exchange.
        overlap: exchange the next chunk while this one attends, for a second set of buffers.
        window: keys that a query sees, itself included; None is all before it.
        documents: for each of the b samples the bounds of its documents in the whole sequence,
            0 first and s last: tokens see their own document only. None is one document each.
        rotary: cosines and sines of the positions of this rank's tokens, fp32 [n, b or 1, 1,
            rot/2] each, by which q and k are rotated on their way, without a copy; see
            ``megatron_untied.rope.RotaryTable``. None: q and k are used as they are.

    Returns:
        [n, b, h, d], this rank's tokens.

    Raises:
        ValueError: for shapes, dtypes or options that do not fit together, before any collective.
    """
    layout = sequence_layout(group, ring_group)
    _check_qkv(q, k, v, layout)
    n, b, h, d = q.shape
    if window is not None and ring_group is not None:
        raise ValueError(
            f"window {window} needs the whole sequence of a head on one rank, and ring_group has "
            f"{layout.num_ring} ranks; give group alone."
        )
    mask = Mask(window=window, segments=_segments(documents, b, n * layout.size))
    kernel = _kernel(
        "auto", q.device, dtype=q.dtype, head_width=d, window=window, documents=bool(documents)
    )
    schedule = head_schedule(
        h,
        k.shape[2],
        layout.num_ulysses,
        heads_per_chunk or layout.num_ulysses,
        # One rank exchanges nothing: a second set of buffers would hide nothing.
        overlap=overlap and layout.num_ulysses > 1,
    )
    if rotary is None:
        rotary = (q.new_empty(n, 1, 1, 0),) * 2  # nothing of a head is rotated
    elif any(x.shape[0] != n or x.shape[1] not in (1, b) for x in rotary):
        shapes = " and ".join(str(list(x.shape)) for x in rotary)
        raise ValueError(f"rotary is {shapes}; q {list(q.shape)} needs [{n}, 1 or {b}, 1, rot/2].")

    def loop() -> tuple[UntiedUlysses, Attention]:
        # New in each pass: a workspace that autograd held would keep all chunk buffers of every
        # call until its backward. A model's layers share one instead.
        workspace = Workspace()
        ulysses = UntiedUlysses(schedule, d, group, workspace)
        if ring_group is None:
            return ulysses, Attention(kernel, mask)
        ring = Ring(ring_group)
        return ulysses, RingAttention(kernel, mask, ring, workspace, overlap=overlap)

    return AttentionFunction.apply(q, k, v, rotary, loop)


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if any(x.dim() != 4 for x in (q, k, v)) or k.shape != v.shape:
        raise ValueError(f"{shapes}; give [n, b, heads, d], and k and v of the same shape.")
    if (*q.shape[:2], q.shape[3]) != (*k.shape[:2], k.shape[3]):
        raise ValueError(f"{shapes}; only the number of heads may differ.")
    if len({(x.dtype, x.device) for x in (q, k, v)}) > 1:
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise ValueError(f"q, k, v are {kinds}; give one dtype on one device.")
    layout.check_length(q.shape[0] * layout.size)


def _segments(
    documents: Sequence[Sequence[int]] | None, b: int, s: int
) -> tuple[Segments, ...] | None:
    if documents is None:
        return None
    if len(documents) != b:
        raise ValueError(f"documents has bounds of {len(documents)} samples; the batch has {b}.")
    for sample, bounds in enumerate(documents):
        ends = tuple(bounds[:1]), tuple(bounds[-1:])
        if ends != ((0,), (s,)) or list(bounds) != sorted(bounds):
            raise ValueError(
                f"documents[{sample}] is {list(bounds)}; give bounds that begin with 0, rise, and "
                f"end with the {s} tokens of the sequence."
            )
    return tuple(Segments.of(bounds) for bounds in documents)


class StreamedLayers(nn.ModuleList):
    """Streamed transformer layers one after the other; see ``streamed_layers``."""

    def forward(self, hidden_states: Tensor, sequence: SequenceInfo | None = None) -> Tensor:
        """[n, b, m] -> [n, b, m], in the same memory.

        Args:
            hidden_states: this rank's tokens, contiguous. **They are overwritten**: nothing else
                may read them afterwards, not even for its own backward.
            sequence: positions and documents of the batch, where they are not plain.
        """
        for layer in self:
            hidden_states, _ = layer(hidden_states, packed_seq_params=sequence)
        return hidden_states


def streamed_layers(
    config: TransformerConfig,
    *,
    heads_per_chunk: int | Literal["all"] | None = None,
    overlap: bool = True,
    memory: MemoryConfig | None = None,
    rotary: RotaryConfig | None = None,
    documents: bool = False,
) -> StreamedLayers:
    """A stack of ``config.num_layers`` layers whose activations take memory by tile, not by token.

    Each layer is megatron-core's, with head-chunked attention; its residual is updated in place,
    its token-wise parts run tile by tile, and its backward recomputes. Parameters have
    megatron-core's names, and get fp32 gradients. They are drawn by the config's ``init_method``
    on the current device.

    megatron-core's parallel state must be initialized; the layers take the tensor-parallel and
    context-parallel groups from it. Sequences are sharded as ``sequence_layout`` does for the
    context-parallel group: as ``group``, or with ``cp_comm_type="p2p"`` as ``ring_group``.

    Example:
        ```python
        layers = megatron_untied.streamed_layers(config, memory=MemoryConfig(
            recompute_granularity="selective", cpu_offloading_num_layers=config.num_layers))
        hidden = layers(embedding(tokens))  # [n, b, m], in the embedding's memory
        ```

    Args:
        config: megatron-core's, with ``hidden_dropout=0``, ``attention_dropout=0`` and, for the
            layers of transformer_impl "local", ``use_cpu_initialization=True``.
        heads_per_chunk: as in ``untied_attention``.
        overlap: as in ``untied_attention``.
        memory: what is kept for backward, and where. None keeps each layer's input on the device.
        rotary: rotary position embedding; None is that of base 10,000 over the whole head.
        documents: whether forward is given documents, which not every attention kernel can do.

    Raises:
        ValueError: for what the config or ``memory`` asks and these layers do not do.
    """
    memory = memory or MemoryConfig(recompute_granularity="full")
    if memory.recompute_granularity not in ("full", "selective"):
        raise ValueError(
            f"recompute_granularity {memory.recompute_granularity!r} is not what a streamed layer "
            "does; give 'full' or 'selective'."
        )
    if memory.loss_chunk_size is not None:
        raise ValueError(
            f"loss_chunk_size {memory.loss_chunk_size} has no effect in a layer; give chunk_size "
            "to chunked_cross_entropy."
        )
    check_config(config, streamed=True)
    groups = _groups_of(config)
    parallel = ParallelConfig(
        context_parallel_size=groups.cp.size(), cp_comm_type=config.cp_comm_type or "a2a"
    )
    ulysses, ring = context_parallel_groups(parallel, groups)
    layout = sequence_layout(ulysses, ring)
    # megatron-core counts the keys before a query; our windows include the query's own.
    window = None if config.window_size is None else config.window_size[0] + 1
    context = AttentionContext(
        layout=layout,
        ulysses=ulysses,
        ring=ring and Ring(ring),
        heads_per_chunk=heads_per_chunk or layout.num_ulysses,
        overlap=overlap,
        kernel=choose_kernel(
            config.attention_backend.name,
            current_device(),
            dtype=config.params_dtype,
            head_width=config.kv_channels,
            window=window,
            documents=documents,
        ),
        window=window,
        rotary=RotaryTable(rotary or RotaryConfig(), config.kv_channels),
        workspace=Workspace(),
    )
    backend = choose_backend(config.transformer_impl, config.normalization)
    arena = HostArena.for_device(current_device(), memory)
    # One context and one store for all layers: they take turns in the same buffers, and a layer's
    # input may be recomputed from one kept several layers before.
    spec = layer_spec(config, backend, context, memory, arena)
    return StreamedLayers(
        build_module(spec, config=config, layer_number=i + 1, pg_collection=groups)
        for i in range(config.num_layers)
    )


def _groups_of(config: TransformerConfig) -> ProcessGroupCollection:
    """The groups of megatron-core's parallel state, which must be of the config's sizes."""
    if not parallel_state.model_parallel_is_initialized():
        raise ValueError(
            "megatron-core has no process groups; call parallel_state.initialize_model_parallel "
            "first."
        )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    sizes = {"context_parallel_size": groups.cp, "tensor_model_parallel_size": groups.tp}
    for name, group in sizes.items():
        if getattr(config, name) != group.size():
            raise ValueError(
                f"the config's {name} is {getattr(config, name)} and the parallel state has "
                f"{group.size()} ranks; give both the same."
            )
    return groups
