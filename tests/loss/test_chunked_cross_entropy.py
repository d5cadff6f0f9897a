"""The chunked loss against plain cross-entropy over whole logits in float64.

A case is the same on every rank; a rank takes its rows of the weight and, with sequence
parallelism, its positions. Errors are relative to the largest entry of the expected tensor.
"""

import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_untied.gpt_model import deferred
from megatron_untied.loss.chunked_cross_entropy import chunked_cross_entropy, token_scores
from megatron_untied.norms import RMSNorm
from tests.support.ranks import rank_shard, run_on_ranks

VOCABULARY = 251
# bf16: logits and what enters the products have 8 bits, so softmax is off by 2^-9 of the logits.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


def make_case(*, n=12, b=2, m=8, rows=256, vocab_size=VOCABULARY, dtype=torch.float64):
    """hidden [n, b, m], weight [rows, m], labels and token weights [b, n], a third masked."""
    generator = torch.Generator().manual_seed(n + b)
    hidden = torch.randn(n, b, m, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(rows, m, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(vocab_size, (b, n), generator=generator)
    token_weights = torch.rand(b, n, generator=generator) + 0.1
    masked = torch.rand(b, n, generator=generator) < 0.3
    return hidden, weight, labels.masked_fill(masked, -100), token_weights.masked_fill(masked, 0)


def plain_cross_entropy(hidden, weight, labels, token_weights, vocab_size=VOCABULARY):
    """The loss and both gradients over whole logits, in float64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    logits = hidden.transpose(0, 1) @ weight[:vocab_size].t()  # [b, n, v]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    loss = (losses * token_weights.flatten().double()).sum()
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


def relative_error(actual, expected):
    return ((actual.double() - expected).abs().max() / expected.abs().max()).item()


def leaves(*tensors):
    return [x.clone().requires_grad_() for x in tensors]


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equals_plain_cross_entropy(world_size, sequence_parallel, dtype):
    losses = run_on_ranks(check_against_plain, world_size, sequence_parallel, dtype)
    assert len({tuple(of_rank) for of_rank in losses}) == 1  # to the bit, on every TP rank


def check_against_plain(group, sequence_parallel, dtype):
    losses = []
    # Rows: padding within the last rank (256), and whole ranks of it (1024, all but one of four).
    for rows, b, chunk_size in (
        (256, 1, 5),
        (256, 2, None),
        (256, 2, 7),
        (1024, 2, 9),
        (256, 1, 1),
    ):
        case = make_case(b=b, rows=rows, dtype=dtype)
        expected_loss, d_hidden, d_weight = plain_cross_entropy(*case)
        hidden, weight, labels, token_weights = case
        hidden, weight = leaves(
            rank_shard(hidden, group) if sequence_parallel else hidden, rank_shard(weight, group)
        )
        loss = chunked_cross_entropy(
            hidden,
            weight,
            labels,
            token_weights,
            vocab_size=VOCABULARY,
            chunk_size=chunk_size,
            tp_group=group,
            sequence_parallel=sequence_parallel,
        )
        loss.backward()
        assert loss.dtype == weight.grad.dtype == torch.promote_types(dtype, torch.float32)
        assert hidden.grad.dtype == dtype
        if sequence_parallel:
            d_hidden = rank_shard(d_hidden, group)
        first = group.rank() * len(weight)
        assert weight.grad[max(VOCABULARY - first, 0) :].eq(0).all()
        losses.append(loss.item())
        assert abs(loss.item() / expected_loss.item() - 1) < TOLERANCE[dtype]
        assert relative_error(hidden.grad, d_hidden) < TOLERANCE[dtype]
        error = (weight.grad - rank_shard(d_weight, group)).abs().max()
        assert error / d_weight.abs().max() < TOLERANCE[dtype]
    return losses


def check_scores(group, sequence_parallel):
    for rows, b, chunk_size in ((256, 1, 5), (256, 2, None), (1024, 2, 7)):
        hidden, weight, labels, _ = make_case(b=b, rows=rows, dtype=torch.float32)
        # Ties over the ranks: three tokens of the same logits, which beat all others of some rows.
        weight[[3, 77, 240]] = 3 * weight[3]
        labels = labels.clamp(min=0)
        logits = hidden.double().transpose(0, 1) @ weight[:VOCABULARY].double().t()  # [b, n, v]
        expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        mine = rank_shard(hidden, group) if sequence_parallel else hidden.clone()
        found = token_scores(
            mine,
            rank_shard(weight, group),
            labels,
            vocab_size=VOCABULARY,
            chunk_size=chunk_size,
            tp_group=group,
            sequence_parallel=sequence_parallel,
        )
        assert relative_error(found.losses, expected.view(b, -1)) < TOLERANCE[torch.float32]
        assert torch.equal(found.predictions, logits.argmax(-1))
        assert (found.predictions == 3).any()
        untouched = rank_shard(hidden, group) if sequence_parallel else hidden
        assert torch.equal(mine, untouched)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("world_size", [1, 4])
def test_scores_of_tokens_are_those_of_whole_logits(world_size, sequence_parallel):
    run_on_ranks(check_scores, world_size, sequence_parallel)


def test_padding_rows_may_hold_anything():
    hidden, weight, labels, token_weights = make_case()
    weight[VOCABULARY:] = torch.nan
    _, d_hidden, d_weight = plain_cross_entropy(hidden, weight, labels, token_weights)
    hidden, weight = leaves(hidden, weight)
    chunked_cross_entropy(
        hidden, weight, labels, token_weights, vocab_size=VOCABULARY, chunk_size=5
    ).backward()
    assert relative_error(hidden.grad, d_hidden) < 1e-13
    assert relative_error(weight.grad, d_weight) < 1e-13


def test_large_logits_do_not_overflow():
    hidden, weight, labels, token_weights = make_case(dtype=torch.float32)
    hidden *= 1e4
    expected_loss, d_hidden, _ = plain_cross_entropy(hidden, weight, labels, token_weights)
    hidden, weight = leaves(hidden, weight)
    loss = chunked_cross_entropy(hidden, weight, labels, token_weights, vocab_size=VOCABULARY)
    loss.backward()
    assert abs(loss / expected_loss - 1) < 1e-6
    assert relative_error(hidden.grad, d_hidden) < 1e-2  # logits of 1e5 have an ulp of 0.008


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_error_does_not_grow_with_the_number_of_chunks(dtype):
    case = make_case(n=1024, b=1, rows=64, vocab_size=50, dtype=dtype)
    _, _, expected = plain_cross_entropy(*case, vocab_size=50)
    errors = []
    for num_chunks in (1, 2, 8, 64, 256, 1024):
        hidden, weight = leaves(*case[:2])
        chunked_cross_entropy(
            hidden, weight, *case[2:], vocab_size=50, chunk_size=1024 // num_chunks
        ).backward()
        errors.append(relative_error(weight.grad, expected))
    # fp32 sums of 1024 terms differ by their order, a few units of 6e-8; bf16 errors are those of
    # the operands, the same in every chunking.
    allowed = {torch.float32: 1e-6, torch.bfloat16: 1.1 * errors[0]}[dtype]
    assert max(errors) < allowed, errors


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("masked", ["a chunk", "positions of one rank", "everything"])
def test_masked_tokens_count_for_nothing(masked, sequence_parallel):
    run_on_ranks(check_masked, 2, masked, sequence_parallel)


def check_masked(group, masked, sequence_parallel):
    hidden, weight, labels, token_weights = make_case()  # 12 positions, chunks of 2 positions x 2
    positions = {"a chunk": slice(2, 4), "positions of one rank": slice(6, 12)}.get(
        masked, slice(None)
    )
    token_weights[:, positions] = 0
    _, d_hidden, d_weight = plain_cross_entropy(hidden, weight, labels, token_weights)
    if sequence_parallel:
        hidden, d_hidden = rank_shard(hidden, group), rank_shard(d_hidden, group)
    hidden, weight = leaves(hidden, rank_shard(weight, group))
    loss = chunked_cross_entropy(
        hidden,
        weight,
        labels.masked_fill(token_weights == 0, 10**9),
        token_weights,
        vocab_size=VOCABULARY,
        chunk_size=4,
        tp_group=group,
        sequence_parallel=sequence_parallel,
    )
    loss.backward()
    torch.testing.assert_close(hidden.grad, d_hidden, rtol=0, atol=1e-13)
    torch.testing.assert_close(weight.grad, rank_shard(d_weight, group), rtol=0, atol=1e-13)
    if masked == "everything":
        assert loss == 0
        assert not hidden.grad.any()
        assert not weight.grad.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_plain_cross_entropy_on_cuda(dtype):
    case = make_case(dtype=dtype)
    expected_loss, d_hidden, d_weight = plain_cross_entropy(*case)
    hidden, weight = leaves(*(x.cuda() for x in case[:2]))
    labels, token_weights = (x.cuda() for x in case[2:])
    loss = chunked_cross_entropy(
        hidden, weight, labels, token_weights, vocab_size=VOCABULARY, chunk_size=7
    )
    loss.backward()
    assert abs(loss.item() / expected_loss.item() - 1) < TOLERANCE[dtype]
    assert relative_error(hidden.grad.cpu(), d_hidden) < TOLERANCE[dtype]
    assert relative_error(weight.grad.cpu(), d_weight) < TOLERANCE[dtype]


# --- autograd -------------------------------------------------------------------------------------


def test_hidden_gradient_is_written_over_hidden_and_can_be_overwritten_by_its_receiver():
    hidden, weight, labels, token_weights = make_case()
    weight.requires_grad_()
    owners = {}

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + 0

        @staticmethod
        def backward(ctx, grad):
            # One reference to the tensor, one to its storage beside the handle made here.
            storage = torch._C._storage_Use_Count(grad.untyped_storage()._cdata) - 1
            owners.update(tensor=grad._use_count(), storage=storage, address=grad.data_ptr())
            return grad

    def forward():  # like a model: nobody keeps the hidden states
        states = Watch.apply(hidden.clone().requires_grad_())
        owners["expected"] = states.data_ptr()
        return chunked_cross_entropy(
            states, weight, labels, token_weights, vocab_size=VOCABULARY, chunk_size=5
        )

    forward().backward()
    assert owners["address"] == owners["expected"]
    assert (owners["tensor"], owners["storage"]) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_scale_with_the_gradient_of_the_loss(dtype):
    case = make_case(dtype=dtype)
    factor = 1 / 3
    grads = []
    for scale in (1.0, factor):
        hidden, weight = leaves(*case[:2])
        loss = chunked_cross_entropy(hidden, weight, *case[2:], vocab_size=VOCABULARY)
        (loss * scale).backward()
        grads.append((hidden.grad, weight.grad))
    for plain, scaled in zip(*grads, strict=True):
        expected = plain.double() * torch.tensor(factor).double()  # one rounding away
        torch.testing.assert_close(scaled, expected.to(plain.dtype), rtol=0, atol=0)


def test_two_forwards_may_come_before_their_backwards():
    case = make_case()
    _, d_hidden, d_weight = plain_cross_entropy(*case)
    _, weight = leaves(*case[:2])
    states = leaves(case[0], case[0])
    losses = [
        chunked_cross_entropy(x, weight, *case[2:], vocab_size=VOCABULARY, chunk_size=5)
        for x in states
    ]
    for loss in losses:
        loss.backward()
    assert all(relative_error(x.grad, d_hidden) < 1e-13 for x in states)
    assert relative_error(weight.grad, 2 * d_weight) < 1e-13


def test_second_backward_of_one_forward_is_refused():
    hidden, weight, *rest = make_case()
    loss = chunked_cross_entropy(*leaves(hidden, weight), *rest, vocab_size=VOCABULARY)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward per forward"):
        loss.backward()


def test_an_earlier_operation_that_saved_hidden_raises():
    hidden, weight, *rest = make_case()
    states = leaves(hidden)[0].tanh()  # backward of tanh needs its output
    loss = chunked_cross_entropy(states, *leaves(weight), *rest, vocab_size=VOCABULARY)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_norms_do_not_mind_that_their_output_is_overwritten(norm):
    hidden, weight, *rest = make_case()
    gain = torch.rand(8, dtype=torch.float64)

    def normalize(x, gain):
        return F.rms_norm(x, (8,), gain) if norm == "rms" else F.layer_norm(x, (8,), gain)

    expected, gain_expected = leaves(hidden, gain)
    normed = normalize(expected, gain_expected)
    _, d_normed, _ = plain_cross_entropy(normed, weight, *rest)
    normed.backward(d_normed)
    actual, gain = leaves(hidden, gain)
    chunked_cross_entropy(
        normalize(actual, gain), *leaves(weight), *rest, vocab_size=VOCABULARY, chunk_size=5
    ).backward()
    assert relative_error(actual.grad, expected.grad) < 1e-13
    assert relative_error(gain.grad, gain_expected.grad) < 1e-13


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_input_gets_no_gradient_and_is_left_alone(frozen):
    case = make_case()
    _, d_hidden, d_weight = plain_cross_entropy(*case)
    hidden, weight = leaves(*case[:2])
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    chunked_cross_entropy(hidden, weight, *case[2:], vocab_size=VOCABULARY, chunk_size=5).backward()
    if frozen == "hidden":
        assert torch.equal(hidden, case[0])
        assert relative_error(weight.grad, d_weight) < 1e-13
    else:
        assert weight.grad is None
        assert relative_error(hidden.grad, d_hidden) < 1e-13


def test_without_grad_hidden_survives_and_nothing_is_kept():
    case = make_case()
    expected, _, _ = plain_cross_entropy(*case)
    hidden, weight = leaves(*case[:2])
    with torch.no_grad(), LiveBytes(hidden, weight, *case[2:]) as live:
        loss = chunked_cross_entropy(hidden, weight, *case[2:], vocab_size=VOCABULARY, chunk_size=5)
    assert abs(loss / expected - 1) < 1e-13
    assert not loss.requires_grad
    assert torch.equal(hidden, case[0])
    assert live.now == loss.nbytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tied_weight_sums_both_gradients(dtype):
    _, weight, labels, token_weights = make_case(m=8, dtype=dtype)
    tokens = labels.clamp(min=0).t()  # [n, b]

    table = weight.double().clone().requires_grad_()
    logits = (F.embedding(tokens, table).transpose(0, 1) * 2) @ table[:VOCABULARY].t()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    (losses * token_weights.flatten()).sum().backward()

    (tied,) = leaves(weight)
    hidden = F.embedding(tokens, tied) * 2  # used before the head asks for an fp32 gradient
    chunked_cross_entropy(
        hidden, tied, labels, token_weights, vocab_size=VOCABULARY, chunk_size=5
    ).backward()
    assert tied.grad.dtype == torch.promote_types(dtype, torch.float32)
    assert relative_error(tied.grad, table.grad) < TOLERANCE[dtype]


class Head(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, hidden, labels, token_weights):
        return chunked_cross_entropy(
            hidden, self.weight, labels, token_weights, vocab_size=VOCABULARY, chunk_size=3
        )


def test_fp32_weight_gradient_reaches_the_main_gradient_of_megatron_ddp():
    run_on_ranks(check_megatron_ddp, 2)


def check_megatron_ddp(group):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    hidden, weight, labels, token_weights = make_case(n=16, b=1, dtype=torch.bfloat16)
    head = Head(weight.clone())
    ddp = DistributedDataParallel(
        TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=True
        ),
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
        head,
    )
    mine = slice(8 * group.rank(), 8 * group.rank() + 8)
    for _ in range(2):  # two micro-batches
        head(*leaves(hidden[mine]), labels[:, mine], token_weights[:, mine]).backward()
    # Each rank's own sum, before the reduction: it has more than bf16's bits, and the right ones.
    main_grad = head.weight.main_grad
    alone = Head(weight)
    alone(hidden[mine].clone(), labels[:, mine], token_weights[:, mine]).backward()
    assert main_grad.dtype == torch.float32
    assert not torch.equal(main_grad, main_grad.bfloat16().float())
    assert torch.equal(main_grad, 2 * alone.weight.grad)
    ddp.finish_grad_sync()
    _, _, expected = plain_cross_entropy(hidden, weight, labels, token_weights)
    half = slice(128 * group.rank(), 128 * group.rank() + 128)  # this rank's reduced shard
    assert relative_error(main_grad[half], 2 * expected[half]) < TOLERANCE[torch.bfloat16]


def test_under_fsdp2_the_gradient_is_reduced_in_fp32_and_hidden_reused():
    run_on_ranks(check_fsdp2, 2)


def check_fsdp2(group):
    hidden, weight, labels, token_weights = make_case(n=16, b=1, dtype=torch.bfloat16)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # token weights are 1 / count and stay fp32
    )
    mesh = DeviceMesh.from_group(group, "cpu")
    head = fully_shard(Head(weight.float()), mesh=mesh, mp_policy=policy)
    head.set_gradient_divide_factor(1.0)
    head.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    mine = slice(8 * group.rank(), 8 * group.rank() + 8)
    states = leaves(hidden[mine])[0] * 1
    addresses = [states.data_ptr()]
    states.register_hook(lambda grad: addresses.append(grad.data_ptr()))
    head(states, labels[:, mine], token_weights[:, mine]).backward()
    assert addresses[0] == addresses[1]

    alone = []  # each shard of the tokens by itself, with its own bf16 weights
    for part in (slice(0, 8), slice(8, 16)):
        twin = Head(weight)
        twin(hidden[part].clone(), labels[:, part], token_weights[:, part]).backward()
        alone.append(twin.weight.grad)
    assert relative_error(head.weight.grad.full_tensor(), (alone[0] + alone[1]).double()) < 1e-6


# --- memory ---------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Bytes in storages that are made under the mode, beside those of ``given``: now, at most."""

    def __init__(self, *given):
        super().__init__()
        self.now = self.peak = 0
        self._known = {x.untyped_storage()._cdata for x in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self._count(x.untyped_storage())
        return result

    def _count(self, storage):
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, address, num_bytes):
        self._known.discard(address)
        self.now -= num_bytes


def live_bytes_of_forward(dtype, chunk_size, **split):
    """Most bytes alive in a forward over 32 positions and 4096 rows, beside its inputs."""
    hidden, weight, *rest = make_case(n=32, b=1, rows=4096, vocab_size=4096, dtype=dtype)
    if split.get("sequence_parallel"):
        hidden, weight = hidden[:16].clone(), weight[:2048].clone()
    inputs = *leaves(hidden, weight), *rest
    with LiveBytes(*inputs) as live:
        chunked_cross_entropy(*inputs, vocab_size=4096, chunk_size=chunk_size, **split)
    return live.peak


@pytest.mark.parametrize(("dtype", "bytes_a_logit"), [(torch.float32, 4), (torch.bfloat16, 6)])
@pytest.mark.parametrize("chunk_size", [4, 8, 32])
def test_one_chunk_of_logits_is_alive_at_a_time(dtype, bytes_a_logit, chunk_size):
    d_weight = 4096 * 8 * 4
    per_token = (live_bytes_of_forward(dtype, chunk_size) - d_weight) / chunk_size
    small = 32 * 16 + chunk_size * 256  # labels and losses of all tokens, vectors of the chunk
    assert 4096 * bytes_a_logit <= per_token <= 4096 * bytes_a_logit + small / chunk_size


@pytest.fixture
def fake_tp_group():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(("dtype", "bytes_a_logit"), [(torch.float32, 4), (torch.bfloat16, 6)])
def test_sequence_parallel_chunks_count_gathered_tokens_also_when_traced(
    dtype, bytes_a_logit, fake_tp_group
):
    split = {"tp_group": fake_tp_group, "sequence_parallel": True}
    peak = live_bytes_of_forward(dtype, 8, **split)
    logits, d_weight = 8 * 2048 * bytes_a_logit, 2048 * 8 * 4
    assert logits <= peak - d_weight <= 1.05 * logits
    with FakeTensorMode():
        assert live_bytes_of_forward(dtype, 8, **split) == peak


def test_backward_runs_on_fake_tensors():
    with FakeTensorMode():
        hidden, weight, *rest = make_case(dtype=torch.bfloat16)
        hidden, weight = leaves(hidden, weight)
        chunked_cross_entropy(hidden, weight, *rest, vocab_size=VOCABULARY, chunk_size=5).backward()
    assert weight.grad.dtype == torch.float32
    assert hidden.grad.untyped_storage()._cdata == hidden.untyped_storage()._cdata


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [-1, VOCABULARY, 255])
def test_rejects_a_label_outside_the_vocabulary_on_every_rank(label):
    run_on_ranks(check_label_is_rejected, 2, label)


def check_label_is_rejected(group, label):
    hidden, weight, labels, token_weights = make_case()
    labels[1, 7], token_weights[1, 7] = label, 0.5
    inputs = *leaves(hidden, rank_shard(weight, group)), labels, token_weights
    with pytest.raises(ValueError, match=rf"label {label} is outside the vocabulary 0\.\.250"):
        chunked_cross_entropy(*inputs, vocab_size=VOCABULARY, tp_group=group)
    assert torch.equal(inputs[0], hidden)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_size": 0}, "chunk_size is 0 tokens; give at least 1"),
        ({"vocab_size": 257}, "vocab_size is 257, but the weight has 256 rows on each of 1"),
        ({"labels": torch.zeros(12, 2, dtype=torch.int64)}, r"labels has shape \[12, 2\]"),
        ({"token_weights": torch.zeros(2, 11)}, r"need \[b, n\] = \[2, 12\]"),
        ({"hidden": torch.zeros(2, 12, 8).transpose(0, 1)}, "make it contiguous"),
    ],
)
def test_rejects_what_does_not_fit(change, message):
    names = ("hidden", "weight", "labels", "token_weights")
    given = dict(zip(names, make_case(), strict=True), vocab_size=VOCABULARY) | change
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(**given)


