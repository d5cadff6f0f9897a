"""The streamed model against the same model under ordinary autograd."""

from dataclasses import replace

import pytest
import torch

from megatron_untied.config import MemoryConfig, ParallelConfig
from tests.support.late_device import late_device
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import batch, make_model, parallel_groups, tiny

# The same sums in another order, in fp32: tiles instead of whole matrices.
TOLERANCE = 5e-6


def loss_and_gradients(model, data, layout):
    shard = {name: layout.shard(x) for name, x in data.items()}
    loss = model(**shard)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), gradients


def check_equals_autograd(group, config, parallel, memories, b=2, s=24):
    groups, data = parallel_groups(parallel), batch(config, s, b)
    plain = make_model(config, parallel, groups=groups)
    layout = plain.decoder.layers[0].self_attention.context.layout
    expected_loss, expected = loss_and_gradients(plain, data, layout)
    kept_otherwise = {}
    for memory in memories:
        streamed = make_model(config, parallel, memory, groups=groups)
        for _ in range(2):  # a second step reuses every buffer
            loss, gradients = loss_and_gradients(streamed, data, layout)
        assert torch.allclose(loss, expected_loss, rtol=1e-6), memory
        for name, gradient in gradients.items():
            error = (gradient - expected[name]).abs().max() / expected[name].abs().max()
            assert error < TOLERANCE, f"{name}: {error:.1e} with {memory}"
        # The same bits whether attention outputs are kept or recomputed.
        rest = replace(memory, recompute_granularity=None, attention_output_layers=None)
        others = kept_otherwise.setdefault(rest, gradients)
        assert all(torch.equal(gradient, others[name]) for name, gradient in gradients.items())


def memory_configs():
    for granularity, kept in (("full", None), ("selective", None), ("selective", 2)):
        for every, tile, host, park in ((1, 5, 0, False), (2, 1000, 2, False), (3, 7, 5, True)):
            yield MemoryConfig(
                recompute_granularity=granularity,
                attention_output_layers=kept,
                recompute_num_layers=every,
                sequence_tile_size=tile,
                cpu_offloading_num_layers=host,
                park_during_attention=park,
            )


PARALLEL = {
    "1 rank": (1, ParallelConfig()),
    "CP 2": (2, ParallelConfig(context_parallel_size=2, heads_per_chunk=2)),
    "CP 4": (4, ParallelConfig(context_parallel_size=4, heads_per_chunk=4, cp_overlap=False)),
    "ring 2": (2, ParallelConfig(context_parallel_size=2, cp_comm_type="p2p", heads_per_chunk=3)),
    "ring 2 of Ulysses 2": (
        4,
        ParallelConfig(
            context_parallel_size=4,
            cp_comm_type="a2a+p2p",
            hierarchical_context_parallel_sizes=(2, 2),
            heads_per_chunk=2,
        ),
    ),
    "TP 2": (2, ParallelConfig(tensor_model_parallel_size=2)),
    "TP 2 SP": (2, ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)),
    "CP 2 TP 2 SP": (
        4,
        ParallelConfig(
            context_parallel_size=2,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            heads_per_chunk=2,
        ),
    ),
}


@pytest.mark.parametrize("name", PARALLEL)
def test_streamed_model_equals_autograd(name):
    world_size, parallel = PARALLEL[name]
    run_on_ranks(
        check_equals_autograd,
        world_size,
        tiny(num_layers=5, num_query_groups=2),
        parallel,
        list(memory_configs()),
    )


def test_every_model_part_is_streamed():
    config = tiny(
        num_layers=2,
        add_qkv_bias=True,
        qk_layernorm=True,
        untie_embeddings_and_output_weights=False,
        kv_channels=12,
    )
    parallel = ParallelConfig(context_parallel_size=2, heads_per_chunk=2)
    run_on_ranks(check_equals_autograd, 2, config, parallel, list(memory_configs()))
    config = tiny(normalization="LayerNorm", add_bias_linear=True, swiglu=False)
    run_on_ranks(check_equals_autograd, 2, config, parallel, list(memory_configs()))


def check_late_device(group, parallel, memories):
    config = tiny(num_layers=4)
    groups, data = parallel_groups(parallel), batch(config, 24, 2)

    def last_of_two_steps(memory):
        model = make_model(config, parallel, memory, groups=groups)
        layer = model.decoder.layers[0]
        for _ in range(2):  # the second reuses every buffer and host slot of the first
            step = loss_and_gradients(model, data, layer.self_attention.context.layout)
        return *step, layer.streaming.store.arena

    for memory in memories:
        loss, gradients, _ = last_of_two_steps(memory)
        with late_device():
            late_loss, late_gradients, arena = last_of_two_steps(memory)
        assert torch.equal(late_loss, loss), memory
        for name, gradient in late_gradients.items():
            assert torch.equal(gradient, gradients[name]), f"{name} with {memory}"
        assert arena.used_bytes == 0
        assert arena.num_allocations > 0


@pytest.mark.parametrize("name", ["CP 2", "CP 4", "ring 2", "ring 2 of Ulysses 2", "CP 2 TP 2 SP"])
def test_nothing_is_used_before_it_is_there(name):
    memories = [
        MemoryConfig(
            recompute_granularity=granularity,
            recompute_num_layers=every,
            sequence_tile_size=5,
            cpu_offloading_num_layers=4,
            park_during_attention=park,
        )
        for granularity, every, park in (
            ("full", 1, False),
            ("full", 2, True),
            ("selective", 1, True),
            ("selective", 3, False),
        )
    ]
    # Some inputs on the device, and a loss by chunks.
    memories.append(
        MemoryConfig(
            recompute_granularity="selective",
            recompute_num_layers=2,
            sequence_tile_size=5,
            cpu_offloading_num_layers=2,
            park_during_attention=True,
            loss_chunk_size=7,
        )
    )
    world_size, parallel = PARALLEL[name]
    run_on_ranks(check_late_device, world_size, parallel, memories)
