"""Chooses the classes for the norm and linear slots of the layer spec: ``--transformer-impl``."""

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_untied.config.run import TransformerImpl
from megatron_untied.norms import LayerNorm, RMSNorm


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """Classes for the slots of megatron-core's ModuleSpec, with its constructor arguments."""

    norm: type[torch.nn.Module]
    """Called with ``config``, ``hidden_size`` and ``eps``."""
    column_parallel_linear: type[torch.nn.Module]
    row_parallel_linear: type[torch.nn.Module]


def choose_backend(
    transformer_impl: TransformerImpl, normalization: Literal["RMSNorm", "LayerNorm"]
) -> Backend:
    """The classes of ``transformer_impl``: torch and megatron-core alone, or transformer-engine.

    Raises:
        ValueError: if there is no such implementation or normalization.
        ImportError: if transformer-engine is asked for and not installed.
    """
    norms = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
    if normalization not in norms:
        raise ValueError(f"normalization {normalization!r} must be one of {sorted(norms)}.")
    if transformer_impl == "local":
        return Backend(
            norm=norms[normalization],
            column_parallel_linear=ColumnParallelLinear,
            row_parallel_linear=RowParallelLinear,
        )
    if transformer_impl == "transformer_engine":
        return _transformer_engine()
    raise ValueError(
        f"transformer_impl {transformer_impl!r} must be 'local' or 'transformer_engine'."
    )


def _transformer_engine() -> Backend:
    if importlib.util.find_spec("transformer_engine") is None:
        raise ImportError(
            "--transformer-impl transformer_engine needs the package transformer-engine, which is "
            "not installed: pip install transformer-engine[pytorch], or --transformer-impl local."
        )
    from megatron.core.extensions import transformer_engine

    return Backend(
        norm=transformer_engine.TENorm,  # picks its kind by config.normalization
        column_parallel_linear=transformer_engine.TEColumnParallelLinear,
        row_parallel_linear=transformer_engine.TERowParallelLinear,
    )
