"""Checkpoints of the global model, which load at any tensor, context and data parallel size.

A checkpoint is ``iter_0000100/`` with the tensors of the whole model in PyTorch's distributed
format (``model.<name>``, ``optimizer.exp_avg.<name>``, ``optimizer.exp_avg_sq.<name>``), one file
of random states a rank, ``state.json`` and ``run_config.json``.
"""

from megatron_untied.checkpoint.config import CheckpointConfig
from megatron_untied.checkpoint.load import load_checkpoint
from megatron_untied.checkpoint.run_config import read_model_config
from megatron_untied.checkpoint.save import save_checkpoint
from megatron_untied.checkpoint.state import Progress, TrainingState

__all__ = [
    "CheckpointConfig",
    "Progress",
    "TrainingState",
    "load_checkpoint",
    "read_model_config",
    "save_checkpoint",
]
