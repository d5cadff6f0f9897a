"""GPTModel with a chunked loss, and the five places where this bends megatron-core.

Megatron-core's GPTModel normalizes all hidden states, computes all logits and then the loss: at
millions of tokens each of these tensors alone is larger than a GPU. Here the final norm, the output
projection and the loss run together on one chunk of tokens at a time. Megatron-core has no seam
for that, so this module holds everything that depends on how its classes work inside. Each point
was checked for megatron-core 0.16.1; recheck them when the pin moves.

- :class:`TiledEmbedding` becomes the class of the embedding, which GPTModel builds itself, where
  the residual is on the host.
- :class:`ChunkedLossGPTModel` overrides the private methods ``_preprocess`` and ``_postprocess`` of
  GPTModel. The second receives the decoder's output and calls :class:`Loss` instead of computing
  logits.
- :func:`deferred` builds the decoder's final norm so that a call returns its input unchanged; the
  loss normalizes by chunks with ``normalize``. The class of the built module is replaced, because
  transformer-engine's TENorm is a factory: its ``__new__`` returns an object of another class,
  which a subclass cannot intercept. Parameters and their names in checkpoints stay.
- :class:`Loss` is a module only because FSDP2 gathers weights around the forward of a module: it
  shares the unit of the output layer, so the output matrix is whole while the loss runs.
- :class:`NoCoreAttention` fills the ``core_attention`` slot of megatron-core's SelfAttention, which
  always builds one. Our self-attention never calls it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import (
    LanguageModelEmbedding,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from megatron_untied.context_parallel.self_attention import AttentionContext
from megatron_untied.context_parallel.sequence import SequenceInfo
from megatron_untied.dtypes import accumulation_dtype
from megatron_untied.loss.chunked_cross_entropy import (
    TokenScores,
    chunked_cross_entropy,
    token_scores,
)
from megatron_untied.phases import MemoryCategory, Phase, allocating
from megatron_untied.residual import Rows
from megatron_untied.step_progress import StepProgress
from megatron_untied.streaming.activation_store import ActivationStore
from megatron_untied.streaming.layer import MoveResidual, StreamedTransformerLayer
from megatron_untied.tiling import Tile


class ChunkedLossGPTModel(GPTModel):
    """A GPTModel that turns hidden states into a loss without ever holding all logits."""

    def __init__(
        self,
        *args,
        logical_vocab_size: int,
        loss_chunk_size: int | None,
        attention_context: AttentionContext,
        **kwargs,
    ):
        # Our attention rotates q and k itself: megatron-core makes no rotary table.
        super().__init__(*args, position_embedding_type="none", **kwargs)
        self.attention_context = attention_context
        first = self.decoder.layers[0]
        self.store = first.streaming.store if isinstance(first, StreamedTransformerLayer) else None
        if self.store is not None and self.store.policy.park:
            self.embedding.__class__ = TiledEmbedding
            self.embedding.store, self.embedding.tiles = self.store, first.tiles
        self.loss = Loss(
            {
                "vocab_size": logical_vocab_size,
                "chunk_size": loss_chunk_size,
                "tp_group": self.pg_collection.tp,
                "sequence_parallel": self.config.sequence_parallel,
            },
            attention_context.progress,
        )

    def describe(self) -> str:
        """The attention kernel in use, for the log."""
        return f"attention kernel {self.attention_context.kernel.name}"

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        token_weights: Tensor | None = None,
        sequence: SequenceInfo | None = None,
    ) -> Tensor | TokenScores:
        """The weighted sum of this rank's token losses, an fp32 scalar; without labels, logits.

        Args:
            tokens: int64 [b, n], this rank's shard.
            labels: int64 [b, n], the token that follows each.
            token_weights: fp32 [b, n]: 1 / (trained-on tokens of the global batch), or 0 where a
                token is not trained on. Losses and gradients then sum over all ranks.
            sequence: positions and documents of these sequences, if they are not plain.

        Returns:
            The loss, fp32 [], the same on every tensor-parallel rank; or logits [b, n, padded v/t].
            With labels and no ``token_weights``, loss and prediction of each token, which have no
            gradient.
        """
        return super().forward(
            tokens, None, None, labels=labels, loss_mask=token_weights, packed_seq_params=sequence
        )

    @override
    def _preprocess(self, *args, **kwargs) -> tuple:
        with allocating(MemoryCategory.RESIDUAL):  # the embedding's output
            return super()._preprocess(*args, **kwargs)

    @override
    def _postprocess(self, hidden_states, labels=None, loss_mask=None, **kwargs) -> Tensor:
        norm = self.decoder.final_layernorm
        if labels is None:
            if isinstance(self, FSDPModule) and torch.is_grad_enabled():
                raise ValueError(
                    "logits of a fully sharded model have no backward: its output matrix is "
                    "gathered in forward only. Compute them under torch.no_grad()."
                )
            if Rows.of(hidden_states).is_on_host:
                hidden_states = MoveResidual.apply(hidden_states, self.store, False)
            # [n, b, m] -> logits [b, n, v/t]
            return super()._postprocess(norm.normalize(hidden_states), labels=None, **kwargs)
        # Attention is over: the loss can use the memory of its buffers.
        self.attention_context.workspace.release()
        tied = self.share_embeddings_and_output_weights
        head = self.embedding.word_embeddings if tied else self.output_layer
        return self.loss(hidden_states, head, labels, loss_mask, norm)


class TiledEmbedding(LanguageModelEmbedding):
    """Megatron-core's embedding, which writes its output to the host tile by tile."""

    tiles: Callable[[int], list[Tile]]
    """Of a residual of so many rows on this rank."""
    store: ActivationStore

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """int64 [b, n] -> [n, b, m] or [n/t, b, m]; positions are not embedded."""
        return _TiledLookup.apply(self.word_embeddings.weight, input_ids, self)

    def lookup(self, input_ids: Tensor, tile: Tile) -> Tensor:
        """The rows of one tile, [t, b, m]. Collective over the tensor-parallel ranks."""
        ids = torch.cat([input_ids[:, run] for run in tile.seen], dim=1)
        return super().forward(ids, None)


