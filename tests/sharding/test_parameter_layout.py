"""Layouts against Megatron's own way of splitting a weight: torch.split, then every t-th block."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_untied.sharding.parameter_layout import parameter_layout, parameter_layouts
from megatron_untied.sharding.tensor_slice import TensorSlice, slices_of_flat_range
from tests.support.optimizer_run import MODEL, Split, build_model, make_groups
from tests.support.ranks import run_on_ranks
from tests.support.whole_model import gather_parameters, part_of


def split_like_megatron(whole, tp_size, *, dim, stride):
    blocks = whole.split(whole.size(dim) // (tp_size * stride), dim)
    return [torch.cat(blocks[rank::tp_size], dim) for rank in range(tp_size)]


def number_elements(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


def assert_slices_make_up(whole, slices):
    """Every element once, in its place."""
    count = torch.zeros_like(whole)
    for part in slices:
        assert torch.equal(part.tensor, part_of(whole, part))
        part_of(count, part).add_(1)
    assert torch.equal(count, torch.ones_like(whole))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("shape", "dim", "stride"),
    [((12, 5), 0, 1), ((5, 12), 1, 1), ((24, 5), 0, 2), ((24,), 0, 2), ((12,), 0, 1)],
    ids=["column", "row", "gate-and-up", "gate-and-up-bias", "bias"],
)
def test_pieces_of_all_ranks_make_up_the_tensor(shape, dim, stride, tp_size):
    whole = number_elements(*shape)
    slices = []
    for rank, local in enumerate(split_like_megatron(whole, tp_size, dim=dim, stride=stride)):
        layout = parameter_layout(
            "w",
            tuple(local.shape),
            partition_dim=dim,
            stride=stride,
            tp_rank=rank,
            tp_size=tp_size,
        )
        assert layout.global_shape == shape
        assert not layout.has_padding
        slices += layout.global_slices(local.contiguous())
    assert_slices_make_up(whole, slices)


@pytest.mark.parametrize(
    ("vocabulary", "rows_by_rank"),
    [(64, [16, 16, 16, 16]), (49, [16, 16, 16, 1]), (48, [16, 16, 16, 0]), (17, [16, 1, 0, 0])],
)
def test_vocabulary_padding_is_in_no_rectangle(vocabulary, rows_by_rank):
    padded = number_elements(64, 3)
    slices = []
    for rank, local in enumerate(padded.chunk(4)):
        layout = parameter_layout(
            "w", (16, 3), partition_dim=0, num_rows=vocabulary, tp_rank=rank, tp_size=4
        )
        assert sum(r.local.sizes[0] for r in layout.mappings) == rows_by_rank[rank]
        assert layout.has_padding == (rows_by_rank[rank] < 16)
        assert layout.global_shape == (vocabulary, 3)
        slices += layout.global_slices(local)
    assert_slices_make_up(padded[:vocabulary], slices)


def test_a_copy_on_every_rank_is_the_whole_tensor():
    layout = parameter_layout("norm", (7,), partition_dim=None, tp_rank=1, tp_size=2)
    assert_slices_make_up(number_elements(7), layout.global_slices(number_elements(7)))


@settings(deadline=None)
@given(data=st.data())
def test_flat_shards_of_all_ranks_make_up_the_tensor(data):
    """A distributed optimizer cuts the parameter of every tensor-parallel rank anywhere."""
    tp_size, stride = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 2]))
    dim = 0 if stride == 2 else data.draw(st.sampled_from([0, 1]))
    shape = [data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))]
    shape[dim] *= tp_size * stride
    whole = number_elements(*shape)
    num_rows = None
    if dim == 0 and stride == 1:
        num_rows = data.draw(st.integers(1, shape[0]))
    slices = []
    for rank, local in enumerate(split_like_megatron(whole, tp_size, dim=dim, stride=stride)):
        layout = parameter_layout(
            "w",
            tuple(local.shape),
            partition_dim=dim,
            stride=stride,
            num_rows=num_rows,
            tp_rank=rank,
            tp_size=tp_size,
        )
        cuts = sorted(data.draw(st.lists(st.integers(0, local.numel()), max_size=4)))
        for start, stop in zip([0, *cuts], [*cuts, local.numel()], strict=True):
            shard = local.reshape(-1)[start:stop].clone()
            slices += layout.global_slices(
                shard, list(slices_of_flat_range(local.shape, start, stop))
            )
    assert_slices_make_up(whole[:num_rows], slices)


@given(rows=st.integers(0, 8), height=st.integers(0, 8))
def test_rows_of_a_gate_and_up_projection_lie_in_both_halves(rows, height):
    """An FSDP shard is a range of rows of the tensor-parallel rank's parameter."""
    whole = number_elements(16, 3)
    local = split_like_megatron(whole, 2, dim=0, stride=2)[1]  # gate 4..8, up 12..16
    height = min(height, 8 - rows)
    layout = parameter_layout("fc1", (8, 3), partition_dim=0, stride=2, tp_rank=1, tp_size=2)
    tensor_slice = TensorSlice((rows, 0), (height, 3))
    slices = layout.global_slices(tensor_slice.view(local).clone(), [tensor_slice])
    for part in slices:
        assert torch.equal(part.tensor, part_of(whole, part))
    assert sum(part.tensor.size(0) for part in slices) == height


