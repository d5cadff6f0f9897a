import pytest
import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import megatron_untied  # noqa: F401
from megatron_untied.norms import LayerNorm, RMSNorm
from tests.support.ranks import run_on_ranks

EPS = 1e-3  # large enough to be seen in the tests


def transformer_config(dtype=torch.float32, tp=1, normalization="RMSNorm"):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=24,
        ffn_hidden_size=40,
        num_attention_heads=4,
        normalization=normalization,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        cuda_graph_scope=None,
    )


def fill(norm):
    """Weights and biases that are not 1 and 0, the same wherever they are made."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) + 1.0)
    return norm


def exact(norm, x):
    """The same norm in float64, from its definition."""
    x, weight = x.double(), norm.weight.double()
    if isinstance(norm, LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * weight
    return y + norm.bias.double() if isinstance(norm, LayerNorm) else y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm])
def test_forward_and_gradients_equal_the_definition(cls, dtype):
    norm = fill(cls(config=transformer_config(dtype), hidden_size=24, eps=EPS))
    assert {p.dtype for p in norm.parameters()} == {dtype}
    assert not any(p.sequence_parallel for p in norm.parameters())
    x = (3.0 * torch.randn(7, 2, 24) + 1.0).to(dtype).requires_grad_()
    dy = torch.randn(7, 2, 24).to(dtype)
    y = norm(x)
    ours = torch.autograd.grad(y, [x, *norm.parameters()], dy)
    expected = exact(norm, x)
    theirs = torch.autograd.grad(expected, [x, *norm.parameters()], dy.double())
    # bf16: one rounding of either side (the reference's gradients too), so neighbors, 2**-7 apart.
    # Absolute: fp32 sums of terms of size 1 and more.
    rtol, atol = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (2**-7, 1e-5)}[dtype]
    for our, their in zip([y, *ours], [expected, *theirs], strict=True):
        assert our.dtype == dtype
        torch.testing.assert_close(our.double(), their.double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm])
def test_bf16_weight_gradients_of_many_tokens_are_summed_in_fp32(cls):
    norm = fill(cls(config=transformer_config(torch.bfloat16), hidden_size=24, eps=EPS))
    x, dy = torch.randn(2, 8192, 24).bfloat16()
    dy += 0.1  # so that the bias gradient does not cancel
    ours = torch.autograd.grad(norm(x), norm.parameters(), dy)
    theirs = torch.autograd.grad(exact(norm, x), norm.parameters(), dy.double())
    for our, their in zip(ours, theirs, strict=True):
        # One rounding, and one of each result on the way; summed in bf16 it would be 0.1.
        assert (our.double() - their).norm() < 2**-7 * their.norm()


def test_rms_norm_equals_hugging_face():
    norm = fill(RMSNorm(config=transformer_config(), hidden_size=24, eps=EPS))
    theirs = LlamaRMSNorm(24, eps=EPS)
    theirs.weight.data.copy_(norm.weight.data)
    x = torch.randn(5, 2, 24)
    torch.testing.assert_close(norm(x), theirs(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm])
def test_starts_as_the_plain_norm_and_builds_on_meta(cls):
    norm = cls(config=transformer_config(), hidden_size=24)
    assert torch.equal(norm.weight, torch.ones(24))
    x = torch.randn(3, 24)
    plain = functional.rms_norm if cls is RMSNorm else functional.layer_norm
    torch.testing.assert_close(norm(x), plain(x, (24,), eps=1e-5))
    with torch.device("meta"):
        norm = cls(config=transformer_config(tp=2), hidden_size=24)
    assert norm.weight.device.type == "meta"
    assert norm.weight.sequence_parallel


def bytes_kept(norm, x):
    """Bytes of distinct storages that autograd keeps, parameters and ``x`` left out."""
    known = {t.untyped_storage()._cdata for t in (x, *norm.parameters())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = norm(x)  # alive, so that no storage is used twice
    return sum(kept.values()), y


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("cls", "copies"), [(RMSNorm, 0), (LayerNorm, 2)])
def test_what_autograd_keeps(cls, copies, device):
    with torch.device(device):
        norm = cls(config=transformer_config(torch.bfloat16), hidden_size=512)
        x = torch.randn(1024, 1, 512, dtype=torch.bfloat16, requires_grad=True)
        kept, _ = bytes_kept(norm, x)
    assert 0 < kept - copies * x.nbytes <= 8 * 1024 + 8 * 512  # statistics, fp32 weights


class NormedMLP(torch.nn.Module):
    """A norm, a split linear layer and its sum: what a norm meets under sequence parallelism."""

    def __init__(self, cls, config, tp_group):
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        self.config = config
        self.norm = fill(cls(config=config, hidden_size=24, eps=EPS))
        common = dict(
            config=config, init_method=torch.nn.init.zeros_, bias=False, tp_group=tp_group
        )
        self.fc1 = ColumnParallelLinear(24, 40, **common)
        self.fc2 = RowParallelLinear(
            40, 24, input_is_parallel=True, skip_bias_add=True, is_expert=False, **common
        )

    def forward(self, x):
        return self.fc2(self.fc1(self.norm(x))[0].tanh())[0]


def check_norm_gradients_under_sequence_parallelism(world, cls, x, dy, w1, w2):
    """Gradients of the norm's parameters after megatron-core's DDP and finalize_model_grads."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection

    tp, rank = world.size(), world.rank()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = transformer_config(tp=tp, normalization=cls.__name__)
    model = NormedMLP(cls, config, groups.tp)
    model.fc1.weight.data.copy_(w1.chunk(tp, 0)[rank])
    model.fc2.weight.data.copy_(w2.chunk(tp, 1)[rank])
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    ddp(x.chunk(tp, 0)[rank]).backward(dy.chunk(tp, 0)[rank])
    finalize_model_grads([ddp], pg_collection=groups)
    return [parameter.main_grad.clone() for parameter in model.norm.parameters()]


@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm])
def test_gradients_under_sequence_parallelism_equal_one_process(cls):
    x, dy = torch.randn(6, 2, 24), torch.randn(6, 2, 24)
    w1, w2 = torch.randn(40, 24) / 5, torch.randn(24, 40) / 5
    norm = fill(cls(config=transformer_config(), hidden_size=24, eps=EPS))
    y = functional.linear(functional.linear(norm(x), w1).tanh(), w2)
    expected = torch.autograd.grad(y, norm.parameters(), dy)
    for gradients in run_on_ranks(
        check_norm_gradients_under_sequence_parallelism, 2, cls, x, dy, w1, w2
    ):
        for ours, theirs in zip(gradients, expected, strict=True):
            # The same terms summed in another order.
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
