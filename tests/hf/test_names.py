"""The table of names against reshapes written the other way, and against the model itself."""

from dataclasses import replace

import pytest
import torch

from megatron_untied.config import ModelConfig
from megatron_untied.config.parameters import qkv_rows
from megatron_untied.hf.names import check_tensors, hf_layouts
from megatron_untied.sharding.parameter_layout import parameter_layouts
from megatron_untied.sharding.tensor_slice import TensorSlice
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import make_model

H, G, D, M, F = 28, 4, 6, 20, 9
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=M,
    ffn_hidden_size=F,
    num_attention_heads=H,
    num_query_groups=G,
    kv_channels=D,
    vocab_size=101,
    max_position_embeddings=64,
)
MODELS = {
    "plain": MODEL,
    "qkv-bias": replace(MODEL, add_qkv_bias=True),
    "every-bias": replace(MODEL, add_bias_linear=True),
    "head-norms-tied": replace(MODEL, qk_layernorm=True, untie_embeddings_and_output_weights=False),
}


def tensors_of(layouts):
    """Random Hugging Face tensors for a table."""
    torch.manual_seed(0)
    return {name: torch.randn(layout.local_shape) for name, layout in layouts.items()}


def assembled(layouts, tensors):
    """Our parameters put together by the table; what it leaves out is NaN."""
    ours = {}
    for name, layout in layouts.items():
        whole = ours.setdefault(layout.name, torch.full(layout.global_shape, torch.nan))
        for part in layout.global_slices(tensors[name]):
            target = TensorSlice(part.offsets, tuple(part.tensor.shape)).view(whole)
            assert target.isnan().all(), f"{name} overlaps another"
            target.copy_(part.tensor)
    return ours


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_qkv_rows_go_by_group(kind):
    layouts = hf_layouts(MODELS["every-bias"])
    tensors = tensors_of(layouts)
    whole = assembled(layouts, tensors)[f"decoder.layers.1.self_attention.linear_qkv.{kind}"]
    rest = whole.shape[1:]
    by_group = whole.view(G, H // G + 2, D, *rest)  # megatron-core's own split
    attention = "model.layers.1.self_attn."
    for part, ours in (
        ("q", by_group[:, : H // G]),
        ("k", by_group[:, H // G]),
        ("v", by_group[:, H // G + 1]),
    ):
        theirs = tensors[f"{attention}{part}_proj.{kind}"]
        assert torch.equal(ours.reshape(-1, *rest), theirs)


def test_gate_is_above_up():
    layouts = hf_layouts(MODEL)
    tensors = tensors_of(layouts)
    fc1 = assembled(layouts, tensors)["decoder.layers.0.mlp.linear_fc1.weight"]
    assert torch.equal(fc1[:F], tensors["model.layers.0.mlp.gate_proj.weight"])
    assert torch.equal(fc1[F:], tensors["model.layers.0.mlp.up_proj.weight"])


def test_every_head_of_its_own_is_a_group():
    q, k, v = qkv_rows(H, H, D).values()
    assert len(q) == len(k) == len(v) == H
    assert (q[1], k[1], v[1]) == (range(18, 24), range(24, 30), range(30, 36))


def our_shapes(group, config):
    model = make_model(config)
    layouts = parameter_layouts(model, config, tp_rank=0, tp_size=1)
    return {name: layout.global_shape for name, layout in layouts.items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_table_has_every_element_of_every_parameter_once(name):
    layouts = hf_layouts(MODELS[name])
    ours = assembled(layouts, tensors_of(layouts))
    (shapes,) = run_on_ranks(our_shapes, 1, MODELS[name])
    assert {name: tuple(x.shape) for name, x in ours.items()} == shapes
    assert not any(x.isnan().any() for x in ours.values())


def test_names_what_has_no_partner_on_either_side_and_both_shapes():
    layouts = hf_layouts(MODEL)
    found = {name: layout.local_shape for name, layout in layouts.items()}
    check_tensors(found, layouts, "here")
    del found["model.norm.weight"]
    found["model.layers.0.self_attn.q_proj.bias"] = (168,)
    found["lm_head.weight"] = (128, M)
    message = (
        "here does not fit its config.json; missing: model.norm.weight; "
        "not in the model: model.layers.0.self_attn.q_proj.bias; "
        r"of another shape: lm_head.weight \[128, 20\] instead of \[101, 20\]"
    )
    with pytest.raises(ValueError, match=message):
        check_tensors(found, layouts, "here")


def test_long_lists_are_cut():
    layouts = hf_layouts(MODEL)
    assert len(layouts) == 21
    with pytest.raises(ValueError, match=r"missing: model.embed_tokens.weight, .* and 1 more$"):
        check_tensors({}, layouts, "here")
