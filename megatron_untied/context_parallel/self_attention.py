"""The megatron-core module for the ``self_attention`` slot of the standard transformer layer."""

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_untied.context_parallel.all_to_all import blocks
from megatron_untied.context_parallel.attend import LocalAttention
from megatron_untied.context_parallel.head_major import (
    DeviceHeadMajor,
    HeadMajorShape,
)
from megatron_untied.context_parallel.head_schedule import head_schedule
from megatron_untied.context_parallel.kernels import AttentionKernel, Mask
from megatron_untied.context_parallel.layout import SequenceLayout
from megatron_untied.context_parallel.ring import Ring, RingAttention
from megatron_untied.context_parallel.sequence import SequenceInfo
from megatron_untied.context_parallel.untied import Attend, UntiedUlysses
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.phases import MemoryCategory, Phase, allocating
from megatron_untied.rope import RotaryTable, rotate_
from megatron_untied.step_progress import StepProgress


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionParts:
    """What all attention modules of one model share; the layer spec hands it to each."""

    layout: SequenceLayout
    ulysses: dist.ProcessGroup | None
    """Ranks that trade their part of the sequence for heads; None is this one alone."""
    ring: Ring | None
    """Ranks that hold other blocks of the same heads; None is this one alone."""
    heads_per_chunk: int | Literal["all"]
    overlap: bool
    kernel: AttentionKernel
    window: int | None
    """Keys a query sees, itself included; None is all before it."""
    rotary: RotaryTable | None
    """None where each sequence brings what it is rotated by."""
    workspace: Workspace
    progress: StepProgress = field(default_factory=StepProgress)
    """Where the step is; passed by the training loop."""

    def __post_init__(self) -> None:
        if self.window is not None and self.ring is not None:
            raise ValueError(
                f"a window of {self.window} keys needs the whole sequence on a rank, and a ring "
                "passes it on in blocks; give --cp-comm-type a2a, or no --window-size."
            )

    def cos_sin(self, sequence: SequenceInfo, like: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Rows of the rotary table for this rank's n tokens, on the device of ``like``."""
        if sequence.cos_sin is not None:
            return sequence.cos_sin
        with allocating(MemoryCategory.INPUTS):
            positions = sequence.positions
            if positions is None:
                positions = self.layout.positions(n, like.device)
            return self.rotary.at(positions)


class UntiedUlyssesSelfAttention(SelfAttention):
    """Self-attention with head-chunked context parallelism: [n, b, m] -> [n, b, m].

    Projections, query and key norms and their sharding are megatron-core's; what is ours is how
    attention itself runs over the context-parallel ranks, and that q and k are rotated with the
    rotary table of this rank's own tokens.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        parts: AttentionParts,
        **later_arguments: object,
    ):
        """``later_arguments`` are those that megatron-core after 0.16 also gives."""
        super().__init__(
            config,
            submodules,
            layer_number,
            attn_mask_type,
            cp_comm_type,
            pg_collection,
            **later_arguments,
        )
        self.parts = parts
        num_ulysses = parts.ulysses.size() if parts.ulysses else 1
        schedule = head_schedule(
            self.num_attention_heads_per_partition,
            self.num_query_groups_per_partition,
            num_ulysses,
            parts.heads_per_chunk,
            overlap=parts.overlap and num_ulysses > 1,
        )
        self.ulysses = UntiedUlysses(
            schedule,
            self.hidden_size_per_attention_head,
            parts.ulysses,
            parts.workspace,
            parts.progress.of_layer(layer_number - 1, config.num_layers, len(schedule.chunks)),
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: SequenceInfo | None = None,
        **slot_arguments: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Output and bias of the projection back: [n, b, m] and [m] or None.

        ``attention_mask`` and megatron-core's rotary arguments are not used: the mask is causal,
        and an s x s tensor exists nowhere.
        """
        sequence = SequenceInfo.from_slot(packed_seq_params)
        q, k, v = self.get_query_key_value_tensors(hidden_states)  # [n, b, heads, d] each
        cos, sin = self.parts.cos_sin(sequence, q, len(q))
        attend = self.attention_over(sequence)
        out = _UntiedAttention.apply(q, k, v, cos, sin, self.ulysses, attend)
        return self.linear_proj(out.flatten(2))

    def attention_over(self, sequence: SequenceInfo) -> Attend:
        """Attention of this rank's heads over the whole sequence."""
        parts, documents = self.parts, sequence.documents
        scale = self.hidden_size_per_attention_head**-0.5
        if parts.ring is None:
            mask = Mask(window=parts.window, segments=documents)
            return LocalAttention(parts.kernel, mask, scale)
        return RingAttention(
            parts.kernel,
            parts.ring,
            parts.workspace,
            documents=documents,
            scale=scale,
            progress=parts.progress,
        )


class _UntiedAttention(torch.autograd.Function):
    """q, k, v [n, b, heads, d], not yet rotated -> attention output [n, b, h, d]."""

    @staticmethod
    def forward(ctx, q, k, v, cos, sin, ulysses: UntiedUlysses, attend: Attend) -> Tensor:
        out, ctx.lse = attention_forward(q, k, v, cos, sin, ulysses, attend)
        ctx.save_for_backward(q, k, v, out)
        ctx.rotary, ctx.ulysses, ctx.attend = (cos, sin), ulysses, attend
        return out

    @staticmethod
    def backward(ctx, d_out: Tensor):
        dq, dk, dv = attention_backward(
            d_out, *ctx.saved_tensors, ctx.lse, *ctx.rotary, ctx.ulysses, ctx.attend
        )
        return dq, dk, dv, None, None, None, None


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    ulysses: UntiedUlysses,
    attend: Attend,
) -> tuple[Tensor, list[list[Tensor]]]:
    """Attention output [n, b, h, d] of this rank's tokens, and log-sum-exps. Collective."""
    slots = _head_major("out", q, ulysses)
    with ulysses.progress.phase(Phase.ATTENTION_FORWARD):
        lse = ulysses.forward(FinishedProjections(q, k, v, cos, sin), slots, attend)
    return slots.rows([slice(0, len(q))]), lse


