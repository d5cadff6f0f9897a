import math
from types import SimpleNamespace

import pytest
import torch
from megatron.core.utils import unwrap_model

import pretrain_gpt
from megatron_untied.sharding.zero1 import build_scheduler
from megatron_untied.step_progress import StepProgress
from megatron_untied.training.initialize import initialize
from megatron_untied.training.state import build_train_state
from tests.support.command_line import tiny_config
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import launch_of, train_state_on


def learning_rates(**flags) -> list[float]:
    """The rate that each of ten iterations uses, then the one after them."""
    config = tiny_config(lr=1.0, **flags)
    optimizer = SimpleNamespace(param_groups=[{"wd_mult": 1.0}])
    scheduler = build_scheduler(optimizer, config)
    rates = []
    for _ in range(11):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=config.batch.global_batch_size)
    return rates


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"lr_decay_style": "constant"}, lambda i: 1.0),
        ({"lr_decay_style": "linear"}, lambda i: 1 - i / 10),
        ({"lr_decay_style": "linear", "min_lr": 0.5}, lambda i: 1 - i / 20),
        ({"lr_decay_style": "cosine", "min_lr": 0.2},
         lambda i: 0.2 + 0.8 * (1 + math.cos(math.pi * i / 10)) / 2),
        ({"lr_decay_style": "linear", "lr_warmup_iters": 4},
         lambda i: i / 4 if i <= 4 else 1 - (i - 4) / 6),
        ({"lr_decay_style": "constant", "lr_warmup_iters": 4, "lr_warmup_init": 0.5},
         lambda i: min(1.0, 0.5 + i / 8)),
        ({"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 4},  # in samples, 4 a step
         lambda i: i / 4 if i <= 4 else math.sqrt(4 / i)),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4, "lr_wsd_decay_style": "linear"},
         lambda i: 1.0 if i <= 6 else 1 - (i - 6) / 4),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4},
         lambda i: 1.0 if i <= 6 else 2 * 0.5 ** ((i - 6) / 4) - 1),
        ({"lr_decay_style": "linear", "lr_decay_iters": 5}, lambda i: max(0.0, 1 - i / 5)),
    ],
)  # fmt: skip
def test_learning_rate_of_every_iteration(flags, expected):
    assert learning_rates(**flags) == pytest.approx([expected(i) for i in range(11)], abs=1e-12)


def weight_decay_by_parameter(group, **flags) -> dict[str, float]:
    train_state = train_state_on(group, **flags)
    model = unwrap_model(train_state.model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: one["weight_decay"]
        for one in train_state.sharding.param_groups
        for parameter in one["params"]
    }


@pytest.mark.parametrize("full_sharding", [None, True])
def test_weight_decay_spares_norms_and_biases(full_sharding):
    flags = {"qk_layernorm": True, "add_qkv_bias": True, "use_torch_fsdp2": full_sharding}
    (decays,) = run_on_ranks(weight_decay_by_parameter, 1, weight_decay=0.1, **flags)
    spared = {name for name, decay in decays.items() if decay == 0.0}
    assert spared == {name for name in decays if "norm" in name or name.endswith("bias")}
    assert len(spared) == 2 * 5 + 1  # a layer: two norms, q and k norms, qkv bias; the final norm
    assert {decay for name, decay in decays.items() if name not in spared} == {0.1}


def dtypes(group, **flags) -> tuple:
    train_state = train_state_on(group, **flags)
    parameters = list(train_state.model.module.parameters())
    shards = list(train_state.checkpoint_state.shards.shards(with_moments=True))
    return (
        {parameter.dtype for parameter in parameters},
        {parameter.main_grad.dtype for parameter in parameters},
        {tensor.dtype for shard in shards for tensor in (shard.value, *shard.moments.values())},
        sum(shard.value.numel() for shard in shards) / sum(p.numel() for p in parameters),
    )


@pytest.mark.parametrize(
    ("flags", "compute"), [({"bf16": True}, torch.bfloat16), ({}, torch.float32)]
)
@pytest.mark.parametrize("distributed", [None, True])
def test_main_weights_gradients_and_moments_are_fp32(flags, compute, distributed):
    for weights, gradients, states, share in run_on_ranks(
        dtypes, 2, use_distributed_optimizer=distributed, **flags
    ):
        assert weights == {compute}
        assert gradients == states == {torch.float32}
        assert share == (pytest.approx(0.5, rel=0.01) if distributed else 1.0)


def refusal_of_a_frozen_embedding(group, **flags) -> str:
    def model_provider(config, groups, progress):
        model = pretrain_gpt.model_provider(config, groups, progress)
        model.embedding.word_embeddings.weight.requires_grad_(False)
        return model

    config = tiny_config(group.size(), **flags)
    groups = initialize(config, launch_of(group))
    with pytest.raises(ValueError, match="1 parameters are frozen") as refused:
        build_train_state(model_provider, config, groups, StepProgress())
    return str(refused.value)


@pytest.mark.parametrize("flags", [{}, {"use_distributed_optimizer": True, "bf16": True}])
def test_refuses_frozen_parameters_that_a_checkpoint_would_leave_out(flags):
    for message in run_on_ranks(refusal_of_a_frozen_embedding, 2, **flags):
        assert "the first is embedding.word_embeddings.weight" in message
        assert "--use-torch-fsdp2" in message
