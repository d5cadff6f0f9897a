"""The loss of a language-model head, one chunk of tokens at a time.

Logits are the largest tensor of a long sequence: 313 GiB per rank in fp32 for 5 Mi tokens over 8
ranks and a vocabulary of 128,256. Here a chunk's logits are computed, turned into the loss and into
both gradients, and freed before the next chunk's are computed, all in the forward pass.

Letters: n tokens of this rank (before sequence parallelism splits them), b micro-batch, m hidden
size, v padded vocabulary, t tensor-parallel ranks, c tokens of a chunk.

Live at the peak, beside the inputs:

- for each token of a chunk 4 v/t bytes of fp32 logits, over which their gradient is written, and
  in bf16 2 v/t more for the copy that enters the matrix products; with sequence parallelism also
  2m for the gathered hidden states and 2m for their gradient before it is reduced;
- for the whole call 4 m v/t bytes of weight gradient, from the start of forward to backward;
- for each token of the call 4 bytes of loss, and 8 more while the labels are checked.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron_untied.dtypes import accumulation_dtype
from megatron_untied.loss.vocabulary_split import VocabularySplit
from megatron_untied.matmul import add_product_, product
from megatron_untied.phases import MemoryCategory, allocating
from megatron_untied.residual import Rows
from megatron_untied.tiling import GradientSums, tile_backward, tiles_of


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    *,
    vocab_size: int,
    chunk_size: int | None = None,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    norm: nn.Module | None = None,
) -> Tensor:
    """Sum over tokens of token weight x cross-entropy: one scalar, equal on every TP rank.

    It is ``(F.cross_entropy(logits, labels, reduction="none") * token_weights).sum()`` with
    ``logits = (hidden @ weight.T)[..., :vocab_size]`` in fp32 (fp64 for fp64 inputs, and so is the
    result). Collective over ``tp_group``.

    .. warning::
        **If a gradient is needed, hidden is overwritten**: on return its storage holds its
        gradient, which backward returns. Pass a tensor that is not read again, such as the output
        of the final norm. If an earlier operation saved it for its own backward, autograd raises
        there ("modified by an inplace operation"); a later read is not detected. Hidden states on
        the host (:mod:`megatron_untied.residual`) pass the device a chunk at a time.

    The gradients are complete after forward. So each forward allows one backward, and evaluation
    belongs under ``torch.no_grad()``, which computes no gradient and leaves ``hidden`` intact.

    With ``norm`` the hidden states are normalized here, a chunk at a time, and are overwritten by
    the gradient of the residual, which so stays one storage from embedding to loss and back.

    ``weight.grad_dtype`` is set to fp32, so that a bf16 leaf receives its gradient as it was
    accumulated; with tied embeddings the embedding's gradient is added to it in fp32. All weights
    of one FSDP2 unit must have one such dtype.

    Args:
        hidden: [n, b, m], contiguous. With sequence parallelism [n/t, b, m]: positions from r*n/t
            on rank r.
        weight: [v/t, m], this TP rank's rows. Rows from ``vocab_size`` on, counted over all ranks,
            are padding: they are not in the softmax and get a zero gradient.
        labels: [b, n] int64, of all n positions.
        token_weights: [b, n] fp32. A token of weight 0 may have any label.
        vocab_size: tokens of the vocabulary, without padding.
        chunk_size: tokens (positions x b) whose logits are live at a time; None is all of them.
            With sequence parallelism a t-th part of them is from each rank, at least one.
        tp_group: the ranks that share the vocabulary; None if it is not split.
        sequence_parallel: gather ``hidden`` over ``tp_group`` and reduce-scatter its gradient, by
            chunks.
        norm: the final norm, to be applied first: a module with ``normalize``, see
            :func:`megatron_untied.gpt_model.deferred`. Its own gradients are summed in fp32.

    Raises:
        ValueError: for inconsistent shapes, and for a label outside the vocabulary on a token of
            nonzero weight. To check the labels, the host waits for the device once per call.
            Under FakeTensorMode they have no values and are not checked.
    """
    split = VocabularySplit.of(
        weight, vocab_size=vocab_size, group=tp_group, sequence_parallel=sequence_parallel
    )
    _check_shapes(hidden, labels, token_weights, split)
    _check_labels(labels, token_weights, vocab_size)
    inputs = _Inputs(
        hidden,
        weight,
        split.by_hidden_row(labels),
        split.by_hidden_row(token_weights).to(accumulation_dtype(hidden.dtype)),
        split,
        _rows_per_chunk(hidden, chunk_size, split),
        norm,
    )
    norm_parameters = [] if norm is None else list(norm.parameters())
    leaves = [x for x in (weight, *norm_parameters) if x.requires_grad]
    # Tested here: inside the Function weights need a gradient even under no_grad.
    if not torch.is_grad_enabled() or not (hidden.requires_grad or leaves):
        return _sum_of_chunks(inputs, _Gradients())
    for leaf in leaves:
        if leaf.is_leaf:
            leaf.grad_dtype = accumulation_dtype(leaf.dtype)
    return _ChunkedCrossEntropy.apply(*inputs, *norm_parameters)


class TokenScores(NamedTuple):
    """What a model predicts of each token, and how well."""

    losses: Tensor
    """[b, n] fp32: cross-entropy of the label, in nats."""
    predictions: Tensor
    """[b, n] int64: the most probable token; of several the lowest."""


@torch.no_grad()
def token_scores(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    chunk_size: int | None = None,
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    norm: nn.Module | None = None,
) -> TokenScores:
    """Cross-entropy and argmax of every token, equal on every TP rank; nothing is overwritten.

    No more than a chunk of the logits is materialized, as in :func:`chunked_cross_entropy`, which
    has the arguments' meaning and the errors. Every label must be in the vocabulary. Collective
    over ``tp_group``.
    """
    split = VocabularySplit.of(
        weight, vocab_size=vocab_size, group=tp_group, sequence_parallel=sequence_parallel
    )
    everything = torch.ones_like(labels, dtype=torch.float32)
    _check_shapes(hidden, labels, everything, split)
    _check_labels(labels, everything, vocab_size)
    labels_by_row = split.by_hidden_row(labels)
    losses = torch.empty_like(labels_by_row, dtype=accumulation_dtype(hidden.dtype))
    predictions = torch.empty_like(labels_by_row)
    rows = Rows.of(hidden.detach()).flat()  # [n * b, m], or their part of this rank
    chunks = tiles_of(rows.shape[0], _rows_per_chunk(hidden, chunk_size, split))
    for chunk, x in zip(chunks, rows.tiles(chunks), strict=True):
        y = split.gather(x if norm is None else norm.normalize(x))  # [c, m]
        with allocating(MemoryCategory.LOGITS):
            logits = _logits(y, weight[: split.num_columns])  # [c, columns], fp32
        best = split.argmax(logits)  # before the logits become exponentials
        column, owned = split.column_of(labels_by_row[:, chunk.local].flatten())
        of_chunk, _ = _cross_entropy_(logits, column, owned, split)
        losses[:, chunk.local] = of_chunk.view(len(losses), -1)
        predictions[:, chunk.local] = best.view(len(losses), -1)
        del logits  # the next chunk's are as large
    return TokenScores(*(split.by_token(x, labels.shape[0]) for x in (losses, predictions)))


class _Inputs(NamedTuple):
    """What the loss is computed from; in the order of :class:`_ChunkedCrossEntropy`."""

    hidden: Tensor  # [n, b, m] or [n/t, b, m]
    weight: Tensor  # [v/t, m]
    labels: Tensor  # [blocks, n/blocks * b], the order of hidden rows
    token_weights: Tensor  # likewise, fp32
    split: VocabularySplit
    rows_per_chunk: int
    norm: nn.Module | None


class _Gradients(NamedTuple):
    """Where gradients are accumulated; None or False for those that are not needed."""

    hidden: bool = False  # over the hidden states themselves
    weight: Tensor | None = None  # [v/t, m] fp32
    norm: GradientSums | None = None


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Forward computes both gradients; backward scales and releases them."""

    @staticmethod
    def forward(
        ctx, hidden, weight, labels, token_weights, split, rows_per_chunk, norm, *norm_parameters
    ):
        d_weight = None
        if ctx.needs_input_grad[1]:
            with allocating(MemoryCategory.WEIGHT_GRADIENTS):
                d_weight = torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype))
        norm_sums = None if norm is None else GradientSums(norm)
        inputs = _Inputs(hidden, weight, labels, token_weights, split, rows_per_chunk, norm)
        needs_hidden = ctx.needs_input_grad[0]
        loss = _sum_of_chunks(inputs, _Gradients(needs_hidden, d_weight, norm_sums))
        d_norm = [] if norm_sums is None else norm_sums.in_order()
        d_hidden = Rows.of(hidden.detach()) if needs_hidden else None
        ctx.rows_per_chunk = rows_per_chunk
        ctx.gradients = d_hidden, d_weight, None, None, None, None, None, *d_norm
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss):
        # No reference may outlive the return: the next node overwrites d_hidden only if it holds
        # the last one, and otherwise copies it.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "chunked_cross_entropy allows one backward per forward: the first one released its "
                "gradients; run the forward again"
            )
        d_hidden, *others = gradients
        # Also if the factor is 1: a test would make the host wait for the device. A vector takes
        # part in type promotion; a scalar would be rounded to bf16 before the product.
        scale = d_loss.reshape(1)
        if d_hidden is not None:
            rows = d_hidden.flat()
            for d, scaled in rows.updates(tiles_of(rows.shape[0], ctx.rows_per_chunk), rows):
                torch.mul(d, scale, out=scaled)
            d_hidden = d_hidden.as_tensor()
        return d_hidden, *(None if d is None else d.mul_(scale) for d in others)