def attention_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: list[list[Tensor]],
    cos: Tensor,
    sin: Tensor,
    ulysses: UntiedUlysses,
    attend: Attend,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, each of its own shape. Collective."""
    slots, grad = _head_major("out", q, ulysses), _head_major("grad", q, ulysses)
    everything = slice(0, len(q))
    slots.write(everything, out)
    grad.write(everything, d_out)
    source = FinishedProjections(q, k, v, cos, sin)
    with ulysses.progress.phase(Phase.ATTENTION_BACKWARD):
        dk, dv = ulysses.backward(source, slots, lse, grad, attend)
    dq = grad.rows([everything])
    dq, dk = (rotate_(x, cos, sin, adjoint=True) for x in (dq, dk))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


class FinishedProjections:
    """Projections that exist as whole tensors; rotated on their way into the send buffer."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor):
        self.tensors = {"q": q, "k": k, "v": v}
        self.rotary = cos, sin
        self.n, self.b, self.like = q.shape[0], q.shape[1], q

    def write(self, kind, heads, send) -> None:
        """See :class:`.chunk_loader.Projections`."""
        counts = [len(its) for its in heads]
        views = blocks(send, counts, self.n, self.b, self.tensors[kind].shape[-1])
        for its, view in zip(heads, views, strict=True):
            x = self.tensors[kind][:, :, its.start : its.stop]
            if kind == "v":
                view.copy_(x)
            else:
                rotate_(x, *self.rotary, out=view)


def _head_major(name: str, like: Tensor, ulysses: UntiedUlysses) -> DeviceHeadMajor:
    n, b, _, d = like.shape
    shape = HeadMajorShape(ulysses.schedule, n, b, d)
    storage = ulysses.workspace.take(f"{name}_slots", shape.numel, like=like)
    return DeviceHeadMajor(storage, shape)
