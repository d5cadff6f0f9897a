"""How much a model reads of its context, measured in the layout of training without an optimizer.

:class:`EvaluatedModel` computes the loss and the prediction of every token of a sequence that all
context-parallel ranks share. :func:`losses_by_position` and :func:`scores_of_answers` collect them
over samples, of which data-parallel ranks take different ones.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import nn

from megatron_untied.checkpoint import CheckpointState, Start, find_start, load_checkpoint
from megatron_untied.checkpoint.collective_errors import raise_on_all_ranks, same_on_all_ranks
from megatron_untied.checkpoint.directory import make_writable
from megatron_untied.config.run import RunConfig
from megatron_untied.context_parallel.kernels import Segments
from megatron_untied.context_parallel.sequence import SequenceInfo, SequenceLayout
from megatron_untied.data.context_samples import ContextSample
from megatron_untied.model import build_run_model
from megatron_untied.phases import Phase
from megatron_untied.planner.automatic import choose, is_automatic
from megatron_untied.planner.machine import this_machine
from megatron_untied.platform import device
from megatron_untied.sharding.fsdp2 import shard_model
from megatron_untied.sharding.interface import ModelProvider
from megatron_untied.sharding.parameter_layout import parameter_layouts
from megatron_untied.sharding.shards import ModelShards, RowShards
from megatron_untied.step_progress import StepProgress
from megatron_untied.training.initialize import Launch, errors_in_one_line, initialize
from megatron_untied.training.liveness import Heartbeat, heartbeat_of_setup
from megatron_untied.training.rendezvous import (
    gather_in,
    open_store,
    require_on_first_rank,
    require_same_config,
)

NUM_PARTS = 16
"""Of a sequence in a table of losses; shards of 2, 4, 8 and 16 ranks are whole parts."""
NEIGHBORS = 16
"""Tokens on either side of a border of shards that it is compared with."""
STANDARD_ERRORS = 4
"""A mean so many below the lowest possible one is not there by chance."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedModel:
    """A model without gradients and optimizer, shared by the ranks as in training."""

    config: RunConfig
    groups: ProcessGroupCollection
    model: nn.Module
    state: CheckpointState
    progress: StepProgress

    @classmethod
    def build(
        cls,
        provider: ModelProvider,
        config: RunConfig,
        groups: ProcessGroupCollection,
        progress: StepProgress,
    ) -> "EvaluatedModel":
        """Allocate this rank's share of the weights. Collective over all ranks.

        Fully sharded, these are its rows in fp32, and otherwise all in the dtype of compute.
        """
        is_sharded = config.optimization.use_torch_fsdp2
        # The kernel has to keep documents apart: they cut off what is far away.
        apart = replace(config, data=replace(config.data, dataloader_inter_document_masking=True))
        with torch.device("meta") if is_sharded else device.current_device():
            model = provider(apart, groups, progress)
        layouts = parameter_layouts(
            model, config.model, tp_rank=groups.tp.rank(), tp_size=groups.tp.size()
        )
        if is_sharded:
            shard_model(
                model,
                groups.dp_cp,
                compute_dtype=config.precision.params_dtype,
                offload=config.optimization.optimizer_cpu_offload,
            )
        shards = RowShards(model, None, groups.dp_cp) if is_sharded else ModelShards(model)
        return cls(
            config=config,
            groups=groups,
            model=model.eval(),
            state=CheckpointState(
                model_config=config.model, layouts=layouts, shards=shards, groups=groups
            ),
            progress=progress,
        )

    def load(self, start: Start) -> None:
        """Read the weights of a checkpoint. Collective over all ranks.

        Raises:
            ValueError: on every rank, if it does not fit the model.
        """
        weights_alone = replace(self.config.checkpoint, load_optim=False, load_rng=False)
        load_checkpoint(weights_alone, self.state, seed=self.config.seed, start=start)

    @torch.no_grad()
    def score(
        self, sample: ContextSample, bounds: tuple[int, ...] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Loss fp32 [s] of each label, and bool [s] whether it is the argmax; on every rank.

        Collective over the context- and tensor-parallel ranks, fully sharded over all.

        Args:
            sample: the same on all of them.
            bounds: where attention begins anew: 0, further positions, s. Positions still count
                from the beginning of the sequence.
        """
        layout = SequenceLayout.of(self.config.parallel, rank=self.groups.cp.rank())
        here, shards = device.current_device(), []
        for ids in (sample.tokens, sample.labels):
            shards.append(layout.shard(torch.from_numpy(ids)[None]).to(here))  # [1, s/p]
        sequence = SequenceInfo(documents=bounds and (Segments.of(bounds),))
        with self.progress.phase(Phase.FORWARD):
            scores = self.model(shards[0], labels=shards[1], sequence=sequence)
        mine = torch.stack([scores.losses[0].float(), (scores.predictions == shards[1])[0].float()])
        n = mine.shape[1]
        gathered = mine.new_empty(layout.size * 2, n)  # [p * 2, s/p]
        dist.all_gather_into_tensor(gathered, mine, self.groups.cp)
        whole = np.empty((2, n * layout.size), np.float32)
        for rank, part in enumerate(gathered.view(-1, 2, n).cpu().numpy()):
            whole[:, replace(layout, rank=rank, _positions={}).positions(n).numpy()] = part
        return whole[0], whole[1] > 0

    def near_losses(self, sample: ContextSample, window: int) -> np.ndarray:
        """Losses [s] of tokens that see ``window`` to 2 x ``window`` - 1 tokens before them.

        Those of the first 2 x ``window`` see all. Two passes over blocks of twice the window, the
        second one moved by it; of each block its later half counts. A sliding window would not
        do: through L layers it lets a token see L windows back, and a ring refuses it.
        """
        s = len(sample.tokens)
        blocks = [(0, *range(first, s, 2 * window), s) for first in (2 * window, window)]
        early, late = (self.score(sample, bounds)[0] for bounds in blocks)
        position = np.arange(s)
        is_late = (position >= 2 * window) & (position % (2 * window) < window)
        return np.where(is_late, late, early)

    def over_samples(
        self, samples: Iterable[ContextSample], measure: Callable[[ContextSample], T]
    ) -> Iterator[T]:
        """``measure`` of every sample in their order, on every rank. Collective over all ranks.

        Raises:
            ValueError: on every rank, if a sample cannot be made on one.
        """
        dp, remaining = self.groups.dp, iter(samples)
        # Each forward of a pass over the layers is one unit of progress.
        units = float(self.config.model.num_layers)
        for number in itertools.count():
            at_once = raise_on_all_ranks(lambda: list(itertools.islice(remaining, dp.size())))
            if not at_once:
                return
            self.progress.begin(f"samples {number * dp.size() + 1} and on", units)
            # A rank without a sample of its own repeats one: layers are gathered from all ranks.
            mine = measure(at_once[min(dp.rank(), len(at_once) - 1)])
            everyone = [None] * dp.size()
            dist.all_gather_object(everyone, mine, group=dp)
            yield from everyone[: len(at_once)]


def set_up_evaluation(
    config: RunConfig,
    launch: Launch,
    output: Path,
    provider: ModelProvider = build_run_model,
) -> tuple[EvaluatedModel, Heartbeat]:
    """Start this rank, build the model and load ``--load``; collective over all ranks.

    What can fail because of flags or files comes first, as in training.

    Args:
        config: of the run that trained it, in any layout.
        launch: this rank.
        output: a folder, which rank 0 must be able to write.
        provider: builds the bare model.

    Returns:
        The model, and a heartbeat to enter around evaluations.
    """
    with errors_in_one_line():
        store = open_store(launch)
        require_same_config(config, launch, store)
        require_on_first_rank(lambda: make_writable(output, "--output"), launch, store)
        start = same_on_all_ranks(
            lambda: find_start(config.checkpoint, skip_train=True),
            "the checkpoint in --load",
            gather_in(store, launch),
        )
        groups = initialize(config, launch, store)
        if is_automatic(config):
            config = choose(config, this_machine(groups)).config
        progress = StepProgress(device.record_event)
        evaluated = EvaluatedModel.build(provider, config, groups, progress)
        evaluated.load(start)
    return evaluated, heartbeat_of_setup(Phase.FORWARD, config, launch, store, progress)


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionLosses:
    """Mean losses of documents by position, with all of the context and with the near part."""

    edges: list[int]
    """Positions where bins begin, and the length: the first ones double, then sixteenths."""
    window: int
    full: np.ndarray
    """[documents, bins] nats."""
    near: np.ndarray
    gain: np.ndarray
    """[documents]: near less full, over the positions from 2 x ``window`` on."""
    border: np.ndarray | None
    """[documents]: loss of the two tokens at borders of shards less that of their neighbors; None
    on one rank."""

    def describe(self) -> str:
        """A line: what the far context is worth, and whether borders of shards stand out."""
        line = (
            f"far context is worth {_mean_and_error(self.gain)} nats per token from position "
            f"{2 * self.window:,} on: as much less is lost than with the {self.window:,} to "
            f"{2 * self.window - 1:,} tokens before alone"
        )
        if self.border is not None:
            line += f"; tokens at borders of shards: {_mean_and_error(self.border)} nats more"
        return line


def _mean_and_error(values: np.ndarray) -> str:
    error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return f"{values.mean():.4f} \u00b1 {error:.4f}"


def losses_by_position(
    evaluated: EvaluatedModel, documents: Iterable[ContextSample], *, seq_length: int, window: int
) -> PositionLosses:
    """Evaluate ``documents`` of ``seq_length`` tokens; collective over all ranks."""
    edges, borders = bin_edges(seq_length), shard_borders(evaluated.config, seq_length)

    def measure(document: ContextSample) -> dict[str, Any]:
        full, near = evaluated.score(document)[0], evaluated.near_losses(document, window)
        labeled = np.arange(seq_length) < document.num_labels
        counts = np.add.reduceat(labeled, edges[:-1], dtype=np.int64)
        found: dict[str, Any] = {
            name: np.add.reduceat(losses * labeled, edges[:-1], dtype=np.float64) / counts
            for name, losses in (("full", full), ("near", near))
        }
        far = slice(2 * window, document.num_labels)
        found["gain"] = (near[far] - full[far]).mean(dtype=np.float64)
        if borders:
            found["border"] = np.mean([_against_neighbors(full, place) for place in borders])
        return found

    rows = list(evaluated.over_samples(documents, measure))
    return PositionLosses(
        edges=edges,
        window=window,
        **{name: np.array([row[name] for row in rows]) for name in ("full", "near", "gain")},
        border=np.array([row["border"] for row in rows]) if borders else None,
    )


def bin_edges(seq_length: int) -> list[int]:
    """0, 1, 2, 4 and so on up to a sixteenth of the length, then every sixteenth."""
    parts = [seq_length * i // NUM_PARTS for i in range(1, NUM_PARTS + 1)]
    doubling = [1 << i for i in range((parts[0] - 1).bit_length())]  # those below the first part
    return sorted({0, *doubling, *parts})


def shard_borders(config: RunConfig, seq_length: int) -> list[int]:
    """Positions that follow one of another context-parallel rank, with neighbors on both sides."""
    layout, owner = SequenceLayout.of(config.parallel), np.empty(seq_length, np.int64)
    for rank in range(layout.size):
        of_rank = SequenceLayout.of(config.parallel, rank=rank)
        owner[of_rank.positions(seq_length // layout.size).numpy()] = rank
    places = (np.flatnonzero(np.diff(owner)) + 1).tolist()
    return [place for place in places if NEIGHBORS < place < seq_length - NEIGHBORS]


def _against_neighbors(losses: np.ndarray, place: int) -> float:
    at = losses[place - 1 : place + 1]
    around = losses[place - NEIGHBORS - 1 : place + NEIGHBORS + 1]
    return float(at.mean() - (around.sum() - at.sum()) / (len(around) - len(at)))


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerScores:
    """Scores of answers over a grid of depths, or of parts of a copy, and lengths."""

    rows: list[str]
    lengths: list[int]
    """Tokens of a sample."""
    exact: np.ndarray
    """[rows, lengths]: share of the answers of which every token is the argmax."""
    right: np.ndarray
    """[rows, lengths]: share of such tokens."""
    nats: np.ndarray
    """[rows, lengths]: mean loss of their tokens."""
    random_nats: np.ndarray | None
    """[lengths]: mean loss of tokens that nothing before them predicts; None if there are none."""
    random_error: np.ndarray | None
    """[lengths]: its standard error."""
    floor: float
    """The loss of such tokens below which no model is on average: log(vocabulary)."""

    def verdict(self) -> str:
        """A line that says whether random tokens were predicted, as no causal model can."""
        worst = int(np.argmin(self.random_nats + STANDARD_ERRORS * self.random_error))
        loss, error = self.random_nats[worst], self.random_error[worst]
        leaks = loss + STANDARD_ERRORS * error < self.floor
        return (
            f"{'LEAK: tokens see what they are to predict' if leaks else 'no leak'}: random tokens "
            f"cost {loss:.3f} \u00b1 {error:.3f} nats in {self.lengths[worst]:,} tokens, and to a "
            f"model that does not see them at least {self.floor:.3f} on average"
        )


def scores_of_answers(
    evaluated: EvaluatedModel,
    samples: Iterable[ContextSample],
    *,
    rows: list[str],
    lengths: list[int],
    vocab_size: int,
) -> AnswerScores:
    """Evaluate the answers of ``samples``, which are in ``rows`` and ``lengths`` of a grid.

    Collective over all ranks. ``vocab_size``: different random tokens.
    """

    def measure(sample: ContextSample) -> tuple[list[tuple], list[float], int]:
        losses, is_right = evaluated.score(sample)
        answers = []
        for answer in sample.answers:
            right, nats = is_right[answer.positions], losses[answer.positions]
            answers.append((answer.cell, right.all(), right.mean(), nats.mean()))
        random = losses[: sample.num_random].astype(np.float64)
        return answers, [len(random), random.sum(), (random**2).sum()], sample.answers[0].cell[1]

    sums, moments = np.zeros((4, len(rows), len(lengths))), np.zeros((3, len(lengths)))
    for answers, of_random, column in evaluated.over_samples(samples, measure):
        moments[:, column] += of_random
        for cell, *values in answers:
            sums[(slice(None), *cell)] += (1, *map(float, values))
    count, total, squares = moments
    has_random = bool(count.all())
    if has_random:
        mean = total / count
        error = np.sqrt(np.maximum(squares / count - mean**2, 0) / count)
    exact, right, nats = sums[1:] / sums[0]
    return AnswerScores(
        rows=rows,
        lengths=lengths,
        floor=math.log(vocab_size),
        exact=exact,
        right=right,
        nats=nats,
        random_nats=mean if has_random else None,
        random_error=error if has_random else None,
    )
