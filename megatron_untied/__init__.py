"""Megatron-style training at multi-million-token context.

Importing the package prepares megatron-core for machines without CUDA (see ``platform``); on a
GPU machine that is a no-op. Import it before ``megatron.core``.
"""

from megatron_untied import platform

__all__ = ["__version__", "platform"]

__version__ = "0.1.0"
