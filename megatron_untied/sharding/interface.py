"""What a step needs of the way in which ranks share a model; there are two ways."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from megatron_untied.config.run import RunConfig
from megatron_untied.gpt_model import UntiedGPTModel
from megatron_untied.sharding.parameter_layout import ParameterLayout
from megatron_untied.sharding.shards import Shards
from megatron_untied.step_progress import StepProgress

ModelProvider = Callable[[RunConfig, ProcessGroupCollection, StepProgress], UntiedGPTModel]
"""Builds the bare model of this tensor-parallel rank on the default device; its weights are drawn
later. The model states its phases to the progress object of the run."""


class Sharding(Protocol):
    """A model, its gradients and its AdamW, shared by the data- and context-parallel ranks.

    :class:`~megatron_untied.sharding.zero1.MegatronSharding` has whole weights and gradients on
    every rank; :class:`~megatron_untied.sharding.fsdp2.FullSharding` a share of each.
    Collective over all ranks, calls included.
    """

    model: nn.Module
    """Call it for a forward; a backward adds to the gradients."""
    param_groups: list[dict[str, Any]]
    """Where the schedule writes learning rate and weight decay."""
    layouts: Mapping[str, ParameterLayout]
    shards: Shards

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""

    def no_sync(self) -> AbstractContextManager:
        """Around a forward and backward after which others follow before the next step."""

    def step(self) -> tuple[bool, float | Tensor]:
        """Finish, measure and clip the gradients and update.

        Returns:
            Whether there was an update, and the gradient's norm before clipping.
        """
