"""The interface between a training step and the way in which ranks share a model."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from megatron_untied.config.run import RunConfig
from megatron_untied.gpt_model import ChunkedLossGPTModel
from megatron_untied.sharding.parameter_layout import ParameterLayout
from megatron_untied.sharding.shards import Shards
from megatron_untied.step_progress import StepProgress

ModelProvider = Callable[[RunConfig, ProcessGroupCollection, StepProgress], ChunkedLossGPTModel]
"""Builds the bare model of this tensor-parallel rank on the default device; its weights are drawn
later. The model reports its phases to the progress object of the run."""


class Sharding(Protocol):
    """A model, its gradients and its AdamW, shared by the data- and context-parallel ranks.

    :class:`~megatron_untied.sharding.zero1.MegatronSharding` keeps whole weights and gradients
    on every rank; :class:`~megatron_untied.sharding.fsdp2.FullSharding` a share of each.
    Construction and every call are collective over all ranks.
    """

    model: nn.Module
    """Call it for a forward; a backward adds to the gradients."""
    param_groups: list[dict[str, Any]]
    """Where the schedule writes learning rate and weight decay."""
    layouts: Mapping[str, ParameterLayout]
    shards: Shards

    def zero_grad(self) -> None:
        """Clear the gradients of the previous step."""

    def no_sync(self) -> AbstractContextManager:
        """Context for a forward and backward that is not the last one before the next step."""

    def gradient_norm(self) -> float | Tensor:
        """Finish the gradients, and return their norm; no weight or moment changes.

        Either :meth:`update` or :meth:`zero_grad` comes next.
        """

    def update(self, norm: float | Tensor) -> None:
        """Clip the gradients of this ``norm``, then update weights and moments."""
