"""The attention module against plain PyTorch, in float64: output and every gradient."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module

from megatron_untied.backends import choose_backend
from megatron_untied.config import ParallelConfig, Precision
from megatron_untied.context_parallel.head_schedule import legal_heads_per_chunk
from megatron_untied.context_parallel.kernels import CpuFlash
from megatron_untied.model import attention_context, layer_submodules, transformer_config
from tests.support import plain_attention
from tests.support.ranks import rank_shard, run_on_ranks
from tests.support.tiny_model import parallel_groups, tiny

# Rotary tables are stored in fp32, so q and k carry a relative error of 6e-8 against float64.
TOLERANCE = 1e-6


def attention_module(config, parallel: ParallelConfig, groups: ProcessGroupCollection):
    transformer = transformer_config(config, parallel, Precision())
    transformer.params_dtype = torch.float64
    parts = attention_context(config, parallel, groups, CpuFlash())
    spec = layer_submodules(transformer, choose_backend("local", "RMSNorm"), parts)
    module = build_module(
        spec.self_attention, config=transformer, layer_number=1, pg_collection=groups
    )
    for name, parameter in module.named_parameters():
        generator = torch.Generator().manual_seed(len(name))
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return module


def reference_module(x, weights, config):
    """The same module on the whole sequence [s, b, m], from its parameters by name."""
    h, g, d = config.num_attention_heads, config.num_query_groups, config.kv_channels
    qkv = x @ weights["linear_qkv.weight"].T + weights["linear_qkv.bias"]
    qkv = qkv.unflatten(-1, (g, h // g + 2, d))  # Megatron's order: a kv head's q heads, k, v
    q, k, v = qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]
    q, k = (
        torch.nn.functional.rms_norm(y, (d,), weights[f"{kind}_layernorm.weight"], 1e-5)
        for kind, y in (("q", q), ("k", k))
    )
    out = plain_attention.causal_attention(plain_attention.rotate(q), plain_attention.rotate(k), v)
    return out.flatten(2) @ weights["linear_proj.weight"].T


def check_module(group, heads, kv_heads, b):
    p, n = group.size(), 7
    config = tiny(
        num_attention_heads=heads, num_query_groups=kv_heads, add_qkv_bias=True, qk_layernorm=True
    )
    generator = torch.Generator().manual_seed(3)
    x, d_out = torch.randn(2, p * n, b, config.hidden_size, generator=generator).double()
    for chunk in legal_heads_per_chunk(heads, p):
        parallel = ParallelConfig(context_parallel_size=p, heads_per_chunk=chunk)
        module = attention_module(config, parallel, parallel_groups(parallel))
        weights = dict(module.named_parameters())
        whole = x.clone().requires_grad_()
        expected = reference_module(whole, weights, config)
        gradients = torch.autograd.grad(expected, [whole, *weights.values()], d_out)

        mine = rank_shard(x, group).requires_grad_()
        out, bias = module(mine, None)
        assert bias is None
        out.backward(rank_shard(d_out, group))
        assert_close("output", out, rank_shard(expected, group))
        assert_close("input", mine.grad, rank_shard(gradients[0], group))
        for (name, parameter), gradient in zip(weights.items(), gradients[1:], strict=True):
            dist.all_reduce(parameter.grad, group=group)
            assert_close(f"{name}, chunk {chunk}", parameter.grad, gradient)


def assert_close(name, got, expected):
    error = (got - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE, f"{name}: {error:.1e}"


def check_window_on_a_ring(group):
    parallel = ParallelConfig(context_parallel_size=2, cp_comm_type="p2p")
    with pytest.raises(ValueError, match="a window of 4 keys .* use --cp-comm-type a2a"):
        attention_module(tiny(window_size=4), parallel, parallel_groups(parallel))


def test_a_ring_refuses_a_window():
    run_on_ranks(check_window_on_a_ring, 2)


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (6, 3)], ids=["MHA", "GQA", "uneven GQA"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_module_equals_plain_attention(world_size, heads, b):
    run_on_ranks(check_module, world_size, *heads, b)
