import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_untied.sharding.tensor_slice import TensorSlice, slices_of_flat_range


def number_elements(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)


@given(data=st.data(), shape=st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_boxes_of_a_flat_range_are_its_elements_in_order(data, shape):
    numel = torch.Size(shape).numel()
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    slices = list(slices_of_flat_range(shape, start, stop))
    whole = number_elements(*shape)
    found = torch.cat(
        [torch.empty(0), *(tensor_slice.view(whole).reshape(-1) for tensor_slice in slices)]
    )
    assert torch.equal(found, whole.view(-1)[start:stop])
    assert len(slices) <= max(1, 2 * len(shape) - 1)


def test_a_box_is_a_view_of_the_tensor():
    x = number_elements(4, 5)
    TensorSlice((1, 2), (2, 3)).view(x).zero_()
    assert torch.equal(x[1:3, 2:5], torch.zeros(2, 3))
    assert (x == 0).sum() == 6


@given(st.lists(st.integers(0, 6), min_size=8, max_size=8))
def test_an_intersection_is_what_both_boxes_cover(numbers):
    slices = [TensorSlice((a, b), (h, w)) for a, b, h, w in (numbers[:4], numbers[4:])]
    covered = torch.zeros(12, 12)
    for tensor_slice in slices:
        tensor_slice.view(covered).add_(1)
    common = slices[0].intersect(slices[1])
    if common is None:
        assert covered.max() < 2
    else:
        assert (common.view(covered) == 2).all()
        assert (covered == 2).sum() == common.numel
