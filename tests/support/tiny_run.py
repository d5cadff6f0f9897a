"""Runs of the tiny model on test ranks, through ``pretrain_gpt.py``."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import pretrain_gpt
from megatron_untied.context_parallel.sequence import SequenceLayout
from megatron_untied.sharding.interface import ModelProvider
from megatron_untied.step_progress import StepProgress
from megatron_untied.training.initialize import Launch, initialize
from megatron_untied.training.loop import pretrain
from megatron_untied.training.state import TrainState, build_train_state
from megatron_untied.training.step import Batch, GetBatch
from tests.support.command_line import tiny_config

SFT = {"mock_data": None, "vocab_size": None, "tokenizer_type": "HuggingFaceTokenizer", "sft": True}
"""Flags of a run on chats, beside the chats and the tokenizer."""


def train_on_chats(
    group: dist.ProcessGroup, metrics: Path | None = None, **changes: object
) -> None:
    """Fine-tune on the ranks of ``group``; ``changes`` are flags, among them the chats."""
    train(group, metrics, get_batch=pretrain_gpt.get_batch, **SFT, **changes)


def train(
    group: dist.ProcessGroup,
    metrics: Path | None = None,
    get_batch: GetBatch | None = None,
    model_provider: ModelProvider = pretrain_gpt.model_provider,
    **changes: object,
) -> None:
    """Pretrain on the ranks of ``group``; ``changes`` are flags."""
    pretrain(
        tiny_config(group.size(), metrics_jsonl=metrics, **changes),
        launch_of(group),
        model_provider=model_provider,
        datasets_provider=pretrain_gpt.datasets_provider,
        get_batch=get_batch or unevenly_masked_batch,
        forward_step=pretrain_gpt.forward_step,
    )


def train_state_on(group: dist.ProcessGroup, **changes: object) -> TrainState:
    """The tiny model and its optimizer, without data."""
    config = tiny_config(group.size(), **changes)
    groups = initialize(config, launch_of(group))
    return build_train_state(pretrain_gpt.model_provider, config, groups, StepProgress())


def launch_of(group: dist.ProcessGroup) -> Launch:
    """What torchrun would have told a test rank."""
    return Launch(rank=group.rank(), world_size=group.size(), local_rank=group.rank())


def unevenly_masked_batch(samples: dict[str, Tensor], config, groups) -> Batch:
    """``get_batch`` after a mask that leaves shards, samples and micro-batches unequal.

    Nothing is valid in the first fifth of a sample, so with four shards one has almost nothing.
    """
    mask = samples["loss_mask"].clone()
    mask[:, : mask.size(1) // 5] = 0
    mask[samples["labels"] % 3 == 0] = 0
    mask[samples["tokens"].sum(1) % 2 == 0, -7:] = 0
    return pretrain_gpt.get_batch(samples | {"loss_mask": mask}, config, groups)


def batch_of(groups, *, seed: int, layout: SequenceLayout | None = None) -> Batch:
    """This rank's part of a micro-batch of 4 samples, of which unequal parts are trained on.

    ``layout``: of the context-parallel ranks, if they have a ring.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 251, (4, 65), generator=generator)
    parts = torch.tensor([[0.1], [0.9], [0.5], [0.0]])
    loss_mask = (torch.rand(4, 64, generator=generator) < parts).float()
    mine = slice(groups.dp.rank(), None, groups.dp.size())
    layout = layout or SequenceLayout(num_ulysses=groups.cp.size(), rank=groups.cp.rank())
    return Batch(
        tokens=layout.shard(tokens[mine, :-1]),
        labels=layout.shard(tokens[mine, 1:]),
        loss_mask=layout.shard(loss_mask[mine]),
    )
