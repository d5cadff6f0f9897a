"""Full sharding with PyTorch's FSDP2: every rank keeps and updates its rows of all parameters.

:class:`FullSharding` is the implementation for training steps, :func:`shard_model` wraps a model,
:func:`build_adam` builds its optimizer; sums and norms over ranks follow at the end.
"""

import contextlib
import functools
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from typing_extensions import override

from megatron_untied.config.run import OptimizationConfig, RunConfig
from megatron_untied.platform import device
from megatron_untied.sharding.initialize_weights import initialize_shards
from megatron_untied.sharding.interface import ModelProvider, Sharding
from megatron_untied.sharding.parameter_layout import parameter_layouts
from megatron_untied.sharding.shards import RowShards
from megatron_untied.step_progress import StepProgress


class FullSharding(Sharding):
    """PyTorch's FSDP2 with torch's AdamW on the fp32 rows."""

    def __init__(
        self,
        model_provider: ModelProvider,
        config: RunConfig,
        groups: ProcessGroupCollection,
        progress: StepProgress,
    ):
        with torch.device("meta"):  # no rank ever holds the whole model
            # In the dtype that its kernel is chosen for; shard_model makes the rows fp32.
            self.model = model_provider(config, groups, progress)
        self.layouts = parameter_layouts(
            self.model, config.model, tp_rank=groups.tp.rank(), tp_size=groups.tp.size()
        )
        # Read before sharding, which drops megatron-core's marks: what every tensor-parallel rank
        # holds as a whole, and what of it has a partial gradient per rank, of its own tokens (with
        # sequence parallelism) or heads (query and key norms).
        self._copied, self._partial = set(), set()
        for name, parameter in self.model.named_parameters():
            if not getattr(parameter, "tensor_model_parallel", False):
                self._copied.add(name)
                is_head_norm = "q_layernorm" in name or "k_layernorm" in name
                if is_head_norm or getattr(parameter, "sequence_parallel", False):
                    self._partial.add(name)
        self._groups, self._clip_grad = groups, config.optimization.clip_grad
        shard_model(
            self.model,
            groups.dp_cp,
            compute_dtype=config.precision.params_dtype,
            offload=config.optimization.optimizer_cpu_offload,
        )
        self._parameters = dict(self.model.named_parameters())
        self.adam = build_adam(self.model, config.optimization)
        self.param_groups = self.adam.param_groups
        self.shards = RowShards(self.model, self.adam, groups.dp_cp)
        initialize_shards(self.shards, self.layouts, config.model, config.seed)

    @override
    def zero_grad(self) -> None:
        self.adam.zero_grad()

    @override
    def no_sync(self) -> AbstractContextManager:
        # Each micro-batch reduces its gradients and adds them to the rows. Reducing once per step
        # would keep whole fp32 gradients of all layers: 4 bytes per parameter.
        return contextlib.nullcontext()

    @override
    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        gradients, groups = self._gradients(), self._groups
        all_reduce_gradients_(
            [gradients[name] for name in gradients if name in self._partial], groups.tp
        )
        # A parameter that all tensor-parallel ranks hold counts once in the norm: on the first.
        counted = [
            gradient
            for name, gradient in gradients.items()
            if groups.tp.rank() == 0 or name not in self._copied
        ]
        return global_norm(counted, [groups.dp_cp, groups.tp])

    @override
    @torch.no_grad()
    def update(self, norm: Tensor) -> None:
        rows = list(self._gradients().values())
        if rows and self._clip_grad:  # by Megatron's formula
            # Always multiplied: reading the norm would make the host wait for the device.
            scale = (self._clip_grad / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(rows, scale.to(rows[0]))
        self.adam.step()

    def _gradients(self) -> dict[str, Tensor]:
        """This rank's rows of the gradients, by parameter."""
        return {
            name: parameter.grad.to_local()
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }


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
    for parameter in trained:  # torch would create them in the first step, after a checkpoint loads
        rows = parameter.to_local()
        adam.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=rows.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return adam


def shard_model(
    model: GPTModel, group: ProcessGroup, *, compute_dtype: torch.dtype, offload: bool
) -> None:
    """Shard parameters on the meta device by rows and allocate this rank's rows.

    Rows are fp32, those of frozen parameters in the model's own dtype. Values are not set.
    Megatron-core's attributes on parameters are lost.

    Args:
        model: megatron-core's GPT with a module ``loss`` that is called with the hidden states.
        group: the ranks that share every parameter: data x context parallel.
        compute_dtype: dtype of gathered weights.
        offload: keep the rows, their gradients and moments on the host.
    """
    for name, parameter in model.named_parameters():
        assert parameter.is_meta, f"{name} was allocated as a whole"
    assert not list(model.buffers()), "a buffer would be left without a value"
    here = device.current_device()
    with unset_fake_temporarily():  # a mesh reads real rank numbers, also under a trace
        mesh = DeviceMesh.from_group(group, here.type)
    shard = functools.partial(
        fully_shard,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        offload_policy=CPUOffloadPolicy(here.type == "cuda") if offload else OffloadPolicy(),
    )
    # To fp32. Not model.float(): it cannot convert traced parameters.
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                setattr(module, name, nn.Parameter(parameter.detach().float()))
    # Modules in one list are gathered together; the loss uses the output layer's matrix.
    lookup, output = [model.embedding], [model.output_layer, model.loss]
    tied = model.share_embeddings_and_output_weights
    layers = [[layer] for layer in model.decoder.layers]
    for unit in layers + ([lookup + output] if tied else [lookup, output]):
        shard(unit)
    shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    # Their backward reads no weights: a lookup's gradient needs indices, and the loss computes its
    # gradients during forward.
    model.embedding.set_unshard_in_backward(False)
    model.loss.set_unshard_in_backward(False)
    # Only for forward: in backward FSDP2 prefetches the next unit by itself.
    for module, next_module in itertools.pairwise([model.embedding, *model.decoder.layers]):
        module.set_modules_to_forward_prefetch([next_module])
    model.to_empty(device="cpu" if offload else here)


def all_reduce_gradients_(gradients: Sequence[Tensor], group: ProcessGroup) -> None:
    """Sum each gradient over ``group``, in one all-reduce; they may be on the host."""
    if not gradients or group.size() == 1:
        return
    # Norms are small: one flat copy costs less than a collective for each.
    flat = torch.cat([gradient.flatten() for gradient in gradients]).to(device.current_device())
    dist.all_reduce(flat, group=group)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def global_norm(gradients: Sequence[Tensor], groups: Sequence[ProcessGroup]) -> Tensor:
    """L2 norm, fp64 [], of gradients spread over ``groups``, each element on one rank."""
    squares = torch.zeros((), dtype=torch.float64, device=device.current_device())
    if gradients:
        norms = torch.stack(torch._foreach_norm(gradients))
        squares += norms.double().square().sum().to(squares.device)
    for group in groups:
        dist.all_reduce(squares, group=group)
    return squares.sqrt()
