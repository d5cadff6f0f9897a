import dataclasses
import math

import pytest
import torch

from megatron_untied.sharding import initialize_weights as module
from megatron_untied.sharding.initialize_weights import fill_slices, initialize_weights
from megatron_untied.sharding.parameter_layout import (
    GlobalSlice,
    parameter_layout,
    parameter_layouts,
)
from tests.support.optimizer_run import MODEL, Split, build_model, make_groups
from tests.support.ranks import run_on_ranks
from tests.support.whole_model import gather_parameters

BIASED = dataclasses.replace(MODEL, add_bias_linear=True, normalization="LayerNorm")


def initialized(group, config, seed):
    """(global tensors, this rank's rows of vocabulary padding)."""
    split = Split(tensor=group.size())
    groups = make_groups(split)
    model = build_model(split, config, groups)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    initialize_weights(model, config, seed, groups.tp)
    layouts = parameter_layouts(model, config, tp_rank=group.rank(), tp_size=group.size())
    rows = model.output_layer.weight.size(0)
    held = max(0, min(rows, config.vocab_size - group.rank() * rows))
    return gather_parameters(model, layouts), model.output_layer.weight.detach()[held:]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("multiple", [1, 16, 40])
def test_the_model_is_the_same_bit_for_bit_at_every_split_and_padding(tp_size, multiple):
    config = dataclasses.replace(BIASED, make_vocab_size_divisible_by=multiple)
    ((whole, _),) = run_on_ranks(initialized, 1, BIASED, 5)
    for split, padding in run_on_ranks(initialized, tp_size, config, 5):
        assert whole.keys() == split.keys()
        for name in whole:
            assert torch.equal(whole[name], split[name]), name
        assert torch.equal(padding, torch.zeros_like(padding))


def test_another_seed_and_another_name_give_other_numbers():
    ((five, _),) = run_on_ranks(initialized, 1, MODEL, 5)
    ((six, _),) = run_on_ranks(initialized, 1, MODEL, 6)
    first, second = (f"decoder.layers.{i}.mlp.linear_fc1.weight" for i in (0, 1))
    assert not torch.equal(five[first], six[first])
    assert not torch.equal(five[first], five[second])
    assert not torch.equal(five["embedding.word_embeddings.weight"], five["output_layer.weight"])


def test_norms_are_one_and_biases_zero():
    ((whole, _),) = run_on_ranks(initialized, 1, BIASED, 5)
    assert any(name.endswith("linear_fc1.bias") for name in whole)
    for name, values in whole.items():
        if name.endswith("bias"):
            assert values.eq(0).all(), name
        elif "norm" in name:
            assert values.eq(1).all(), name


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("embedding.word_embeddings.weight", 0.1),
        ("decoder.layers.0.self_attention.linear_qkv.weight", 0.1),
        ("decoder.layers.0.self_attention.linear_proj.weight", 0.1 / math.sqrt(4)),
        ("decoder.layers.0.mlp.linear_fc1.weight", 0.1),
        ("decoder.layers.0.mlp.linear_fc2.weight", 0.1 / math.sqrt(4)),
    ],
)
def test_standard_deviations_are_megatrons(name, std):
    layout = parameter_layout(name, (300, 200), partition_dim=None, tp_rank=0, tp_size=1)
    values = torch.empty(300, 200)
    fill_slices(layout.global_slices(values), layout, MODEL, seed=1)
    # 60,000 draws: the estimate's own deviation is 0.3%.
    assert values.std().item() == pytest.approx(std, rel=0.015)
    assert abs(values.mean().item()) < 0.02 * std


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_drawn_alone_is_the_part_of_the_whole(monkeypatch, dtype):
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 25)  # 3 rows of 7
    layout = parameter_layout("w", (11, 7), partition_dim=None, tp_rank=0, tp_size=1)
    whole = torch.empty(11, 7)
    fill_slices(layout.global_slices(whole), layout, MODEL, seed=1)
    assert whole.unique().numel() == 77  # no block repeats another
    for part in (slice(0, 1), slice(2, 5), slice(4, 11), slice(3, 6)):
        for left in (0, 2):
            held = torch.empty(part.stop - part.start, 7 - left, dtype=dtype)
            fill_slices([GlobalSlice((part.start, left), held)], layout, MODEL, seed=1)
            assert torch.equal(held, whole[part, left:].to(dtype))
