"""The streamed model against the same model under ordinary autograd."""

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_untied.config import AdaptationConfig, MemoryConfig, ParallelConfig
from megatron_untied.config.parameters import TRAIN_ALL, parameters
from tests.support.late_device import late_device
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import batch, make_model, parallel_groups, tiny

# The same sums in another order, in fp32: tiles instead of whole matrices.
TOLERANCE = 5e-6


def loss_and_gradients(model, data, layout):
    shard = {name: layout.shard(x) for name, x in data.items()}
    loss = model(**shard)
    loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: p.grad.clone() for name, p in trained.items()}
    model.zero_grad()
    return loss.detach(), gradients


def check_equals_autograd(group, config, parallel, memories, adaptation=TRAIN_ALL, b=2, s=24):
    groups, data = parallel_groups(parallel), batch(config, s, b)
    plain = make_model(config, parallel, groups=groups, adaptation=adaptation)
    layout = plain.decoder.layers[0].self_attention.context.layout
    expected_loss, expected = loss_and_gradients(plain, data, layout)
    kept_otherwise = {}
    for memory in memories:
        streamed = make_model(config, parallel, memory, groups=groups, adaptation=adaptation)
        for _ in range(2):  # a second step reuses every buffer
            loss, gradients = loss_and_gradients(streamed, data, layout)
        assert gradients.keys() == expected.keys()
        assert streamed.store.arena.used_bytes == 0
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


LORA = AdaptationConfig(lora_rank=3, lora_alpha=6.0)


@pytest.mark.parametrize("name", PARALLEL)
def test_adapters_alone_equal_autograd(name):
    world_size, parallel = PARALLEL[name]
    config = tiny(num_layers=3, num_query_groups=2, add_qkv_bias=True, qk_layernorm=True)
    memories = list(memory_configs())[1:]
    run_on_ranks(check_equals_autograd, world_size, config, parallel, memories, LORA)


@pytest.mark.parametrize(
    ("world_size", "patterns"),
    [
        # The backward ends in the middle of a group, and nothing before it is saved.
        (1, ("embedding.*", "decoder.layers.[0-2].*")),
        (2, ("embedding.*", "decoder.layers.[0-2].*", "*.layers.3.self_attention.*")),
        (2, ("*norm*", "*.linear_fc2.*", "output_layer.*")),
        (1, ("decoder.layers.*", "embedding.*")),  # no layer has a backward
    ],
)
def test_frozen_parameters_leave_the_other_gradients_as_they_are(world_size, patterns):
    parallel = ParallelConfig(context_parallel_size=world_size, heads_per_chunk=2)
    frozen = AdaptationConfig(freeze=patterns)
    memories = list(memory_configs())
    run_on_ranks(check_equals_autograd, world_size, tiny(num_layers=5), parallel, memories, frozen)


class WeightProducts(TorchDispatchMode):
    """Counts the matrix products by the shape of their result."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"):
            self.counts[tuple(result.shape)] += 1
        return result


def products_of_backward(group, adaptation):
    """Products in the backward of a streamed model with one tile, whose shapes tell them apart."""
    config = tiny(num_layers=3)
    memory = MemoryConfig(recompute_granularity="selective", sequence_tile_size=1000)
    model = make_model(config, memory=memory, adaptation=adaptation)
    calls = []
    for layer in model.decoder.layers:
        backward = layer.self_attention.ulysses.backward
        layer.self_attention.ulysses.backward = functools.partial(
            lambda call, *args: (calls.append(1), call(*args))[1], backward
        )
    loss = model(**batch(config, 25, 2))  # 50 tokens: no matrix has as many rows or columns
    with WeightProducts() as products:
        loss.backward()
    return products.counts, len(calls)


def test_gradients_of_frozen_weights_are_not_computed():
    shapes = {name: its.shape for name, its in parameters(tiny(num_layers=1)).items()}
    matrices = {shape for name, shape in shapes.items() if ".linear_" in name}
    ((everything, calls),) = run_on_ranks(products_of_backward, 1, TRAIN_ALL)
    assert calls == 3
    assert all(everything[shape] == 3 for shape in matrices)
    ((adapters, calls),) = run_on_ranks(products_of_backward, 1, LORA)
    assert calls == 3
    assert not any(adapters[shape] for shape in matrices)
    assert adapters[(72, 3)] >= 6  # the gradients of B of gate and up, in three layers
    first_two = AdaptationConfig(freeze=("embedding.*", "decoder.layers.[01].*"))
    ((last, calls),) = run_on_ranks(products_of_backward, 1, first_two)
    assert calls == 1
    assert all(last[shape] == 1 for shape in matrices)


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
