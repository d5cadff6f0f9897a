"""Attention and streamed layers without the trainer, against plain torch on whole sequences."""

import gc
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_untied
from megatron_untied import api
from megatron_untied.config import MemoryConfig, ParallelConfig, RotaryConfig
from megatron_untied.context_parallel.sequence import SequenceInfo
from megatron_untied.rope import RotaryTable
from tests.support import plain_attention
from tests.support.pairs import all_pairs
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import parallel_groups

ROOT = Path(__file__).resolve().parents[1]
# Rotary tables are stored in fp32, so q and k carry a relative error of 6e-8 against float64.
TOLERANCE = 1e-6
D = 8


def assert_close(name, got, expected):
    error = (got - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE, f"{name}: {error:.1e}"


def attention(q, k, v, window=None, documents=None):
    """Attention of [s, b, h, d] with k, v [s, b, g, d], by an s x s mask for each sample."""
    s, b, h, _ = q.shape
    share = h // k.shape[2]
    position = torch.arange(s)
    seen = (position[:, None] >= position).expand(b, s, s)
    if window is not None:
        seen = seen & (position[:, None] - position < window)
    if documents is not None:
        bounds = [torch.tensor(each) for each in documents]
        number = torch.stack([torch.bucketize(position, each, right=True) for each in bounds])
        seen = seen & (number[:, :, None] == number[:, None])
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, *(y.repeat_interleave(share, 2) for y in (k, v))))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None]).permute(2, 0, 1, 3)


def groups_of(num_ulysses: int, num_ring: int):
    """This rank's Ulysses and ring groups among num_ulysses * num_ring ranks."""
    ranks = torch.arange(num_ulysses * num_ring).view(num_ring, num_ulysses)
    ulysses, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    ring, _ = dist.new_subgroups_by_enumeration(ranks.t().tolist())
    return ulysses if num_ulysses > 1 else None, ring if num_ring > 1 else None


def check_attention(world, num_ulysses, num_ring, heads, options, *, rotates=False, n=6, b=2):
    group, ring_group = groups_of(num_ulysses, num_ring)
    layout = megatron_untied.sequence_layout(group, ring_group)
    h, g = heads
    generator = torch.Generator().manual_seed(5)
    q, k, v, d_out = (
        torch.randn(n * layout.size, b, x, D, generator=generator, dtype=torch.float64)
        for x in (h, g, g, h)
    )
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    rotated = [plain_attention.rotate(x) for x in whole[:2]] if rotates else whole[:2]
    masks = {name: options[name] for name in ("window", "documents") if name in options}
    expected = attention(*rotated, whole[2], **masks)
    gradients = torch.autograd.grad(expected, whole, d_out)

    rotary = RotaryTable(RotaryConfig(), D).at(layout.positions(n)) if rotates else None
    mine = [layout.shard(x, dim=0).requires_grad_() for x in (q, k, v)]
    out = megatron_untied.untied_attention(
        *mine, group=group, ring_group=ring_group, rotary=rotary, **options
    )
    out.backward(layout.shard(d_out, dim=0))
    assert_close("out", out, layout.shard(expected, dim=0))
    for name, x, gradient in zip("qkv", mine, gradients, strict=True):
        assert_close(f"d{name}", x.grad, layout.shard(gradient, dim=0))


DOCUMENTS = {1: [[0, 2, 6], [0, 6]], 2: [[0, 5, 12], [0, 1, 1, 8, 12]],
             4: [[0, 1, 11, 24], [0, 24]]}  # fmt: skip


