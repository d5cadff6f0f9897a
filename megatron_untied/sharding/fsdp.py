"""Full sharding: each data- and context-parallel rank keeps some rows of every parameter.

PyTorch's ``fully_shard``, which gathers the weights of a unit when they are needed and reduces
their gradients as soon as they are whole. A rank at rest holds 16 bytes for each of its
parameters: fp32 weight, gradient and two moments; 8B on 8 ranks is 15 GiB.

- A unit is a transformer layer. The next one is gathered ahead, in forward and in backward.
- Embedding and output matrix are units of their own, gathered in forward only: the backward of a
  lookup needs no weights, and the loss makes its gradients in forward. Tied, they are one unit,
  gathered from the embedding to the loss; the gradient of both uses is added up and reduced once,
  at the end of backward, so 4 bytes a parameter of the matrix live until then.
- The rest, the final norm, belongs to the model itself and stays gathered.

Weights are gathered in the compute dtype and gradients reduced in fp32. Gradients of a streamed
layer and of the loss are fp32 sums and stay so; others come in the compute dtype. They are summed
over ranks, never averaged: losses are divided by the global token count before backward.
"""

import functools
import itertools
from collections.abc import Iterator

import torch
from megatron.core.models.gpt import GPTModel
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from megatron_untied.platform import device


def shard_model(
    model: GPTModel, group: ProcessGroup, *, compute_dtype: torch.dtype, offload: bool
) -> None:
    """Cut parameters on the meta device into rows and allocate this rank's, in fp32.

    The values are not set, and megatron-core's attributes on parameters are gone afterwards.

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
    with unset_fake_temporarily():  # a mesh is made of numbers, also where a trace fakes tensors
        mesh = DeviceMesh.from_group(group, here.type)
    shard = functools.partial(
        fully_shard,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
        offload_policy=CPUOffloadPolicy(here.type == "cuda") if offload else OffloadPolicy(),
    )
    _widen(model)
    for unit in _units(model):
        shard(unit)
    shard(model)
    _schedule_collectives(model)
    model.to_empty(device="cpu" if offload else here)


def _widen(model: nn.Module) -> None:
    """Make all parameters fp32. Not ``model.float()``: it cannot convert traced parameters."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            wide = nn.Parameter(parameter.detach().float(), parameter.requires_grad)
            setattr(module, name, wide)


def _units(model: GPTModel) -> Iterator[list[nn.Module]]:
    """Modules whose weights are gathered together."""
    yield from ([layer] for layer in model.decoder.layers)
    lookup, output = [model.embedding], [model.output_layer, model.loss]
    yield from [lookup + output] if model.share_embeddings_and_output_weights else [lookup, output]


def _schedule_collectives(model: GPTModel) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    model.embedding.set_unshard_in_backward(False)
    model.loss.set_unshard_in_backward(False)
    # In backward it is one ahead by itself.
    for this, following in itertools.pairwise([model.embedding, *model.decoder.layers]):
        this.set_modules_to_forward_prefetch([following])
