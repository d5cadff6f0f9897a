"""GPTModel as Megatron-LM's pretrain_gpt.py builds and trains it, without Megatron-LM itself."""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from megatron_untied.config import ModelConfig
from megatron_untied.config.run import RunConfig
from megatron_untied.model import transformer_config
from megatron_untied.sharding.zero1 import MegatronSharding, build_scheduler
from megatron_untied.step_progress import StepProgress


def named(name: str) -> ModuleSpec:
    """What ``--spec megatron_untied.megatron_lm NAME`` comes to."""
    return import_module(("megatron_untied.megatron_lm", name))


def stock_config(model: ModelConfig, parallel, precision, **changes) -> TransformerConfig:
    """Megatron-LM's configuration; YaRN's attributes are not fields of megatron-core's."""
    config = transformer_config(model, parallel, precision)
    yarn = {name: changes.pop(name) for name in list(changes) if name.startswith("yarn_")}
    window = model.window_size and (model.window_size - 1, 0)
    config = replace(config, **{"window_size": window} | changes)
    for name, value in yarn.items():
        setattr(config, name, value)
    return config


def stock_model(spec: ModuleSpec, model: ModelConfig, config, groups, **arguments) -> GPTModel:
    rotary = {"rotary_base": model.rotary.base, "rotary_percent": model.rotary.percent}
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=model.padded_vocab_size(groups.tp.size()),
        max_sequence_length=model.max_position_embeddings,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        pg_collection=groups,
        **{"position_embedding_type": "rope"} | rotary | arguments,
    )


def loss_function(loss_mask: Tensor, losses: Tensor):
    """Of pretrain_gpt.py: sum of losses, number of tokens, report."""
    loss = (losses.float() * loss_mask).sum()
    num_tokens = loss_mask.sum().int()
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens])}


def forward_step(batches, model):
    """Of pretrain_gpt.py, with its sharding of a batch over the context-parallel ranks."""
    batch = get_batch_on_this_cp_rank(dict(next(batches)))
    losses = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    return losses, partial(loss_function, batch["loss_mask"])


def train(model: GPTModel, config: RunConfig, groups, steps: list[list[dict]]) -> list[float]:
    """The loss of each step; a step is a list of micro-batches of whole sequences."""
    sharding = MegatronSharding(lambda *_: model, config, groups, StepProgress())
    model.config.finalize_model_grads_func = finalize_model_grads
    scheduler = build_scheduler(sharding, config)
    losses = []
    for batches in steps:
        sharding.zero_grad()
        reports = forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[sharding.model],
            num_microbatches=len(batches),
            seq_length=config.batch.seq_length,
            micro_batch_size=config.batch.micro_batch_size,
            forward_only=False,
        )
        sharding.optimizer.step()
        scheduler.step(increment=config.batch.global_batch_size)
        total = torch.stack([report["lm loss"] for report in reports]).sum(0)
        dist.all_reduce(total, group=groups.dp_cp)
        losses.append((total[0] / total[1]).item())
    return losses
