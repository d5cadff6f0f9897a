"""From a Hugging Face folder through training and back: the losses on both sides are the same."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import pretrain_gpt
from megatron_untied.checkpoint import Progress
from megatron_untied.hf.folder import SafetensorsFolder
from megatron_untied.training.loop import pretrain
from megatron_untied.training.metrics import read_metrics
from tests.support.hf_conversion import config_of, convert, convert_back
from tests.support.hf_models import save_model
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import launch_of

EVALUATION = {"eval_iters": 1, "seq_length": 32, "micro_batch_size": 2, "global_batch_size": 4}


def train(group, checkpoints: Path, **flags) -> None:
    pretrain(
        config_of(group.size(), checkpoints, **EVALUATION | flags),
        launch_of(group),
        model_provider=pretrain_gpt.model_provider,
        datasets_provider=pretrain_gpt.datasets_provider,
        get_batch=pretrain_gpt.get_batch,
        forward_step=pretrain_gpt.forward_step,
    )


def validation_samples(group, checkpoints: Path) -> dict[str, torch.Tensor]:
    """The samples that the run evaluates on, [4, 32]."""
    config = config_of(1, checkpoints, **EVALUATION | {"train_iters": 3})
    valid = pretrain_gpt.datasets_provider(config, Progress()).valid
    samples = [valid[i] for i in range(4)]
    return {k: torch.stack([torch.as_tensor(s[k]) for s in samples])
            for k in ("tokens", "labels", "loss_mask")}  # fmt: skip


@torch.no_grad()
def transformers_loss(folder: Path, samples: dict[str, torch.Tensor]) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = model(input_ids=samples["tokens"]).logits
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), samples["labels"], reduction="none"
    )
    return ((losses * samples["loss_mask"]).sum() / samples["loss_mask"].sum()).item()


@pytest.mark.parametrize(
    ("family", "world_size", "split"),
    [
        ("llama3-wide-heads", 2, {"context_parallel_size": 2, "cp_heads_per_chunk": 4,
                                  "use_distributed_optimizer": True}),
        ("qwen2-tied", 2, {"tensor_model_parallel_size": 2}),
        ("qwen3", 2, {"use_torch_fsdp2": True}),
    ],
)  # fmt: skip
def test_transformers_has_the_loss_that_training_reported(tmp_path, family, world_size, split):
    source = save_model(family, tmp_path / "hf")
    checkpoints, metrics = convert(source, tmp_path / "imported"), tmp_path / "metrics.jsonl"
    flags = {"save": tmp_path / "trained", "metrics_jsonl": metrics, "train_iters": 3}
    run_on_ranks(train, world_size, checkpoints, **flags, **split)
    *steps, last = read_metrics(metrics)
    exported = convert_back(tmp_path / "trained", tmp_path / "exported")
    (samples,) = run_on_ranks(validation_samples, 1, checkpoints)
    assert transformers_loss(exported, samples) == pytest.approx(last["validation_loss"], rel=1e-5)
    # Training did change the loss, so the agreement is not that of the imported weights.
    before = transformers_loss(source, samples)
    assert abs(before - last["validation_loss"]) > 1e-3
    assert [step["iteration"] for step in steps] == [1, 2, 3]


def dtypes(folder: Path) -> set[torch.dtype]:
    return {spec.dtype for spec in SafetensorsFolder(folder).specs.values()}


def test_a_trained_model_goes_back_in_the_dtype_that_it_came_in(tmp_path):
    source = save_model("qwen3", tmp_path / "hf", dtype=torch.bfloat16)
    first, second = tmp_path / "first", tmp_path / "second"
    imported = convert(source, tmp_path / "imported")
    run_on_ranks(train, 1, imported, save=first, train_iters=1, eval_iters=0)
    flags = {"finetune": None, "save": second, "train_iters": 2, "eval_iters": 0}
    run_on_ranks(train, 1, first, override_opt_param_scheduler=True, **flags)
    back = convert_back(second, tmp_path / "back")
    assert dtypes(back) == {torch.bfloat16}
    assert json.loads((back / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert dtypes(convert_back(second, tmp_path / "wide", torch.float32)) == {torch.float32}


def test_weights_alone_load_without_their_optimizer(tmp_path):
    checkpoints = convert(save_model("mistral", tmp_path / "hf"), tmp_path / "imported")
    metrics = tmp_path / "metrics.jsonl"
    flags = {"finetune": None, "no_load_optim": True, "skip_train": True, "train_iters": 3}
    run_on_ranks(train, 1, checkpoints, metrics_jsonl=metrics, **flags)
    (samples,) = run_on_ranks(validation_samples, 1, checkpoints)
    (evaluation,) = read_metrics(metrics)
    expected = transformers_loss(tmp_path / "hf", samples)
    assert evaluation["validation_loss"] == pytest.approx(expected, rel=1e-5)
