"""The megatron-core module for the ``self_attention`` slot of the standard transformer layer.

It holds q, k, v and the output whole. The streamed layer uses the same attention without them:
:mod:`megatron_untied.streaming.layer`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from typing_extensions import override

from megatron_untied.context_parallel.exchange import HeadChunks, blocks
from megatron_untied.context_parallel.head_schedule import head_schedule
from megatron_untied.context_parallel.kernels import AttentionKernel, Mask, Qkv, QkvGrads
from megatron_untied.context_parallel.ring import Ring, RingAttention
from megatron_untied.context_parallel.sequence import SequenceInfo, SequenceLayout
from megatron_untied.context_parallel.ulysses import (
    Attention,
    LogSumExps,
    Projections,
    SavedAttention,
    UntiedUlysses,
)
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.phases import MemoryCategory, Phase, allocating
from megatron_untied.rope import RotaryTable, rotate_
from megatron_untied.step_progress import StepProgress

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of the positions of this rank's tokens: fp32 [n, b or 1, 1, rot/2] each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionContext:
    """What all attention modules of one model share; the layer spec passes it to each."""

    layout: SequenceLayout
    ulysses: dist.ProcessGroup | None
    """The a ranks that exchange tokens for heads; None for one rank."""
    ring: Ring | None
    """The r ranks that hold other tokens of the same heads; None for one rank."""
    heads_per_chunk: int | Literal["all"]
    overlap: bool
    kernel: AttentionKernel
    window: int | None
    """Keys a query sees, its own included; None is all before it."""
    rotary: RotaryTable | None
    """None if each sequence brings its own rotation."""
    workspace: Workspace
    progress: StepProgress = field(default_factory=StepProgress)
    """Position within the step; passed by the training loop."""

    def __post_init__(self) -> None:
        if self.window is not None and self.ring is not None:
            raise ValueError(
                f"a window of {self.window} keys needs the whole sequence on each rank, and a ring "
                "splits it; use --cp-comm-type a2a, or no --window-size."
            )

    def cos_sin(self, sequence: SequenceInfo, device: torch.device, n: int) -> Rotary:
        """Rotation of this rank's n tokens."""
        if sequence.cos_sin is not None:
            return sequence.cos_sin
        with allocating(MemoryCategory.INPUTS):
            positions = sequence.positions
            if positions is None:
                positions = self.layout.positions(n, device)
            return self.rotary.at(positions)


