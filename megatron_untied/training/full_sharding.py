"""Full sharding of a run: every rank keeps and updates its rows of all parameters."""

import contextlib
from contextlib import AbstractContextManager

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from megatron_untied.sharding.fsdp import shard_model
from megatron_untied.sharding.gradients import (
    TensorParallelCopies,
    add_up_,
    clip_,
    global_norm,
)
from megatron_untied.sharding.initialize_weights import initialize_shards
from megatron_untied.sharding.parameter_layout import parameter_layouts
from megatron_untied.sharding.row_shards import RowShards
from megatron_untied.step_progress import StepProgress
from megatron_untied.training.config import OptimizationConfig, RunConfig
from megatron_untied.training.sharding import ModelProvider


class FullSharding:
    """PyTorch's FSDP2 with torch's AdamW on the fp32 rows. See :class:`Sharding`."""

    def __init__(
        self,
        model_provider: ModelProvider,
        config: RunConfig,
        groups: ProcessGroupCollection,
        progress: StepProgress,
    ):
        with torch.device("meta"):  # no rank ever holds the whole model
            # In the precision that its kernel is chosen for; its rows are fp32 all the same.
            self.model = model_provider(config, groups, progress)
        self.layouts = parameter_layouts(
            self.model, config.model, tp_rank=groups.tp.rank(), tp_size=groups.tp.size()
        )
        self._copies = TensorParallelCopies.of(self.model)
        self._groups, self._clip_grad = groups, config.optimization.clip_grad
        shard_model(
            self.model,
            groups.dp_cp,
            compute_dtype=config.precision.params_dtype,
            offload=config.optimization.optimizer_cpu_offload,
        )
        self._parameters = dict(self.model.named_parameters())
        self.adam = build_adam(self.model, config.optimization)
        self.shards = RowShards(self.model, self.adam, groups.dp_cp)
        initialize_shards(self.shards, self.layouts, config.model, config.seed)

    @property
    def param_groups(self) -> list[dict]:
        """See :class:`Sharding`."""
        return self.adam.param_groups

    def zero_grad(self) -> None:
        """See :class:`Sharding`."""
        self.adam.zero_grad()

    def more_to_come(self) -> AbstractContextManager:
        """Nothing is put off: each micro-batch reduces its gradients and adds them to the rows.

        To reduce once would keep whole fp32 gradients of all layers, 4 bytes a parameter.
        """
        return contextlib.nullcontext()

    @torch.no_grad()
    def step(self) -> tuple[bool, Tensor]:
        """See :class:`Sharding`."""
        gradients = {
            name: parameter.grad.to_local()
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }
        groups, copies = self._groups, self._copies
        add_up_([gradients[name] for name in gradients if name in copies.partial], groups.tp)
        # What every tensor-parallel rank has counts on the first.
        counted = [
            gradient
            for name, gradient in gradients.items()
            if groups.tp.rank() == 0 or name not in copies.names
        ]
        norm = global_norm(counted, [groups.dp_cp, groups.tp])
        clip_(list(gradients.values()), norm, self._clip_grad)
        self.adam.step()
        return True, norm


def build_adam(model: nn.Module, config: OptimizationConfig) -> torch.optim.AdamW:
    """AdamW with its moments; vectors (norms, biases) have no weight decay, as in Megatron.

    Fused: one pass over weights, gradients and moments, on the device or on the host. torch's
    default on CUDA makes temporaries of the size of all of them.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.dim() > 1], "wd_mult": 1.0},
            {"params": [p for p in trained if p.dim() == 1], "wd_mult": 0.0},
        ],
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )
    for parameter in trained:  # torch makes them in the first step: too late to load them
        rows = parameter.to_local()
        adam.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=rows.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return adam
