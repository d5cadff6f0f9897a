"""Adapters against PEFT's formula on a transformers model: a step, its checkpoint, its exports."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import pretrain_gpt
from megatron_untied.checkpoint import load_pretrained
from megatron_untied.checkpoint.compatibility import TensorFiles
from megatron_untied.checkpoint.directory import find_checkpoint
from megatron_untied.commands.convert import main as convert_command
from megatron_untied.config.parameters import LORA_TARGETS
from megatron_untied.context_parallel.sequence import SequenceLayout
from megatron_untied.step_progress import StepProgress
from megatron_untied.training.initialize import initialize
from megatron_untied.training.metrics import read_metrics
from megatron_untied.training.state import build_train_state
from megatron_untied.training.step import train_step
from tests.hf.test_training_round_trip import train, transformers_loss, validation_samples
from tests.support.fsdp2_flags import CONTEXT, FULL, OFFLOAD, PARKED, SEQUENCE, TENSOR, layers
from tests.support.hf_conversion import config_of, convert, convert_back
from tests.support.hf_models import save_model
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import draw_adapters
from tests.support.tiny_run import batch_of, launch_of
from tests.support.whole_model import gather_gradients, gather_state

RANK, ALPHA = 3, 6.0
ADAM = {"lr": "1e-2", "clip_grad": 0.01, "adam_eps": "1e-4", "lr_decay_style": "constant"}
STREAMED, ZERO1 = layers("selective", 1), {"use_distributed_optimizer": True}


def lora(base: Path, **flags) -> dict:
    """Flags of a run that trains adapters of the imported checkpoint ``base``."""
    flags = {"lora_rank": RANK, "lora_alpha": ALPHA, "pretrained_checkpoint": base} | flags
    return {"load": None, "finetune": None} | STREAMED | flags


def one_step(group, base: Path, **flags):
    """The loss of a step, and adapters with their gradients before it and values after it."""
    config = config_of(group.size(), base, **lora(base, seq_length=64, **ADAM) | flags)
    groups = initialize(config, launch_of(group))
    train_state = build_train_state(pretrain_gpt.model_provider, config, groups, StepProgress())
    state = train_state.checkpoint_state
    load_pretrained(find_checkpoint(base), state)
    draw_adapters(state.shards, state.layouts)
    before = gather_state(state)
    layout = SequenceLayout.of(config.parallel, rank=groups.cp.rank())
    batches = [batch_of(groups, seed=number, layout=layout) for number in range(2)]
    result = train_step(train_state, batches, num_samples=8, forward_step=pretrain_gpt.forward_step)
    after = gather_state(state)
    frozen = [name for name in before if name.startswith("model.") and "lora" not in name]
    assert all(torch.equal(after[name], before[name]) for name in frozen)
    assert not any(f"optimizer.exp_avg.{name.removeprefix('model.')}" in after for name in frozen)
    adapters = [
        {
            n.removeprefix("model."): x
            for n, x in each.items()
            if n.startswith("model.") and "lora" in n
        }
        for each in (before, after)
    ]
    return result, adapters, gather_gradients(train_state)


class WithAdapter(nn.Module):
    """PEFT's formula, in float64."""

    def __init__(self, base: nn.Linear, a: torch.Tensor, b: torch.Tensor):
        super().__init__()
        self.base, self.a, self.b = base, nn.Parameter(a.double()), nn.Parameter(b.double())

    def forward(self, x):
        return self.base(x) + ALPHA / RANK * F.linear(F.linear(x, self.a), self.b)