class UntiedUlyssesSelfAttention(SelfAttention):
    """Self-attention with head-chunked context parallelism: [n, b, m] -> [n, b, m].

    Projections, query and key norms and their sharding are megatron-core's. This class replaces
    attention over the context-parallel ranks, and rotates q and k with the rotary table of this
    rank's own tokens.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        *,
        context: AttentionContext,
        **core_arguments: object,
    ):
        """``core_arguments``: megatron-core's other ones, after 0.16 also new ones (``name``)."""
        super().__init__(config, submodules, layer_number, **core_arguments)
        self.use(context)

    def use(self, context: AttentionContext) -> None:
        """Attend as ``context`` says from now on; between steps, and in all layers alike."""
        self.context = context
        num_ulysses = context.ulysses.size() if context.ulysses else 1
        schedule = head_schedule(
            self.num_attention_heads_per_partition,
            self.num_query_groups_per_partition,
            num_ulysses,
            context.heads_per_chunk,
            overlap=context.overlap and num_ulysses > 1,
        )
        self.ulysses = UntiedUlysses(
            schedule,
            self.hidden_size_per_attention_head,
            context.ulysses,
            context.workspace,
            context.progress.for_layer(
                self.layer_number - 1, self.config.num_layers, len(schedule.chunks)
            ),
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: SequenceInfo | None = None,
        **unused_arguments: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Output and bias of the output projection: [n, b, m] and [m] or None.

        ``attention_mask`` and megatron-core's rotary arguments are not used: the mask is causal,
        and no s x s tensor is ever materialized.
        """
        sequence = SequenceInfo.from_slot(packed_seq_params)
        x = Qkv(*self.get_query_key_value_tensors(hidden_states))  # [n, b, heads, d] each
        rotary = self.context.cos_sin(sequence, x.q.device, len(x.q))
        attention = self.attention_over(sequence)
        out = AttentionFunction.apply(*x, rotary, lambda: (self.ulysses, attention))
        return self.linear_proj(out.flatten(2))

    def attention_over(self, sequence: SequenceInfo) -> Attention:
        """Attention of this rank's heads over the whole sequence."""
        context = self.context
        mask = Mask(window=context.window, segments=sequence.documents)
        if context.ring is None:
            return Attention(context.kernel, mask)
        return RingAttention(
            context.kernel,
            mask,
            context.ring,
            context.workspace,
            context.progress,
            overlap=context.overlap,
        )


class AttentionFunction(torch.autograd.Function):
    """q, k, v [n, b, heads, d], not yet rotated -> attention output [n, b, h, d]. Collective."""

    @staticmethod
    def forward(
        ctx, q, k, v, rotary: Rotary, loop: Callable[[], tuple[UntiedUlysses, Attention]]
    ) -> Tensor:
        """``loop`` is asked once in each pass, so that buffers need not outlive one."""
        out, ctx.lse = attention_forward(Qkv(q, k, v), rotary, *loop())
        ctx.save_for_backward(q, k, v, out)
        ctx.rotary, ctx.loop = rotary, loop
        return out

    @staticmethod
    def backward(ctx, d_out: Tensor):
        """d_out [n, b, h, d] -> gradients of q, k, v."""
        *qkv, out = ctx.saved_tensors
        grads = attention_backward(d_out, Qkv(*qkv), (out, ctx.lse), ctx.rotary, *ctx.loop())
        return *grads, None, None


def attention_forward(
    x: Qkv, rotary: Rotary, ulysses: UntiedUlysses, attention: Attention
) -> tuple[Tensor, LogSumExps]:
    """Attention output [n, b, h, d] of this rank's tokens, and log-sum-exps. Collective.

    ``x`` is sequence-sharded, [n, b, heads, d] each, and not yet rotated.
    """
    source = FinishedProjections(x, rotary)
    sizes = ulysses.sizes(source, attention)
    slots = HeadChunks.in_workspace("out", sizes, ulysses.workspace, x.q.device)
    with ulysses.progress.phase(Phase.ATTENTION_FORWARD):
        lse = ulysses.forward(source, slots, attention)
    return slots.rows([slice(0, len(x.q))]), lse


def attention_backward(
    d_out: Tensor,
    x: Qkv,
    y: tuple[Tensor, LogSumExps],
    rotary: Rotary,
    ulysses: UntiedUlysses,
    attention: Attention,
) -> QkvGrads:
    """Gradients of q [n, b, h, d] and k, v [n, b, g, d] from ``d_out`` [n, b, h, d]. Collective.

    ``y`` is the result of :func:`attention_forward`.
    """
    source, (out, lse), everything = FinishedProjections(x, rotary), y, slice(0, len(x.q))
    sizes = ulysses.sizes(source, attention)
    slots, grad = (
        HeadChunks.in_workspace(name, sizes, ulysses.workspace, x.q.device)
        for name in ("out", "d_out")
    )
    slots.write(everything, out)
    grad.write(everything, d_out)
    with ulysses.progress.phase(Phase.ATTENTION_BACKWARD):
        dk, dv = ulysses.backward(source, SavedAttention(slots, lse), grad, attention).total
    dq = rotate_(grad.rows([everything]), *rotary, adjoint=True)  # received over dO
    dk = rotate_(dk, *rotary, adjoint=True)
    return QkvGrads(dq, dk.to(x.k.dtype), dv.to(x.v.dtype))


class FinishedProjections(Projections):
    """Projections that exist as whole tensors, rotated while they are copied to send buffers."""

    def __init__(self, x: Qkv, rotary: Rotary):
        """``x``: [n, b, heads, d] each, not yet rotated."""
        self.x, self.rotary = x, rotary
        (self.n, self.b, _, self.d), self.dtype, self.device = x.q.shape, x.q.dtype, x.q.device

    @override
    def write(self, kind: Literal["q", "k", "v"], heads: Sequence[range], send: Tensor) -> None:
        x = getattr(self.x, kind)
        views = blocks(send, list(map(len, heads)), self.n, self.b, self.d)
        for rank_heads, view in zip(heads, views, strict=True):
            part = x[:, :, rank_heads.start : rank_heads.stop]  # [n, b, heads of the rank, d]
            if kind == "v":
                view.copy_(part)
            else:
                rotate_(part, *self.rotary, out=view)
