"""Conversions and runs that several tests make."""

from pathlib import Path

import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

import pretrain_gpt
from megatron_untied.checkpoint import load_checkpoint
from megatron_untied.config.run import RunConfig
from megatron_untied.context_parallel.sequence import SequenceLayout
from megatron_untied.hf import Export, Import
from megatron_untied.step_progress import StepProgress
from megatron_untied.training.initialize import make_groups
from megatron_untied.training.state import build_train_state
from tests.support.command_line import MODEL_FLAGS, tiny_config
from tests.support.hf_models import VOCAB_SIZE


def convert(source: Path, checkpoints: Path, dtype: torch.dtype | None = None) -> Path:
    """Hugging Face folder to checkpoint."""
    Import.open(source, dtype).write(checkpoints, lambda _: None)
    return checkpoints


def convert_back(
    checkpoints: Path, out: Path, dtype: torch.dtype | None = None, max_shard_bytes: int = 10**9
) -> Path:
    """Checkpoint to Hugging Face folder."""
    Export.open(checkpoints, dtype=dtype).write(
        out, lambda _: None, max_shard_bytes=max_shard_bytes
    )
    return out


def config_of(world_size: int, checkpoints: Path, **changes: object) -> RunConfig:
    """The tiny run with the architecture and weights of a checkpoint."""
    unset = {flag.removeprefix("--").replace("-", "_"): None for flag in MODEL_FLAGS}
    flags = {
        "load": checkpoints, "use_checkpoint_args": True, "finetune": True, "seq_length": 32,
        "vocab_size": VOCAB_SIZE - 1,  # NullTokenizer adds an end of document
    }  # fmt: skip
    return tiny_config(world_size, **unset | flags | changes)


def logits_and_loss(group, checkpoints: Path, text: Tensor, **changes: object):
    """On every rank: its shard of the logits [b, s/p, padded v/t], its part of the mean loss."""
    config = config_of(group.size(), checkpoints, **changes)
    groups = make_groups(config.parallel, config.distributed)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    train_state = build_train_state(pretrain_gpt.model_provider, config, groups, StepProgress())
    load_checkpoint(config.checkpoint, train_state.checkpoint_state, seed=1)
    layout = SequenceLayout.of(config.parallel, rank=groups.cp.rank())
    tokens, labels = layout.shard(text[:, :-1]), layout.shard(text[:, 1:])
    weights = torch.full(labels.shape, 1 / text[:, 1:].numel())
    with torch.no_grad():
        loss = train_state.model(tokens, labels=labels, token_weights=weights)
        return train_state.model(tokens), loss