def test_pieces_are_views():
    local = torch.zeros(4, 3)
    layout = parameter_layout("w", (4, 3), partition_dim=1, tp_rank=0, tp_size=2)
    for part in layout.global_slices(
        local.view(-1)[1:11], list(slices_of_flat_range((4, 3), 1, 11))
    ):
        part.tensor.fill_(1)
    assert local.sum() == 10


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_global_shapes_of_a_model_do_not_depend_on_the_sharding(tp_size, biased):
    model = dataclasses.replace(MODEL, add_bias_linear=biased)
    for shapes in run_on_ranks(global_shapes, tp_size, model):
        layer = "decoder.layers.1."
        assert shapes["embedding.word_embeddings.weight"] == (251, 48)
        assert shapes["output_layer.weight"] == (251, 48)
        assert shapes[layer + "self_attention.linear_qkv.weight"] == ((8 + 4 + 4) * 8, 48)
        assert shapes[layer + "self_attention.linear_qkv.bias"] == ((8 + 4 + 4) * 8,)
        assert shapes[layer + "self_attention.q_layernorm.weight"] == (8,)
        assert shapes[layer + "self_attention.linear_proj.weight"] == (48, 8 * 8)
        assert shapes[layer + "mlp.linear_fc1.weight"] == (2 * 72, 48)
        assert shapes[layer + "mlp.linear_fc2.weight"] == (48, 72)
        assert shapes["decoder.final_layernorm.weight"] == (48,)
        assert (shapes.get(layer + "mlp.linear_fc1.bias") == (144,)) == biased
        assert (shapes.get(layer + "mlp.linear_fc2.bias") == (48,)) == biased


def global_shapes(group, model):
    split = Split(tensor=group.size())
    layouts = layouts_of(build_model(split, model, make_groups(split)), group, model)
    return {name: layout.global_shape for name, layout in layouts.items()}


def layouts_of(model, group, config=MODEL):
    return parameter_layouts(model, config, tp_rank=group.rank(), tp_size=group.size())


@pytest.mark.parametrize("tp_size", [2, 4])
def test_layouts_agree_with_how_megatron_core_splits_a_model(tp_size):
    """megatron-core's initialization on a CPU draws the whole weight and takes this rank's part."""
    model = dataclasses.replace(MODEL, vocab_size=512)  # without padding it draws the same numbers
    (whole,) = run_on_ranks(model_drawn_by_megatron_core, 1, model)
    (split, *_) = run_on_ranks(model_drawn_by_megatron_core, tp_size, model)
    assert whole.keys() == split.keys()
    for name in whole:
        assert torch.equal(whole[name], split[name]), name


def model_drawn_by_megatron_core(group, config):
    split = Split(tensor=group.size())
    groups = make_groups(split)
    torch.manual_seed(3)
    model = build_model(split, config, groups)
    return gather_parameters(model, layouts_of(model, group, config))


def test_a_weight_that_is_not_marked_as_split_is_refused():
    run_on_ranks(check_unmarked_weight, 2)


def check_unmarked_weight(group):
    split = Split(tensor=2)
    model = build_model(split, MODEL, make_groups(split))
    weight = torch.nn.Parameter(model.output_layer.weight.detach())
    model.output_layer.weight = weight
    with pytest.raises(AssertionError, match="output_layer.weight is not marked as split"):
        layouts_of(model, group)