def reference(folder: Path, adapters: dict[str, torch.Tensor]) -> tuple[nn.Module, dict]:
    """The transformers model with these adapters alone to be trained, and they by our names."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model.requires_grad_(False)
    found = {}
    for name in adapters:
        if name.endswith("lora_A"):
            path = name.split(".")
            layer = model.model.layers[int(path[2])]
            parent = layer.self_attn if path[-2] in "q_proj k_proj v_proj o_proj" else layer.mlp
            pair = (adapters[name.replace("lora_A", each)] for each in ("lora_A", "lora_B"))
            wrapped = WithAdapter(getattr(parent, path[-2]), *pair)
            setattr(parent, path[-2], wrapped)
            found |= {name: wrapped.a, name.replace("lora_A", "lora_B"): wrapped.b}
    return model, found


@pytest.mark.parametrize(
    ("family", "world_size", "flags"),
    [
        ("llama3-wide-heads", 1, ZERO1 | {"lora_targets": "v_proj q_proj down_proj"}),
        ("llama3-wide-heads", 2, CONTEXT | FULL | layers("full", 2, **PARKED)),
        ("qwen2.5", 2, CONTEXT | ZERO1 | {"cp_comm_type": "p2p"}),
        ("qwen3", 2, TENSOR | FULL | OFFLOAD),
        ("qwen3-tied", 2, SEQUENCE | ZERO1),
        ("qwen3", 4, CONTEXT | SEQUENCE | FULL | {"cp_heads_per_chunk": 4}),
        ("llama2", 4, {"context_parallel_size": 2} | layers("selective", 2, **PARKED)),
    ],
)
def test_a_step_is_that_of_pefts_formula(tmp_path, family, world_size, flags):
    folder = save_model(family, tmp_path / "hf")
    base = convert(folder, tmp_path / "base")
    (result, (adapters, after), gradients), *_ = run_on_ranks(one_step, world_size, base, **flags)
    targets = flags.get("lora_targets", " ".join(LORA_TARGETS)).split()
    assert len(adapters) == 2 * 2 * len(targets)
    model, expected = reference(folder, adapters)
    batches = [batch_of(_Alone, seed=number) for number in range(2)]
    total = sum(batch.loss_mask.sum() for batch in batches)
    loss = 0
    for batch in batches:
        logits = model(input_ids=batch.tokens).logits.transpose(1, 2)
        losses = F.cross_entropy(logits, batch.labels, reduction="none")
        loss = loss + (losses * batch.loss_mask).sum() / total
    loss.backward()
    assert float(result.lm_loss) == pytest.approx(loss.item(), rel=1e-6)
    norm = torch.stack([x.grad.norm() for x in expected.values()]).norm()
    assert float(result.grad_norm) == pytest.approx(norm.item(), rel=1e-5)
    trained = {name: x for name, x in gradients.items() if "lora" in name}
    assert trained.keys() == expected.keys()
    scale = min(1.0, 0.01 / (norm.item() + 1e-6))
    assert scale < 1  # clipping takes part
    for name, theirs in expected.items():
        theirs.grad.mul_(scale)
        error = (trained[name] - theirs.grad).abs().max() / theirs.grad.abs().max()
        assert error < 2e-5, f"{name}: {error:.1e}"  # fp32
    torch.optim.AdamW(expected.values(), lr=1e-2, eps=1e-4, weight_decay=0.01).step()
    for name, theirs in expected.items():
        assert (after[name] - theirs).abs().max() < 1e-6, name
        assert (after[name] - adapters[name]).abs().max() > 1e-4, name


class _Alone:
    """Groups of one rank, for ``batch_of``."""

    class dp:
        rank, size = staticmethod(lambda: 0), staticmethod(lambda: 1)

    cp = dp


@pytest.mark.parametrize(
    ("dtype", "flags"), [({}, FULL), ({"dtype": torch.bfloat16}, ZERO1 | {"bf16": True})]
)
def test_adapters_are_saved_alone_resumed_merged_and_exported(tmp_path, capsys, dtype, flags):
    folder = save_model("llama3-wide-heads", tmp_path / "hf", **dtype)
    base, run = convert(folder, tmp_path / "base"), tmp_path / "run"
    flags = lora(base, **CONTEXT, **flags, lr="2e-2", lr_decay_style="constant")
    metrics = [tmp_path / f"{name}.jsonl" for name in ("all", "first", "second")]
    run_on_ranks(train, 2, base, train_iters=4, metrics_jsonl=metrics[0], **flags)
    saving = flags | {"load": run, "save": run}
    run_on_ranks(train, 2, base, train_iters=2, metrics_jsonl=metrics[1], **saving)
    run_on_ranks(train, 2, base, train_iters=4, metrics_jsonl=metrics[2], **saving)
    whole, first, second = ([m for m in read_metrics(f) if "lm_loss" in m] for f in metrics)
    assert [m["lm_loss"] for m in first + second] == [m["lm_loss"] for m in whole]
    assert whole[3]["lm_loss"] != whole[0]["lm_loss"]
    names = TensorFiles.open(find_checkpoint(run)).shapes
    assert all(".adapters." in name for name in names)
    assert len(names) == 3 * 2 * 2 * 7

    convert_command(["megatron-to-peft", "--load", str(run), "--hf-path", str(tmp_path / "peft")])
    assert "PeftModel.from_pretrained" in capsys.readouterr().out
    pairs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (RANK, ALPHA)
    merged = load_file(convert_back(run, tmp_path / "merged") / "model.safetensors")
    original = load_file(folder / "model.safetensors")
    assert merged.keys() == original.keys()
    for name, x in merged.items():
        expected, key = original[name].float(), f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in pairs:
            a, b = pairs.pop(f"{key}.lora_A.weight"), pairs.pop(f"{key}.lora_B.weight")
            change = ALPHA / RANK * (b.double() @ a.double())
            assert change.abs().max() > 1e-3
            expected = (expected.double() + change).to(x.dtype).float()
        assert x.dtype == original[name].dtype
        # One rounding of fp32, or of bf16 from an fp32 sum.
        assert torch.allclose(x.float(), expected, rtol=1e-5 if not dtype else 1e-2, atol=1e-6)
    assert not pairs


def test_the_merged_model_has_the_loss_that_training_reported(tmp_path):
    folder = save_model("qwen3", tmp_path / "hf")
    base, run = convert(folder, tmp_path / "base"), tmp_path / "run"
    metrics = tmp_path / "metrics.jsonl"
    flags = lora(base, train_iters=3, lr="2e-2", save=run, metrics_jsonl=metrics, **FULL)
    run_on_ranks(train, 2, base, **flags)
    *_, last = read_metrics(metrics)
    (samples,) = run_on_ranks(validation_samples, 1, base)
    merged = convert_back(run, tmp_path / "merged")
    assert transformers_loss(merged, samples) == pytest.approx(last["validation_loss"], rel=1e-5)
    assert abs(transformers_loss(folder, samples) - last["validation_loss"]) > 1e-3
    peft = pytest.importorskip("peft", reason="PEFT itself is not installed")
    convert_command(["megatron-to-peft", "--load", str(run), "--hf-path", str(tmp_path / "peft")])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "peft").eval()
    with torch.no_grad():
        theirs = loaded(input_ids=samples["tokens"]).logits
        merged_model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
        torch.testing.assert_close(theirs, merged_model(input_ids=samples["tokens"]).logits)


def refusal(group, base: Path, **flags) -> str:
    with pytest.raises(SystemExit) as exit:
        train(group, base, **flags)
    return str(exit.value)


def test_checkpoints_of_other_adapters_are_refused(tmp_path):
    folder = save_model("llama2", tmp_path / "hf")
    base, other = convert(folder, tmp_path / "base"), convert(folder, tmp_path / "other")
    run = tmp_path / "run"
    flags = lora(base, train_iters=1, save=run, load=run, eval_iters=0)
    run_on_ranks(train, 1, base, **flags)
    for changes, message in (
        ({"lora_alpha": 5}, "--lora-alpha 6.0, here 5.0"),
        ({"lora_targets": "q_proj"}, "--lora-targets"),
        ({"pretrained_checkpoint": other}, "has adapters of another checkpoint"),
        ({"load": base, "save": None}, "is of a whole model, and --lora-rank loads adapters"),
    ):
        (found,) = run_on_ranks(refusal, 1, base, **flags | changes)
        assert message in found
    whole = {"load": run, "finetune": True, "train_iters": 1, "use_checkpoint_args": True}
    (found,) = run_on_ranks(refusal, 1, base, **whole)
    assert "--lora-rank 3, here None" in found
    with pytest.raises(SystemExit, match="has no adapters; leave out --pretrained-checkpoint"):
        convert_command(["megatron-to-hf", "--load", str(base), "--hf-path", str(tmp_path / "x"),
                         "--pretrained-checkpoint", str(base)])  # fmt: skip
    with pytest.raises(SystemExit, match="has no checkpoint with adapters; check the path"):
        convert_command(["megatron-to-peft", "--load", str(base), "--hf-path", str(tmp_path / "x")])
