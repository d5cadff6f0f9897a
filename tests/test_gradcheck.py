"""Gradients of whole layers against finite differences, in float64 on two ranks.

All ranks perturb the same element at the same time: what is checked is the sum over all ranks'
outputs as a function of the whole sequence and of the parameters that the ranks share.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.spec_utils import build_module
from torch.autograd import gradcheck

from megatron_untied.backends import choose_backend
from megatron_untied.config import MemoryConfig, ParallelConfig, Precision
from megatron_untied.context_parallel.kernels import CpuFlash, Segments
from megatron_untied.context_parallel.sequence import SequenceInfo
from megatron_untied.model import attention_context, layer_spec, transformer_config
from megatron_untied.platform.device import current_device
from megatron_untied.streaming.host_arena import HostArena
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import parallel_groups, tiny

S, B = 12, 2
CONFIG = tiny(
    num_layers=1,
    hidden_size=16,
    ffn_hidden_size=12,
    num_attention_heads=3,
    num_query_groups=1,
    kv_channels=6,
    add_qkv_bias=True,
    qk_layernorm=True,
)
DOCUMENTS = (Segments.of((0, 5, 6, 12)), Segments.of((0, 12)))
MEMORIES = {
    "standard": MemoryConfig(),
    "full": MemoryConfig(recompute_granularity="full", sequence_tile_size=4),
    "selective": MemoryConfig(recompute_granularity="selective", sequence_tile_size=4),
}
PARALLEL = {
    "a2a": ParallelConfig(context_parallel_size=2, heads_per_chunk=2),
    "p2p": ParallelConfig(context_parallel_size=2, cp_comm_type="p2p", heads_per_chunk=1),
}


class SumOverRanks(torch.autograd.Function):
    """A function of this rank's, summed; its gradients are summed too.

    The function runs anew in each backward: gradcheck asks for several, and a streamed layer's
    graph has one.
    """

    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function, ctx.inputs = function, inputs
        total = function(*inputs).clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            part = ctx.function(*ctx.inputs)
        gradients = torch.autograd.grad(part, ctx.inputs, gradient)
        for each in gradients:
            dist.all_reduce(each)
        return None, *gradients


def float64_layer(parallel, memory):
    groups, config = parallel_groups(parallel), transformer_config(CONFIG, parallel, Precision())
    config.params_dtype = torch.float64
    parts = attention_context(CONFIG, parallel, groups, CpuFlash())
    backend = choose_backend("local", "RMSNorm")
    arena = HostArena.for_device(current_device())
    spec = layer_spec(config, backend, parts, memory, arena)
    layer = build_module(spec, config=config, layer_number=1, pg_collection=groups)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.4)
    return layer, parts.layout


def check_gradients(group, parallel, documents):
    sequence = SequenceInfo(documents=documents)
    for name, memory in MEMORIES.items():
        torch.manual_seed(0)  # the same layer and directions of perturbation on every rank
        layer, layout = float64_layer(parallel, memory)
        x = torch.randn(S, B, CONFIG.hidden_size, dtype=torch.float64, requires_grad=True)
        weights = layout.shard(torch.randn_like(x), dim=0)
        inputs = (x, *layer.parameters())  # gradcheck perturbs them in place
        assert len(inputs) == 10
        part = functools.partial(weighted_sum, layer, layout, weights, sequence)
        total = functools.partial(SumOverRanks.apply, part)
        assert gradcheck(total, inputs, fast_mode=True, check_undefined_grad=False), name


def weighted_sum(layer, layout, weights, sequence, x, *parameters):
    """Of this rank's outputs; the parameters are the layer's own."""
    out, _ = layer(layout.shard(x, dim=0), packed_seq_params=sequence)
    return (out * weights).sum()


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["plain", "packed"])
@pytest.mark.parametrize("parallel", PARALLEL.values(), ids=PARALLEL)
def test_gradients_of_a_layer_are_its_differences(parallel, documents):
    run_on_ranks(check_gradients, 2, parallel, documents)