OPTIONS = {
    "defaults": {},
    "one exchange": {"heads_per_chunk": "all", "overlap": False},
    "documents": {"documents": DOCUMENTS},
    "window": {"window": 3, "documents": DOCUMENTS, "overlap": False},
}
FACTORS = {
    "ranks": [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)],  # of Ulysses, of the ring
    "heads": [(8, 8), (8, 2), (6, 3)],
    "rotates": [False, True],
    "options": list(OPTIONS),
}
CASES = all_pairs(FACTORS, lambda case: case["options"] != "window" or case["ranks"][1] == 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_attention(case):
    """Every pair of factors' values."""
    p = case["ranks"][0] * case["ranks"][1]
    options = dict(OPTIONS[case["options"]])
    if "documents" in options:
        options["documents"] = DOCUMENTS[p]
    run_on_ranks(
        check_attention, p, *case["ranks"], case["heads"], options, rotates=case["rotates"]
    )


def qkv(*heads, n=6, b=1, d=D, **options):
    return [torch.randn(n, b, x, d, **options) for x in heads]


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (qkv(4, 4, 2), {}, "k [6, 1, 4, 8], v [6, 1, 2, 8]; give [n, b, heads, d], and k and v of"),
        ([*qkv(4), *qkv(4, 4, d=16)], {}, "only the number of heads may differ"),
        ([*qkv(4), *qkv(4, 4, dtype=torch.float64)], {}, "give one dtype on one device"),
        (qkv(4, 3, 3), {}, "4 query heads do not share 3 key-value heads evenly"),
        (qkv(4, 4, 4), {"heads_per_chunk": 9}, "9 does not split 4 heads over 1 ranks"),
        (qkv(4, 4, 4), {"window": 0}, "a window of 0 keys must hold at least 1"),
        (qkv(4, 4, 4), {"documents": [[0, 6], [0, 6]]}, "bounds of 2 samples; the batch has 1"),
        (qkv(4, 4, 4), {"documents": [[0, 4]]}, "documents[0] is [0, 4]; give bounds that begin"),
        (qkv(4, 4, 4), {"documents": [[0, 4, 2, 6]]}, "documents[0] is [0, 4, 2, 6]; give bounds"),
        (qkv(4, 4, 4), {"rotary": (torch.ones(5, 1, 1, 4),) * 2}, "needs [6, 1 or 1, 1, rot/2]"),
    ],
)  # fmt: skip
def test_attention_refuses_what_does_not_fit_together(inputs, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        megatron_untied.untied_attention(*inputs, **options)


def check_ring_refusals(group):
    with pytest.raises(ValueError, match="window 4 needs the whole sequence .* give group alone"):
        megatron_untied.untied_attention(*qkv(4, 4, 4), ring_group=group, window=4)
    with pytest.raises(ValueError, match="10 tokens is not divisible over 2 .* a multiple of 4"):
        megatron_untied.untied_attention(*qkv(4, 4, 4, n=5), ring_group=group)


def test_attention_over_a_ring_refuses_a_window_and_odd_shards():
    run_on_ranks(check_ring_refusals, 2)


def test_no_buffer_outlives_a_pass(monkeypatch):
    made = []

    class Workspace(api.Workspace):
        def __init__(self):
            super().__init__()
            made.append(weakref.ref(self))

    monkeypatch.setattr(api, "Workspace", Workspace)
    q, k, v = (x.requires_grad_() for x in qkv(4, 2, 2))
    out = megatron_untied.untied_attention(q, k, v)
    gc.collect()
    assert [each() for each in made] == [None]
    out.sum().backward()
    gc.collect()
    assert [each() for each in made] == [None, None]


def transformer_config(p, cp_comm_type):
    config = TransformerConfig(
        num_layers=3,
        hidden_size=48,
        ffn_hidden_size=40,
        num_attention_heads=8,
        num_query_groups=2,
        kv_channels=D,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        context_parallel_size=p,
        cp_comm_type=cp_comm_type,
        transformer_impl="local",
        use_cpu_initialization=True,
    )
    config.params_dtype = torch.float64
    return config


def plain_layer(x, weights, config, documents):
    """One layer on the whole sequence [s, b, m], from its parameters by name."""
    h, g, eps = config.num_attention_heads, config.num_query_groups, config.layernorm_epsilon
    y = F.rms_norm(x, x.shape[-1:], weights["input_layernorm.weight"], eps)
    y = (y @ weights["self_attention.linear_qkv.weight"].T).unflatten(-1, (g, h // g + 2, D))
    q, k, v = y[..., :-2, :].flatten(2, 3), y[..., -2, :], y[..., -1, :]
    out = attention(plain_attention.rotate(q), plain_attention.rotate(k), v, documents=documents)
    x = x + out.flatten(2) @ weights["self_attention.linear_proj.weight"].T
    y = F.rms_norm(x, x.shape[-1:], weights["pre_mlp_layernorm.weight"], eps)
    gate, up = (y @ weights["mlp.linear_fc1.weight"].T).chunk(2, -1)
    return x + (F.silu(gate) * up) @ weights["mlp.linear_fc2.weight"].T


def check_layers(world, cp_comm_type, memories, documents=None, n=6, b=2):
    p = world.size()
    groups = parallel_groups(ParallelConfig(context_parallel_size=p, cp_comm_type=cp_comm_type))
    config = transformer_config(p, cp_comm_type)
    ring = cp_comm_type == "p2p"
    layout = megatron_untied.sequence_layout(*(None, groups.cp) if ring else (groups.cp, None))
    generator = torch.Generator().manual_seed(7)
    shape = 2, n * p, b, config.hidden_size
    x, d_out = torch.randn(shape, generator=generator, dtype=torch.float64)
    for memory in memories:
        layers = megatron_untied.streamed_layers(
            config, memory=memory, documents=documents is not None
        )
        whole = y = x.clone().requires_grad_()
        for layer in layers:
            y = plain_layer(y, dict(layer.named_parameters()), config, documents)
        parameters = dict(layers.named_parameters())
        expected = torch.autograd.grad(y, [whole, *parameters.values()], d_out)

        mine = layout.shard(x, dim=0).requires_grad_()
        sequence = None
        if documents is not None:
            sequence = SequenceInfo(documents=api._segments(documents, b, n * p))
        out = layers(mine.clone(), sequence)
        assert_close("out", out, layout.shard(y, dim=0))
        out.backward(layout.shard(d_out, dim=0))
        assert_close("input", mine.grad, layout.shard(expected[0], dim=0))
        for (name, parameter), gradient in zip(parameters.items(), expected[1:], strict=True):
            dist.all_reduce(parameter.grad, group=groups.cp)
            assert_close(f"{name} with {memory}", parameter.grad, gradient)


@pytest.mark.parametrize("cp_comm_type", ["a2a", "p2p"])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_streamed_layers(p, cp_comm_type):
    selective = MemoryConfig(
        recompute_granularity="selective", cpu_offloading_num_layers=2, sequence_tile_size=5
    )
    run_on_ranks(check_layers, p, cp_comm_type, [None, selective])
    run_on_ranks(check_layers, p, cp_comm_type, [selective], DOCUMENTS[p])


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (MemoryConfig(), "recompute_granularity None is not .*; give 'full' or 'selective'"),
        (MemoryConfig(recompute_granularity="full", loss_chunk_size=8), "loss_chunk_size 8 has no"),
    ],
)
def test_streamed_layers_refuse_what_has_no_effect(memory, message):
    with pytest.raises(ValueError, match=message):
        megatron_untied.streamed_layers(transformer_config(1, "a2a"), memory=memory)


def test_streamed_layers_need_the_parallel_state():
    with pytest.raises(ValueError, match="call parallel_state.initialize_model_parallel first"):
        megatron_untied.streamed_layers(transformer_config(1, "a2a"))


def check_layer_refusals(group):
    parallel_groups(ParallelConfig(context_parallel_size=2, cp_comm_type="p2p"))
    with pytest.raises(ValueError, match="context_parallel_size is 1 .* parallel state has 2"):
        megatron_untied.streamed_layers(transformer_config(1, "a2a"))
    layers = megatron_untied.streamed_layers(transformer_config(2, "p2p"))
    with pytest.raises(ValueError, match="10 tokens is not divisible over 2 .* a multiple of 4"):
        layers(torch.randn(5, 1, 48, dtype=torch.float64))


def test_streamed_layers_refuse_other_groups_and_odd_shards():
    run_on_ranks(check_layer_refusals, 2)


def test_names_are_imported_when_they_are_used():
    code = """if True:
        import sys, torch, megatron_untied
        assert not {"megatron_untied.api", "megatron.core.models.gpt"} & set(sys.modules)
        assert all(getattr(megatron_untied, name) for name in megatron_untied.__all__)
        assert "megatron_untied.api" in sys.modules
        assert "torch._dynamo" not in sys.modules or torch.cuda.is_available()
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    with pytest.raises(AttributeError, match="'megatron_untied' has no attribute 'attention'"):
        _ = megatron_untied.attention


@pytest.mark.parametrize("script", sorted(ROOT.glob("examples/api/*.py")), ids=lambda p: p.name)
def test_scripts(script):
    command = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    done = subprocess.run(
        [sys.executable, *command, script], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall("rank [01](?=:)", done.stdout)) == ["rank 0", "rank 1"]
    assert "nan" not in done.stdout
    page = (ROOT / "docs/api.md").read_text()
    assert f"```python\n{script.read_text()}```" in page, "docs/api.md has another version of it"
