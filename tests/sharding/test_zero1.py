import math
from fnmatch import fnmatchcase
from types import SimpleNamespace

import pytest
import torch
from megatron.core.utils import unwrap_model

from megatron_untied.checkpoint.compatibility import TensorFiles
from megatron_untied.checkpoint.global_tensor import GlobalTensor, TensorReader
from megatron_untied.sharding.parameter_layout import GlobalSlice
from megatron_untied.sharding.zero1 import build_scheduler
from megatron_untied.training.metrics import read_metrics
from tests.support.command_line import tiny_config
from tests.support.fsdp2_flags import FULL, layers
from tests.support.ranks import RankFailure, run_on_ranks
from tests.support.tiny_run import train, train_state_on


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


@pytest.mark.parametrize(
    "flags",
    [{"use_distributed_optimizer": True, "bf16": True}, FULL | {"optimizer_cpu_offload": True}],
    ids=["zero1", "full"],
)
def test_frozen_parameters_stay_and_a_run_resumes_without_moments_of_them(tmp_path, flags):
    patterns = "embedding.* decoder.layers.0.* *.linear_fc2.*"
    flags = flags | layers("selective", 1) | {"freeze": patterns, "context_parallel_size": 2}
    folders = [tmp_path / name for name in ("whole", "parts")]
    metrics = [tmp_path / f"{name}.jsonl" for name in ("whole", "first", "second")]
    run_on_ranks(train, 2, metrics[0], train_iters=4, save=folders[0], save_interval=2, **flags)
    for iterations, file in ((2, metrics[1]), (4, metrics[2])):
        # A constant schedule does not depend on the last iteration.
        saving = {"load": folders[1], "save": folders[1], "lr_decay_iters": 4}
        run_on_ranks(train, 2, file, train_iters=iterations, **saving, **flags)
    whole, first, second = ([m["lm_loss"] for m in read_metrics(file)] for file in metrics)
    assert first + second == whole
    last, before = (tensors_of_checkpoint(folders[0] / f"iter_000000{i}") for i in (4, 2))
    names = [name.removeprefix("model.") for name in last if name.startswith("model.")]
    frozen = [n for n in names if any(fnmatchcase(n, p) for p in patterns.split())]
    assert 0 < len(frozen) < len(names)
    for name in names:
        assert torch.equal(last[f"model.{name}"], before[f"model.{name}"]) == (name in frozen)
        assert (f"optimizer.exp_avg.{name}" in last) == (name not in frozen)
    other = flags | {"freeze": "embedding.*", "load": folders[1], "train_iters": 5}
    with pytest.raises(RankFailure, match="trained other parameters: --freeze"):
        run_on_ranks(train, 2, None, **other)
    run_on_ranks(train, 2, None, no_load_optim=True, **other)


def tensors_of_checkpoint(folder):
    files = TensorFiles.open(folder)
    reader, found = TensorReader(folder), {}
    for name, shape in files.shapes.items():
        found[name] = torch.empty(shape, dtype=reader.dtype(name))
        part = GlobalSlice((0,) * len(shape), found[name])
        reader.read({name: GlobalTensor(shape, [part])})
    return found