# --- with the final norm ---


def normed_loss_check(group, sequence_parallel, dtype):
    """Against the same norm applied first: loss, residual gradient, matrix and norm gradients."""
    generator = torch.Generator().manual_seed(5)
    n, b, m, vocab = 12, 2, 10, 23
    x = torch.randn(n, b, m, generator=generator).to(dtype)
    matrix = torch.randn(24, m, generator=generator).to(dtype)
    labels = torch.randint(vocab, (b, n), generator=generator)
    weights = torch.rand(b, n, generator=generator).to(dtype)
    norm_weight = torch.rand(m, generator=generator).to(dtype) + 0.5
    x_ref, matrix_ref, norm_ref = (t.clone().requires_grad_() for t in (x, matrix, norm_weight))
    y = torch.nn.functional.rms_norm(x_ref, (m,), norm_ref, 1e-5)
    logits = (y @ matrix_ref[:vocab].T).transpose(0, 1).flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="none")
    expected = (losses * weights.flatten()).sum()
    expected.backward()

    config = SimpleNamespace(params_dtype=dtype, sequence_parallel=sequence_parallel)
    norm = deferred(RMSNorm)(config=config, hidden_size=m, eps=1e-5)
    norm.weight.data.copy_(norm_weight)
    assert torch.equal(norm(x), x)
    tp, rank = group.size(), group.rank()
    mine = x.chunk(tp)[rank] if sequence_parallel else x
    leaf, own = mine.clone().requires_grad_(), matrix.chunk(tp)[rank].clone().requires_grad_()
    residual = leaf * 1
    address = residual.data_ptr()
    seen = []
    residual.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    loss = chunked_cross_entropy(
        residual,
        own,
        labels,
        weights,
        vocab_size=vocab,
        chunk_size=7,
        tp_group=group,
        sequence_parallel=sequence_parallel,
        norm=norm,
    )
    del residual
    loss.backward()
    if sequence_parallel:
        dist.all_reduce(norm.weight.grad, group=group)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    assert seen == [address]
    assert torch.allclose(loss, expected, rtol=tolerance)
    expected_dx = x_ref.grad.chunk(tp)[rank] if sequence_parallel else x_ref.grad
    pairs = (leaf.grad, expected_dx), (own.grad, matrix_ref.grad.chunk(tp)[rank])
    for got, want in (*pairs, (norm.weight.grad, norm_ref.grad)):
        assert torch.allclose(got, want, rtol=tolerance, atol=tolerance * want.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("world_size", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_norm_by_chunks_equals_norm_first(world_size, sequence_parallel, dtype):
    run_on_ranks(normed_loss_check, world_size, sequence_parallel, dtype)
