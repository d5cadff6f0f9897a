"""Megatron-style training at multi-million-token context.

Importing the package prepares megatron-core for machines without CUDA (see ``platform``); on a
GPU machine that is a no-op. Import it before ``megatron.core``.

What works without the trainer are attributes of the package, imported when they are first used:
:func:`~megatron_untied.api.untied_attention`, :func:`~megatron_untied.api.sequence_layout`,
:func:`~megatron_untied.api.streamed_layers` and ``chunked_cross_entropy``.
"""

import importlib
from typing import TYPE_CHECKING, Any

from megatron_untied import platform

if TYPE_CHECKING:
    from megatron_untied.api import sequence_layout, streamed_layers, untied_attention
    from megatron_untied.loss.chunked_cross_entropy import chunked_cross_entropy

__all__ = [
    "__version__",
    "chunked_cross_entropy",
    "platform",
    "sequence_layout",
    "streamed_layers",
    "untied_attention",
]

__version__ = "0.1.0"

_MODULES = {
    "chunked_cross_entropy": "megatron_untied.loss.chunked_cross_entropy",
    "sequence_layout": "megatron_untied.api",
    "streamed_layers": "megatron_untied.api",
    "untied_attention": "megatron_untied.api",
}


def __getattr__(name: str) -> Any:
    """Import what is first used: the package itself stays quick to import."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
