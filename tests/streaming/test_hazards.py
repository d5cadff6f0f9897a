"""What overwriting the residual and its gradient in place must not break."""

import itertools
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_untied.api import streamed_layers as streamed_layers_of_api
from megatron_untied.config import MemoryConfig, ParallelConfig, Precision
from megatron_untied.model import transformer_config
from megatron_untied.residual import Rows
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import batch, make_model, parallel_groups, tiny

SELECTIVE = MemoryConfig(recompute_granularity="selective", sequence_tile_size=5)
GROUPS = MemoryConfig(
    recompute_granularity="full", recompute_num_layers=2, cpu_offloading_num_layers=2
)
PARKED = MemoryConfig(
    recompute_granularity="selective",
    recompute_num_layers=2,
    sequence_tile_size=5,
    cpu_offloading_num_layers=2,
    park_during_attention=True,
)
aten = torch.ops.aten
NAMES = ["selective", "groups of full", "parked"]


def streamed_layers(memory=SELECTIVE, num_layers=1):
    model = make_model(tiny(num_layers=num_layers), memory=memory)
    return model, model.decoder.layers


def run(layers, x):
    for layer in layers:
        x, _ = layer(x)
    return x


def some_input():
    return torch.randn(9, 2, 48, generator=torch.Generator().manual_seed(0))


def check_shared_gradient(group):
    _, layers = streamed_layers()
    dy = torch.randn(9, 2, 48)
    for reshape in (lambda t: t, lambda t: t.view(-1, 48)):
        other = some_input().requires_grad_()
        branch = other * 1  # made before the layer, so its backward runs after the layer's
        (reshape(run(layers, some_input())) + reshape(branch)).backward(reshape(dy).clone())
        assert torch.equal(other.grad, dy)
    mine = dy.clone()
    run(layers, some_input()).backward(mine)  # the caller's own gradient
    assert torch.equal(mine, dy)


def test_a_gradient_that_others_read_is_not_overwritten():
    run_on_ranks(check_shared_gradient, 1)


def check_hooks(group):
    _, layers = streamed_layers()
    dy, seen = torch.randn(9, 2, 48), []
    out = run(layers, some_input().requires_grad_())
    out.register_hook(lambda gradient: seen.append(gradient.clone()))
    out.retain_grad()
    (out * 1).backward(dy)
    assert torch.equal(seen[0], dy)
    assert torch.equal(out.grad, dy)

    layers[0].register_full_backward_hook(lambda *args: None)
    with pytest.raises(ValueError, match="register_full_backward_pre_hook"):
        run(layers, some_input())


def test_hooks_on_the_output_see_its_gradient_or_are_refused():
    run_on_ranks(check_hooks, 1)


def api_layers(memory, num_layers):
    """As a caller's own loop has them: tensors on the device go in and come out."""
    parallel_groups(ParallelConfig())
    config = transformer_config(tiny(num_layers=num_layers), ParallelConfig(), Precision())
    config.init_method = config.output_layer_init_method = torch.nn.init.xavier_normal_
    return streamed_layers_of_api(config, memory=memory)


def check_no_grad(group, memory):
    layers = api_layers(memory, num_layers=2)
    store = layers[0].streaming.store
    expected = run(layers, some_input()).detach().clone()
    assert store.arena.used_bytes == 0  # the graph is gone, and what it held with it
    with torch.no_grad():
        assert torch.equal(run(layers, some_input()), expected)
    assert store.arena.used_bytes == 0
    reserved = store.arena.reserved_bytes
    run(layers, some_input().requires_grad_()).sum().backward()
    assert store.arena.used_bytes == 0
    assert store.arena.reserved_bytes >= reserved


@pytest.mark.parametrize("memory", [GROUPS, PARKED], ids=["groups of full", "parked"])
def test_a_forward_without_grad_keeps_nothing(memory):
    run_on_ranks(check_no_grad, 1, memory)


def logits_and_gradient(model, tokens):
    logits = model(tokens)
    logits.square().mean().backward()
    return logits.detach(), model.embedding.word_embeddings.weight.grad


def check_logits(group):
    data = batch(tiny(), 24, 1)
    (expected, gradient), (found, parked_gradient) = (
        logits_and_gradient(make_model(memory=memory), data["tokens"]) for memory in (None, PARKED)
    )
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(parked_gradient, gradient, rtol=1e-4, atol=1e-6)


def test_logits_of_a_residual_on_the_host():
    run_on_ranks(check_logits, 1)


def check_stand_ins(group):
    layers, x = api_layers(PARKED, num_layers=2), some_input().requires_grad_()
    before, seen = x.detach().clone(), []
    hidden, _ = layers[0](x)
    hidden.register_hook(lambda gradient: seen.append(Rows.of(gradient).is_on_host))
    out, _ = layers[1](hidden)
    assert hidden.untyped_storage().nbytes() == out.element_size()
    out.sum().backward()
    assert seen == [True]
    assert x.grad.isfinite().all()
    assert torch.equal(x, before)  # copied to the host, not overwritten

    hidden, _ = layers[0](some_input().requires_grad_())
    hidden.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(RuntimeError, match="between two layers is on the host"):
        run(layers[1:], hidden).sum().backward()


