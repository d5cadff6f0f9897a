"""The configuration of a run: frozen dataclasses, built once from flags and passed as arguments."""

from megatron_untied.config.model import (
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    Precision,
    RotaryConfig,
)

__all__ = ["MemoryConfig", "ModelConfig", "ParallelConfig", "Precision", "RotaryConfig"]
