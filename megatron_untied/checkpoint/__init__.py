"""Checkpoints of the global model, which load at any tensor, context and data parallel size.

A checkpoint is ``iter_0000100/`` with the tensors of the whole model in PyTorch's distributed
format (``model.<name>``, ``optimizer.exp_avg.<name>``, ``optimizer.exp_avg_sq.<name>``), one file
of random states per rank, ``state.json``, ``run_config.json`` and ``checksums.txt``.
"""

from megatron_untied.checkpoint.load import (
    bytes_to_read,
    describe_loading,
    load_checkpoint,
    load_pretrained,
)
from megatron_untied.checkpoint.run_config import Provenance, Samples, read_model_config
from megatron_untied.checkpoint.save import BackgroundSave, CheckpointSave, save_checkpoint
from megatron_untied.checkpoint.start import Start, find_start
from megatron_untied.checkpoint.state import CheckpointState, Progress
from megatron_untied.config.checkpoint import CheckpointConfig

__all__ = [
    "BackgroundSave",
    "CheckpointSave",
    "CheckpointConfig",
    "Progress",
    "Provenance",
    "Samples",
    "Start",
    "CheckpointState",
    "bytes_to_read",
    "describe_loading",
    "find_start",
    "load_checkpoint",
    "load_pretrained",
    "read_model_config",
    "save_checkpoint",
]
