"""The configuration of a run: frozen dataclasses, built once from flags and passed as arguments."""

from megatron_untied.config.model import (
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    Precision,
    RotaryConfig,
)
from megatron_untied.config.parameters import AdaptationConfig

__all__ = [
    "AdaptationConfig",
    "MemoryConfig",
    "ModelConfig",
    "ParallelConfig",
    "Precision",
    "RotaryConfig",
]