def test_what_computes_with_a_stand_in_is_an_error():
    run_on_ranks(check_stand_ins, 1)


def check_two_forwards(group, memory):
    layers = api_layers(memory, num_layers=4)
    inputs = [some_input(), some_input().flip(0) * 2]

    def gradients(order, interleaved):
        layers.zero_grad()
        leaves = [x.clone().requires_grad_() for x in inputs]
        if interleaved:
            losses = [run(layers, leaf * 1).square().sum() for leaf in leaves]
            for i in order:
                losses[i].backward()
        else:
            for leaf in leaves:
                run(layers, leaf * 1).square().sum().backward()
        return [leaf.grad for leaf in leaves] + [p.grad.clone() for p in layers.parameters()]

    expected = gradients((0, 1), interleaved=False)
    for order in itertools.permutations((0, 1)):
        for got, want in zip(gradients(order, interleaved=True), expected, strict=True):
            assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("memory", [SELECTIVE, GROUPS, PARKED], ids=NAMES)
def test_two_forwards_before_a_backward(memory):
    run_on_ranks(check_two_forwards, 1, memory)


def check_hooks_fire_once(group, memory):
    model, _ = streamed_layers(memory, num_layers=2)
    fired = dict.fromkeys(dict(model.named_parameters()), 0)

    def count(name):
        def hook(parameter):
            fired[name] += 1

        return hook

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(count(name))
        parameter.register_hook(count(name))
    model(**batch(tiny(), 24, 1)).backward()
    assert set(fired.values()) == {2}  # one of each kind


@pytest.mark.parametrize("memory", [SELECTIVE, GROUPS, PARKED], ids=NAMES)
def test_each_parameter_gets_one_gradient(memory):
    run_on_ranks(check_hooks_fire_once, 1, memory)


def check_residual_in_place(group):
    _, layers = streamed_layers(num_layers=3)
    x = some_input().requires_grad_()
    embedded = x * 1
    hidden = run(layers, embedded)
    assert hidden.data_ptr() == embedded.data_ptr()
    before, after = [], []
    hidden.register_hook(lambda gradient: before.append(gradient.data_ptr()))
    embedded.register_hook(lambda gradient: after.append(gradient.data_ptr()))
    (hidden * 2).sum().backward()
    assert before == after

    saved = torch.tanh(x)  # keeps its output for its backward
    loss = run(layers, saved).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_residual_is_one_storage_and_autograd_notices_who_saved_it():
    run_on_ranks(check_residual_in_place, 1)


def check_attention_runs(group, memory, forwards_per_layer):
    model, layers = streamed_layers(memory, num_layers=4)
    kernel = layers[0].self_attention.context.kernel
    calls = 0
    forward = kernel.forward

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return forward(*args, **kwargs)

    kernel.forward = counted
    model(**batch(tiny(), 24, 1)).backward()
    assert calls == forwards_per_layer * len(layers)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize(("granularity", "forwards"), [("full", 2), ("selective", 1)])
def test_attention_forwards_a_step(granularity, forwards, every):
    memory = MemoryConfig(recompute_granularity=granularity, recompute_num_layers=every)
    run_on_ranks(check_attention_runs, 1, memory, forwards)


class Products(TorchDispatchMode):
    """Collects the operators that multiply matrices, and adds up the multiplications of each."""

    def __init__(self):
        super().__init__()
        self.multiplications = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):
            self.multiplications[func.overloadpacket] += out.numel() * args[-1].shape[-2]
        return out


def check_products(group, config, memory):
    """Of a step at micro-batch 1, in which a residual made by a transpose has stride n * m."""
    model, s = make_model(config, memory=memory), 24
    with Products() as products:
        model(**batch(config, s, 1)).backward()
    layer, full = model.decoder.layers[0], memory.recompute_granularity == "full"
    attention, mlp = layer.self_attention, layer.mlp
    # One run in forward, two of as many products in backward. Attention's backward needs q, k, v
    # again, its recomputation once more; a tile's last product is not recomputed.
    norms_read_qkv = int(config.qk_layernorm)
    runs = {
        attention.linear_qkv: 4 + full + norms_read_qkv,
        attention.linear_proj: 4,
        mlp.linear_fc1: 4,
        mlp.linear_fc2: 3,
    }
    elements = config.num_layers * sum(n * linear.weight.numel() for linear, n in runs.items())
    # The loss takes other operators, but for the gradient of its input.
    elements += config.vocab_size * config.hidden_size
    assert products.multiplications == {aten.mm: s * elements}


@pytest.mark.parametrize("changes", [{}, {"qk_layernorm": True}], ids=["", "norms of q and k"])
@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_no_product_runs_for_nothing_or_as_a_batch_of_vectors(granularity, changes):
    memory = MemoryConfig(
        recompute_granularity=granularity, sequence_tile_size=7, loss_chunk_size=10
    )
    run_on_ranks(check_products, 1, tiny(**changes), memory)
