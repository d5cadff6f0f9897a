"""Bytes counted by hand, over real and over fake tensors."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_untied.context_parallel.buffer_plan import Buffer
from megatron_untied.context_parallel.workspace import Workspace
from megatron_untied.phases import Phase
from megatron_untied.step_progress import StepProgress
from megatron_untied.tracing.fake_tensor_cache import FakeTensorCache
from megatron_untied.tracing.live_bytes import LiveBytes

MIB = 2**20


def modes(kind):
    """The mode in which tensors are made, and the count of them."""
    if kind == "real":
        return contextlib.nullcontext(), LiveBytes(StepProgress())
    mode = FakeTensorMode()
    return mode, LiveBytes(StepProgress(), FakeTensorCache(mode) if kind == "cached" else None)


@pytest.fixture(params=["real", "fake", "cached"])
def live(request):
    mode, live = modes(request.param)
    with mode, live:
        yield live


def mebibytes(n, **options):
    return torch.empty(n * MIB // 4, **options)


@pytest.mark.parametrize(("tokens", "rows", "sums"), [(4096, 600, 1009), (4096, 8192, 4505),
                                                      (3072, 600, 0)])  # fmt: skip
@pytest.mark.parametrize("b", [1, 2])
def test_partial_sums_of_a_lookups_backward_count_for_a_moment(live, tokens, rows, sums, b):
    """As CUDA's kernel makes them: fp32, a tenth of the tokens and a row for each row."""
    weight = torch.zeros(rows, 64, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.zeros(b, tokens // b, dtype=torch.int64)
    out = torch.nn.functional.embedding(ids, weight).transpose(0, 1)  # [n, b, m], as megatron-core
    gradient = torch.zeros(tokens // b, b, 64, dtype=torch.bfloat16)
    before = live.num_bytes
    out.backward(gradient)
    assert live.num_bytes - before == 2 * 64 * rows  # the gradient
    peak = max(each.num_bytes for each in live.peaks.values())
    copied = gradient.nbytes if b > 1 else 0  # to [b, n, m]
    assert peak - before == 2 * 64 * rows + 4 * 64 * sums + copied


def test_memory_counts_as_long_as_anything_holds_it(live):
    x = mebibytes(3)
    view = x[5:]
    del x
    assert live.num_bytes == 3 * MIB
    del view
    assert live.num_bytes == 0
    assert live.peaks[Phase.SETUP].num_bytes == 3 * MIB


def test_views_and_writes_in_place_take_nothing(live):
    x = mebibytes(1)
    x.view(2, -1).t().add_(1).copy_(x.view(2, -1).t())
    x[: len(x) // 2].mul_(x[len(x) // 2 :])
    torch.unbind(x.view(4, -1))
    torch.mul(x, x, out=x)
    assert live.peaks[Phase.SETUP].num_bytes == MIB


def test_a_result_counts_once_however_often_it_was_seen(live):
    x = mebibytes(1)
    for _ in range(3):
        y = x + 1
        z = y.to(torch.bfloat16)
    assert live.num_bytes == 2 * MIB + MIB // 2
    assert live.peaks[Phase.SETUP].num_bytes == 3 * MIB + MIB // 2  # y's successor beside y and z
    del y, z


def test_results_that_alias_an_argument_are_no_new_memory(live):
    x = mebibytes(1)
    for _ in range(2):
        y = torch.ops.aten._unsafe_view(x, [4, len(x) // 4])
        assert y.untyped_storage()._cdata == x.untyped_storage()._cdata
        same = x.to(torch.float32)
        assert same is x
    assert live.num_bytes == MIB


def test_several_results_and_none_among_them(live):
    x, weight = torch.empty(256, 1024), torch.empty(1024)
    for _ in range(2):
        y, mean, scale = torch.ops.aten.native_layer_norm(x, [1024], weight, None, 1e-5)
    assert (y.shape, mean.shape, scale.shape) == (x.shape, (256, 1), (256, 1))
    assert live.num_bytes == 4 * (2 * 256 * 1024 + 1024 + 2 * 256)


def test_a_resized_storage_counts_at_its_size(live):
    x = mebibytes(2)
    x.untyped_storage().resize_(0)
    assert live.num_bytes == 0
    y = mebibytes(1)
    x.untyped_storage().resize_(2 * MIB)
    assert live.num_bytes == 3 * MIB
    del x, y
    assert live.num_bytes == 0


def test_what_autograd_keeps_counts_until_backward(live):
    x = mebibytes(1).requires_grad_()
    y = (x * 2).exp().sum()
    held = live.num_bytes
    y.backward()
    del y
    assert held == 2 * MIB + 4  # x, what exp gave, and the sum
    assert live.num_bytes == 2 * MIB  # x and its gradient
    x.grad = None


def test_memory_can_be_the_hosts(live):
    x = mebibytes(1)
    live.move_to_host(x)
    assert (live.num_bytes, live.host_bytes) == (0, MIB)
    x.add_(1)
    assert live.num_bytes == 0
    host = torch.empty(MIB, dtype=torch.uint8, device="meta")
    assert live.num_bytes == 0
    del x, host


def test_the_cause_of_a_peak_is_named():
    with LiveBytes(StepProgress()) as live:
        queries = Buffer(name="q", memory="q", numel=MIB // 4, dtype=torch.float32)
        buffer = Workspace().take(queries, torch.device("cpu"))
    assert live.peaks[Phase.SETUP].by_category == {"workspace: q": MIB}
    del buffer