def _sum_of_chunks(inputs: _Inputs, gradients: _Gradients) -> Tensor:
    """The loss; overwrites the hidden states by ``gradients.hidden`` and adds to the others."""
    hidden, weight, labels, token_weights, split, rows_per_chunk, norm = inputs
    needs_hidden, d_weight, norm_sums = gradients
    # detach() shares the version counter, so autograd raises if ``hidden`` was saved earlier.
    rows = Rows.of(hidden.detach()).flat()  # [n * b, m]
    chunks = tiles_of(rows.shape[0], rows_per_chunk)
    if needs_hidden:
        pairs = rows.updates(chunks, rows)
    else:
        pairs = zip(rows.tiles(chunks), [None] * len(chunks), strict=True)
    losses = torch.empty_like(token_weights)
    for chunk, (x, d_x) in zip(chunks, pairs, strict=True):
        y, d_y = x, d_x
        if norm is not None:
            y = norm.normalize(x)
            d_y = None if norm_sums is None else torch.empty_like(y)
        losses[:, chunk.local] = _chunk_losses(
            y,
            weight.detach()[: split.num_columns],
            labels[:, chunk.local].flatten(),
            token_weights[:, chunk.local].flatten(),
            split,
            d_y,
            None if d_weight is None else d_weight[: split.num_columns],
        ).view(len(losses), -1)
        if norm_sums is not None:
            names = norm_sums.names([""])
            (dx,) = tile_backward(_normalize, norm, [x], [d_y], norm_sums, names)
            if d_x is not None:
                d_x.copy_(dx)  # over x, which was read for the last time
    return (losses * token_weights).sum()  # once: its error does not grow with the chunks


