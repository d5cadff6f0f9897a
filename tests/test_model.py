"""One function, however it is split: logits of whole models on real ranks."""

from dataclasses import replace

import pytest
import torch

from megatron_untied import model as model_module
from megatron_untied.config import MemoryConfig, ModelConfig, ParallelConfig, RotaryConfig
from megatron_untied.context_parallel.head_schedule import legal_heads_per_chunk
from megatron_untied.context_parallel.kernels.flash_attention import (
    ALL_HEADS_IN_32_BITS,
    TorchFlash,
)
from megatron_untied.model import attention_kernel
from tests.support.planning import run_config
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import batch, make_model, parallel_groups, tiny

S = 24
MEMORIES = (MemoryConfig(), MemoryConfig(recompute_granularity="full", sequence_tile_size=5))
PARTS = tiny(
    kv_channels=12,
    add_qkv_bias=True,
    qk_layernorm=True,
    window_size=9,
    untie_embeddings_and_output_weights=False,
    rotary=RotaryConfig(scaling="yarn", scaling_factor=4.0, original_max_positions=16),
)
"""What families of models have besides widths; heads wider than hidden_size / heads."""
HEADS = tiny(num_attention_heads=6, num_query_groups=3)


def tokens_of(config: ModelConfig) -> torch.Tensor:
    return batch(config, S, 2)["tokens"]


@torch.no_grad()
def one_rank_logits(group, config):
    parallel_groups(ParallelConfig())
    return make_model(config)(tokens_of(config))


@torch.no_grad()
def check_logits(group, config, parallel, expected):
    groups = parallel_groups(parallel)
    num_ulysses, _ = parallel.num_ulysses_and_ring
    for u in legal_heads_per_chunk(config.num_attention_heads, num_ulysses):
        for memory in MEMORIES:
            model = make_model(config, replace(parallel, heads_per_chunk=u), memory, groups=groups)
            layout = model.attention_context.layout
            logits = model(layout.shard(tokens_of(config)))
            error = (logits - layout.shard(expected, dim=1)).abs().max() / expected.abs().max()
            # fp32; products of other shapes sum in another order.
            assert error < 1e-6, f"{u} heads, {memory.recompute_granularity}: {error:.1e}"


PARALLEL = {
    "1": ParallelConfig(),
    "2": ParallelConfig(context_parallel_size=2),
    "3": ParallelConfig(context_parallel_size=3),
    "4": ParallelConfig(context_parallel_size=4),
}


@pytest.mark.parametrize("parallel", PARALLEL.values(), ids=PARALLEL)
@pytest.mark.parametrize("config", [PARTS, HEADS], ids=["parts", "6 heads"])
def test_logits_are_the_same_at_every_degree(config, parallel):
    (expected,) = run_on_ranks(one_rank_logits, 1, config)
    run_on_ranks(check_logits, parallel.context_parallel_size, config, parallel, expected)


@torch.no_grad()
def check_perturbation(group, parallel, changed):
    groups, config = parallel_groups(parallel), tiny(num_layers=3, num_query_groups=2)
    tokens, others = tokens_of(config), tokens_of(config)
    others[:, changed] = (others[:, changed] + 1) % config.vocab_size
    for memory in MEMORIES:
        model = make_model(config, parallel, memory, groups=groups)
        layout = model.attention_context.layout
        differs = (model(layout.shard(tokens)) != model(layout.shard(others))).any(-1)
        expected = (torch.arange(S) >= changed).expand_as(tokens)
        assert torch.equal(differs, layout.shard(expected)), memory.recompute_granularity


@pytest.mark.parametrize("changed", [0, 11, 12, 23])
def test_a_token_changes_no_logit_before_it_and_every_one_after(changed):
    run_on_ranks(check_perturbation, 2, PARALLEL["2"], changed)


@torch.no_grad()
def check_bfloat16(group):
    positions = torch.arange(5_242_880 - 8, 5_242_880)
    model = make_model(tiny(rotary=RotaryConfig(base=5e5)))
    rotary = model.attention_context.rotary
    expected = [x.clone() for x in rotary.at(positions)]
    model.bfloat16()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for found, before in zip(rotary.at(positions.clone()), expected, strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, before)
    assert not list(model.buffers())


def test_bfloat16_changes_nothing_of_the_rotary_table():
    run_on_ranks(check_bfloat16, 1)


@torch.no_grad()
def differences(group, plain, changed):
    """Of a model's logits from those of the plain one, with the parameters they share."""
    parallel_groups(ParallelConfig())
    found = []
    for memory in MEMORIES:
        logits = [make_model(c, memory=memory)(tokens_of(plain)) for c in (plain, changed)]
        found.append((logits[0] - logits[1]).abs().max().item())
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_layernorm": True},
        {"window_size": 9},
        {"rotary": RotaryConfig(base=5e5)},
        {"rotary": RotaryConfig(percent=0.5)},
        {"rotary": RotaryConfig(scaling="linear", scaling_factor=2.0)},
        {"rotary": RotaryConfig(scaling="llama3", scaling_factor=8.0, original_max_positions=16)},
        {"rotary": RotaryConfig(scaling="yarn", scaling_factor=4.0, original_max_positions=16)},
        {"untie_embeddings_and_output_weights": False},
    ],
    ids=str,
)
def test_every_part_has_an_effect(changes):
    (found,) = run_on_ranks(differences, 1, tiny(), tiny(**changes))
    assert min(found) > 1e-3


def test_a_sequence_that_the_kernel_cannot_index_is_refused_before_a_model_is_built(monkeypatch):
    """Four query heads share a key-value head in a chunk, at 5 Mi tokens, on an H100.

    With the limits that torch's kernel had before it was built from FlashAttention-2 2.8.
    """
    monkeypatch.setattr(TorchFlash, "limits", ALL_HEADS_IN_32_BITS)
    monkeypatch.setattr(model_module, "current_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    flags = (
        "--model llama3-8b --bf16 --seq-length 5242880 --context-parallel-size 8 "
        "--attention-backend torch-flash --cp-heads-per-chunk "
    )
    with pytest.raises(ValueError, match=r"torch-flash cannot index 5243008 rows .* x 4 heads"):
        attention_kernel(run_config(flags + "32"))
    assert attention_kernel(run_config(flags + "8")).name == "torch-flash"
