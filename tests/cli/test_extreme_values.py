"""Values that no flag may take in silence: each is honored as listed here, or refused by name."""

import pytest

from megatron_untied.cli.arguments import parse_arguments
from megatron_untied.cli.flags import FLAGS, SWITCHES
from tests.support.command_line import command_line

EXTREME = ("0", "-1", "nan", "inf", "-inf", "", " ", "1e300", "1" + 30 * "0")

YARN = {
    "position_embedding_type": "yarn",
    "yarn_rotary_scaling_factor": 4,
    "yarn_original_max_position_embeddings": 32,
}
STREAMED = {"recompute_granularity": "full"}
PROFILED = {"profile": True, "tensorboard_dir": "here"}
SAVED, LOADED = {"save": "here"}, {"load": "there"}
NEEDED = {
    "--yarn-beta-fast": YARN,
    "--yarn-beta-slow": YARN,
    "--yarn-rotary-scaling-factor": YARN,
    "--yarn-original-max-position-embeddings": YARN,
    "--yarn-mscale": YARN | {"yarn_mscale_all_dim": 1},
    "--yarn-mscale-all-dim": YARN | {"yarn_mscale": 1},
    "--rope-scaling-factor": {"use_rope_scaling": True},
    "--recompute-num-layers": STREAMED,
    "--sequence-tile-size": STREAMED,
    "--cpu-offloading-num-layers": STREAMED,
    "--recompute-method": STREAMED,
    "--freeze": STREAMED,
    "--profile-step-start": PROFILED,
    "--profile-step-end": PROFILED,
    "--profile-ranks": PROFILED,
    "--save-interval": SAVED,
    "--save-retain-interval": SAVED,
    "--most-recent-k": SAVED,
    "--ckpt-step": LOADED,
    "--lr-wsd-decay-iters": {"lr_decay_style": "WSD"},
    "--data-path": {"mock_data": None},
}
"""Flags without which another has no effect."""

ANY_TEXT = {"0", "-1", "nan", "inf", "1e300", EXTREME[-1]}
"""Names of files and folders may look like numbers."""

HONORED = {
    "--hidden-dropout": {"0"},
    "--attention-dropout": {"0"},
    "--lora-dropout": {"0"},
    "--lr": {"0"},
    "--min-lr": {"0"},
    "--lr-warmup-iters": {"0"},
    "--lr-warmup-init": {"0"},
    "--weight-decay": {"0"},
    "--adam-beta1": {"0"},
    "--adam-beta2": {"0"},
    "--clip-grad": {"0"},  # does not clip
    "--seed": {"0"},
    "--num-workers": {"0"},
    "--eval-iters": {"0"},
    "--ckpt-step": {"0"},
    "--cpu-offloading-num-layers": {"0"},
    "--heartbeat-seconds": {"0"},
    "--profile-step-start": {"0"},
    "--profile-ranks": {"0"},
    "--yarn-mscale": {"0"},
    "--yarn-mscale-all-dim": {"0"},
    "--tokenizer-model": ANY_TEXT,
    "--data-path": ANY_TEXT,
    "--data-cache-path": ANY_TEXT,
    "--save": ANY_TEXT,
    "--load": ANY_TEXT,
    "--tensorboard-dir": ANY_TEXT,
    "--metrics-jsonl": ANY_TEXT,
    "--split": {EXTREME[-1]},  # a share of all that the shares add up to
}

WITH_VALUES = {name: options for group in FLAGS.values() for name, options in group
               if name not in SWITCHES}  # fmt: skip


def refusal_of(argv: list[str]) -> str | None:
    try:
        parse_arguments(argv, world_size=1)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("name", "options"), WITH_VALUES.items(), ids=WITH_VALUES)
def test_extreme_values_are_honored_or_refused_by_the_flags_name(name, options):
    argv = command_line(**NEEDED.get(name, {}))
    accepted = set()
    for value in EXTREME:
        values = [value] * options["nargs"] if type(options.get("nargs")) is int else [value]
        refusal = refusal_of([*argv, name, *values])
        if refusal is None:
            accepted.add(value)
        else:
            assert name in refusal, f"{value!r}: {refusal}"
            assert "\n" not in refusal
    assert accepted == HONORED.get(name, set())


@pytest.mark.parametrize("name", sorted(SWITCHES))
def test_switches_take_no_value(name):
    for value in EXTREME:
        with pytest.raises(ValueError, match=name):
            parse_arguments([*command_line(), name, value], world_size=1)
