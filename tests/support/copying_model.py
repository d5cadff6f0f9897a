"""A model whose weights are set by hand so that it copies: its far context is exactly what it uses.

Layer 1 finds the token before each token by position, layer 2 the earlier token after an equal one,
and the output is that token: an induction head. No MLP, no training, at any length.
"""

from pathlib import Path

import torch
from torch import Tensor

from megatron_untied.checkpoint import CheckpointSave, CheckpointState, Progress
from megatron_untied.config import ModelConfig, ParallelConfig, RotaryConfig
from megatron_untied.sharding.parameter_layout import parameter_layouts
from megatron_untied.sharding.shards import ModelShards
from tests.support.tiny_model import make_model, parallel_groups

CODE = 64
"""Width of a token's code; there are twice as many tokens, with codes that never agree by half."""
ROTATED = 16
HEAD = ROTATED + CODE
VOCABULARY = 2 * CODE
COPYING = ModelConfig(
    num_layers=2,
    hidden_size=3 * CODE + 8,  # the token, the one before, the prediction, and a constant
    ffn_hidden_size=8,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=HEAD,
    vocab_size=VOCABULARY,
    max_position_embeddings=4096,
    rotary=RotaryConfig(base=10.0, percent=ROTATED / HEAD),
)
TOKEN, BEFORE, FOUND = (slice(i * CODE, (i + 1) * CODE) for i in range(3))
CONSTANT = 3 * CODE


def codes() -> Tensor:
    """[v, CODE] of 1 and -1: any two are orthogonal or opposite."""
    rows = torch.ones(1, 1)
    while len(rows) < CODE:
        rows = torch.cat([torch.cat([rows, rows], 1), torch.cat([rows, -rows], 1)])
    return torch.cat([rows, -rows])


def write_copying_model(group, folder: Path) -> None:
    """A checkpoint of it; on one rank."""
    groups = parallel_groups(ParallelConfig())
    model = make_model(COPYING, groups=groups)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        model.embedding.word_embeddings.weight[:, TOKEN] = codes()
        model.embedding.word_embeddings.weight[:, CONSTANT] = 1.0
        model.output_layer.weight[:, FOUND] = 0.3 * codes()
        frequencies = COPYING.rotary.base ** (-2 * torch.arange(ROTATED / 2) / ROTATED)
        for layer, (read, written) in zip(
            model.decoder.layers, ((TOKEN, BEFORE), (TOKEN, FOUND)), strict=True
        ):
            # The first of two groups: two query heads, a key and a value; its first head is used.
            attention = layer.self_attention
            q, _, k, v = attention.linear_qkv.weight[: 4 * HEAD].split(HEAD)
            v[:CODE, read] = torch.eye(CODE)
            attention.linear_proj.weight[written, :CODE] = torch.eye(CODE)
        q, _, k, _ = (
            model.decoder.layers[0].self_attention.linear_qkv.weight[: 4 * HEAD].split(HEAD)
        )
        # Rotated, their product is the sum of cos(frequency x (distance - 1)): most at distance 1.
        q[:ROTATED, CONSTANT] = 20 * torch.cat([frequencies.cos(), -frequencies.sin()])
        k[: ROTATED // 2, CONSTANT] = 20.0
        q, _, k, _ = (
            model.decoder.layers[1].self_attention.linear_qkv.weight[: 4 * HEAD].split(HEAD)
        )
        q[ROTATED:, TOKEN] = k[ROTATED:, BEFORE] = 2 * torch.eye(CODE)
    state = CheckpointState(
        model_config=COPYING,
        layouts=parameter_layouts(model, COPYING, tp_rank=0, tp_size=1),
        shards=ModelShards(model),
        groups=groups,
    )
    CheckpointSave(directory=folder, progress=Progress(iteration=1)).write(state)