class _TiledLookup(torch.autograd.Function):
    """The weight's gradient is summed in at least fp32, without the weight: it is not gathered."""

    @staticmethod
    def forward(ctx, weight: Tensor, input_ids: Tensor, embedding: TiledEmbedding) -> Tensor:
        if weight.requires_grad and weight.is_leaf:
            weight.grad_dtype = accumulation_dtype(weight.dtype)
        ctx.input_ids, ctx.embedding, ctx.shape = input_ids, embedding, weight.shape
        (b, n), config = input_ids.shape, embedding.config
        num_local = n // embedding.tp_group.size() if config.sequence_parallel else n
        # Only the shape counts: one element of memory.
        like = weight.new_empty(1).expand(num_local, b, weight.shape[1])
        rows, tiles = embedding.store.rows(Rows(like), on_host=True), embedding.tiles(num_local)
        for tile, out in zip(tiles, rows.outputs(tiles), strict=True):
            out.copy_(embedding.lookup(input_ids, tile))
        return rows.as_tensor()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        rows, words = Rows.of(gradient), ctx.embedding.word_embeddings
        with allocating(MemoryCategory.WEIGHT_GRADIENTS):
            total = gradient.new_zeros(ctx.shape, dtype=accumulation_dtype(gradient.dtype))
        tiles = ctx.embedding.tiles(rows.shape[0])
        for tile, part in zip(tiles, rows.tiles(tiles), strict=True):
            if ctx.embedding.config.sequence_parallel:
                part = gather_from_sequence_parallel_region(part, group=ctx.embedding.tp_group)
            ids = torch.cat([ctx.input_ids[:, run] for run in tile.seen], dim=1)
            ids = ids.t().flatten() - words.vocab_start_index  # [t * b], as the rows of ``part``
            part = part.flatten(0, 1).to(total.dtype)
            if ctx.embedding.tp_group.size() > 1:  # other ranks' tokens
                is_ours = (ids >= 0) & (ids < len(total))
                ids, part = ids.where(is_ours, 0), part.where(is_ours[:, None], 0)
            total.index_add_(0, ids, part)
        rows.release()
        return total, None, None


class Loss(nn.Module):
    """A loss as a module, so that full sharding can gather the output matrix for the call."""

    def __init__(self, settings: Mapping[str, Any], progress: StepProgress):
        """``settings``: arguments of :func:`chunked_cross_entropy`."""
        super().__init__()
        self.settings, self.progress = settings, progress

    def forward(
        self,
        hidden: Tensor,
        head: nn.Module,
        labels: Tensor,
        token_weights: Tensor | None,
        norm: nn.Module,
    ) -> Tensor | TokenScores:
        """[n, b, m] and labels [b, n] -> loss []; see :func:`chunked_cross_entropy`.

        Without weights :func:`token_scores`. ``head.weight`` is the output matrix, [padded v/t, m].
        It is read in here, since FSDP2 gathers it on entry: a tensor passed by the caller would be
        this rank's rows alone.
        """
        with self.progress.phase(Phase.LOSS):
            if token_weights is None:
                return token_scores(hidden, head.weight, labels, norm=norm, **self.settings)
            return chunked_cross_entropy(
                hidden, head.weight, labels, token_weights, norm=norm, **self.settings
            )


def deferred(norm: type[nn.Module]) -> type[nn.Module]:
    """``norm`` for the final norm's slot: a call returns its input, ``normalize`` normalizes.

    The loss calls ``normalize`` on [tokens of a chunk, m], so the normalized [n, b, m] never
    exists as a whole.
    """

    class Deferred:
        def __new__(cls, **arguments: Any) -> nn.Module:
            built = norm(**arguments)  # TENorm chooses the class of what it returns by the config
            built.__class__ = type(type(built).__name__, (_DeferredNorm, type(built)), {})
            return built

    return Deferred


class _DeferredNorm:
    def forward(self, x: Tensor) -> Tensor:
        return x

    def normalize(self, x: Tensor) -> Tensor:
        return super().forward(x)


class NoCoreAttention(nn.Module):
    """Fills a slot that megatron-core's SelfAttention always builds."""

    def __init__(self, **unused_kwargs: object):  # the arguments of a core attention
        super().__init__()
