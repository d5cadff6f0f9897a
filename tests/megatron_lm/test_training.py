"""Stock GPTModel with our layers trains like our own model: same weights, batches and optimizer."""

from dataclasses import dataclass, field

import pytest
import torch

import pretrain_gpt
from megatron_untied.config import MemoryConfig, RotaryConfig
from megatron_untied.megatron_lm import untied_layer_spec
from megatron_untied.step_progress import StepProgress
from megatron_untied.training.initialize import initialize
from megatron_untied.training.state import build_train_state
from megatron_untied.training.step import train_step
from tests.megatron_lm.stock import named, stock_config, stock_model, train
from tests.support.command_line import tiny_config
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import launch_of

# No vocabulary padding: Megatron-LM's loss counts it in. NullTokenizer adds one token.
FLAGS = {"vocab_size": 255, "make_vocab_size_divisible_by": 8, "train_iters": 3,
         "lr_decay_style": "constant", "lr": 1e-2, "seq_length": 24, "global_batch_size": 4,
         "micro_batch_size": 2}  # fmt: skip
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform",
              "recompute_num_layers": 1}  # fmt: skip
STREAMED = MemoryConfig(
    recompute_granularity="selective", recompute_num_layers=2, sequence_tile_size=5
)
YARN = {"yarn_rotary_scaling_factor": 4.0, "yarn_original_max_position_embeddings": 16,
        "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_mscale": None,
        "yarn_mscale_all_dim": None, "yarn_correction_range_round_to_int": True}  # fmt: skip
ABSOLUTE = {"position_embedding_type": "none"}


def steps(config):
    """The same micro-batches in each: whole sequences with unequal loss masks."""
    generator = torch.Generator().manual_seed(0)
    shape = (config.batch.micro_batch_size, config.batch.seq_length + 1)

    def micro_batch():
        text = torch.randint(config.model.vocab_size, shape, generator=generator)
        mask = (torch.rand(text[:, 1:].shape, generator=generator) < 0.6).float()
        positions = torch.arange(shape[1] - 1).expand_as(mask)
        return {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask,
                "positions": positions}  # fmt: skip

    return [[micro_batch(), micro_batch()]] * config.loop.train_iters


def our_losses(config, groups):
    train_state = build_train_state(pretrain_gpt.model_provider, config, groups, StepProgress())
    results = [
        train_step(
            train_state,
            [pretrain_gpt.get_batch(batch, config, groups) for batch in batches],
            num_samples=config.batch.global_batch_size,
            forward_step=pretrain_gpt.forward_step,
        )
        for batches in steps(config)
    ]
    return [result.lm_loss for result in results]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to name our layers in stock Megatron."""

    spec: str | None = None
    choices: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    arguments: dict = field(default_factory=dict)

    def losses(self, config, groups):
        spec = named(self.spec) if self.spec else untied_layer_spec(**self.choices)
        stock = stock_config(config.model, config.parallel, config.precision, **self.config)
        return train(
            stock_model(spec, config.model, stock, groups, **self.arguments),
            config,
            groups,
            steps(config),
        )


def check_same_losses(group, flags, variants):
    config = tiny_config(group.size(), **FLAGS, **flags)
    groups = initialize(config, launch_of(group))
    expected = our_losses(config, groups)
    assert expected[-1] < expected[0] - 0.1
    for variant in variants:
        # The same sums in another order, in fp32, over three steps of Adam.
        assert variant.losses(config, groups) == pytest.approx(expected, rel=1e-5), variant


UNTIED, STREAMING = Variant(spec="untied_spec"), Variant(spec="streamed_spec")
OWN_TABLE = Variant(choices={"rotary": RotaryConfig(), "heads_per_chunk": "all"},
                    arguments=ABSOLUTE)  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "flags", "variants"),
    [
        pytest.param(
            1, {}, [UNTIED, STREAMING, OWN_TABLE, Variant(spec="untied_spec", config=RECOMPUTED)],
            id="one-rank",
        ),
        pytest.param(
            2,
            {"context_parallel_size": 2},
            [
                UNTIED,
                STREAMING,
                OWN_TABLE,
                Variant(choices={"memory": STREAMED, "heads_per_chunk": 6, "cp_overlap": False}),
                Variant(spec="untied_spec", config={"cp_comm_type": "p2p"}),
                Variant(spec="streamed_spec", config={"cp_comm_type": "p2p"}),
                Variant(spec="untied_spec", config=RECOMPUTED),
            ],
            id="cp2",
        ),
        pytest.param(2, {"tensor_model_parallel_size": 2}, [UNTIED, STREAMING], id="tp2"),
        pytest.param(
            2,
            {"context_parallel_size": 2, "window_size": "6,0", "qk_layernorm": True,
             "rotary_percent": 0.5},
            [UNTIED, STREAMING],
            id="cp2-window",
        ),
        pytest.param(
            2,
            {"context_parallel_size": 2, "use_rope_scaling": True},
            [Variant(spec="untied_spec", arguments={"rope_scaling": True})],
            id="cp2-llama3-scaling",
        ),
        pytest.param(
            2,
            {"context_parallel_size": 2, "position_embedding_type": "yarn"}
            | {name: YARN[name] for name in list(YARN)[:2]},
            [Variant(spec="untied_spec", config=YARN,
                     arguments={"position_embedding_type": "yarn"})],
            id="cp2-yarn",
        ),
    ],
)  # fmt: skip
def test_losses_are_those_of_our_model(world_size, flags, variants):
    run_on_ranks(check_same_losses, world_size, flags, variants)
