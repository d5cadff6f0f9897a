"""The configuration of a run: frozen values, made once from flags and passed on."""

from megatron_untied.config.model import (
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    Precision,
    RotaryConfig,
)

__all__ = ["MemoryConfig", "ModelConfig", "ParallelConfig", "Precision", "RotaryConfig"]