def _chunk_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    split: VocabularySplit,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
) -> Tensor:
    """Losses of one chunk, [c]; a function of its own, so that its logits are freed on return."""
    hidden = split.gather(hidden)  # [c, m]
    with allocating(MemoryCategory.LOGITS):
        logits = _logits(hidden, weight)  # [c, columns], fp32
    column, owned = split.column_of(labels)
    losses, total = _cross_entropy_(logits, column, owned, split)
    if d_hidden is None and d_weight is None:
        return losses
    _exponentials_to_gradient_(logits, total, column, owned, token_weights)
    # Narrowed for the products; the fp32 original is freed, as no other frame references it.
    logits = logits[:, : split.num_columns].to(hidden.dtype)
    if d_weight is not None:
        add_product_(d_weight, logits.t(), hidden)
    if d_hidden is not None:  # last: it may overwrite ``hidden``
        split.sum_product_(d_hidden, logits, weight)
    return losses


def _normalize(norm: nn.Module, x: Tensor) -> Tensor:
    return norm.normalize(x)


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    if len(weight) == 0:  # only padding on this rank: one column of probability 0
        return torch.full_like(hidden[:, :1], -torch.inf, dtype=accumulation_dtype(hidden.dtype))
    return product(hidden, weight.t())


def _cross_entropy_(
    logits: Tensor, column: Tensor, owned: Tensor, split: VocabularySplit
) -> tuple[Tensor, Tensor]:
    """Losses [c] and sums of exponentials [c]; ``logits`` becomes exp(logits - their maximum)."""
    logits.sub_(split.max_(logits.amax(1))[:, None])
    label_logit = logits.gather(1, column[:, None])[:, 0].where(owned, 0)
    label_logit, total = split.sum_(torch.stack([label_logit, logits.exp_().sum(1)]))
    return total.log() - label_logit, total


def _exponentials_to_gradient_(
    logits: Tensor, total: Tensor, column: Tensor, owned: Tensor, token_weights: Tensor
) -> None:
    """Turn ``logits``, exponentials by now, into (softmax - one-hot label) x token weight."""
    logits.mul_((token_weights / total)[:, None])
    logits.scatter_add_(1, column[:, None], (-token_weights).where(owned, 0)[:, None])


def _rows_per_chunk(hidden: Tensor, chunk_size: int | None, split: VocabularySplit) -> int:
    if chunk_size is None:
        return hidden.shape[0] * hidden.shape[1]
    if chunk_size < 1:
        raise ValueError(
            f"chunk_size is {chunk_size} tokens; give at least 1, or None for all tokens at once"
        )
    return max(chunk_size // split.num_token_blocks, 1)


def _check_shapes(
    hidden: Tensor, labels: Tensor, token_weights: Tensor, split: VocabularySplit
) -> None:
    expected = hidden.shape[1], hidden.shape[0] * split.num_token_blocks
    for name, x in (("labels", labels), ("token_weights", token_weights)):
        if x.shape != expected:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; hidden states {list(hidden.shape)} on "
                f"{split.num_token_blocks} ranks need [b, n] = {list(expected)}"
            )
    if not hidden.is_contiguous() and not Rows.of(hidden).is_on_host:
        raise ValueError(
            f"hidden has strides {hidden.stride()}; its gradient is written over it row by row, "
            "so make it contiguous"
        )


def _check_labels(labels: Tensor, token_weights: Tensor, vocab_size: int) -> None:
    if isinstance(labels, FakeTensor):
        return
    bounds = torch.stack(labels.where(token_weights != 0, 0).aminmax())
    for label in bounds.tolist():  # the one wait for the device
        if not 0 <= label < vocab_size:
            raise ValueError(
                f"label {label} is outside the vocabulary 0..{vocab_size - 1}; give the token a "
                "weight of 0 if it is not to be trained on, or raise vocab_size"
            )
