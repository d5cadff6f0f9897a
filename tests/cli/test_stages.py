"""``--seq-length-schedule`` and ``--long-document-weight`` on the command line."""

import re

import pytest

from megatron_untied.config import RotaryConfig
from tests.support.command_line import tiny_config


def staged(schedule, **changes):
    return tiny_config(**{"seq_length": None, "seq_length_schedule": schedule} | changes)


def test_stages_have_their_length_batch_and_rotary_embedding():
    config = staged(
        "0:64,3:1Ki:rotary-base=5e4,3100tok:128:use-rope-scaling:rope-scaling-factor=4",
        keep_batch_tokens=True, global_batch_size=16, train_iters=9,
    )  # fmt: skip
    assert [stage.first_iteration for stage in config.stages] == [0, 3, 4]
    batches = [(stage.batch.seq_length, stage.batch.global_batch_size) for stage in config.stages]
    assert batches == [(64, 16), (1024, 1), (128, 8)]
    assert [stage.rotary for stage in config.stages] == [
        RotaryConfig(),
        RotaryConfig(base=5e4),
        RotaryConfig(base=5e4, scaling="llama3", scaling_factor=4.0),
    ]
    assert config == config.in_stage(0)
    last = config.in_stage(2)
    assert (last.batch, last.model.rotary) == (config.stages[2].batch, config.stages[2].rotary)
    assert [config.stage_of(n) for n in (0, 1, 3, 4, 5, 9)] == [0, 0, 0, 1, 2, 2]
    assert [count for _, count in config.batches(2, 7)] == [1, 1, 3]
    assert config.num_tokens(2, 7) == 5 * 1024
    assert config.model.max_position_embeddings == 1024
    assert config.schedule_samples == 16


def test_without_the_switch_the_number_of_samples_stays():
    config = staged("0:64,3:128", train_iters=5)
    assert [stage.batch.tokens for stage in config.stages] == [256, 512]
    # 2 iterations are left, one of each stage, after 8 samples in batches of 4.
    assert config.num_samples(iteration=2, consumed_samples=8) == (20, 0, 0)


def test_yarn_may_be_stretched_further_in_each_stage():
    yarn = "position-embedding-type=yarn:yarn-original-max-position-embeddings=64"
    config = staged(
        f"0:64,2:128:{yarn}:yarn-rotary-scaling-factor=2,4:256:yarn-rotary-scaling-factor=4"
    )
    assert [(stage.rotary.scaling, stage.rotary.scaling_factor) for stage in config.stages] == [
        ("none", 1.0),
        ("yarn", 2.0),
        ("yarn", 4.0),
    ]
    assert config.stages[2].rotary.original_max_positions == 64


def test_the_timeout_is_that_of_the_slowest_stage():
    assert staged("0:64,3:1048576").distributed.timeout_minutes > 10
    assert staged("0:1048576,3:64").distributed == staged("0:64,3:1048576").distributed


@pytest.mark.parametrize(
    ("schedule", "changes", "message"),
    [
        ("0:64,3", {}, "'3' is not START:LENGTH; write for example 0:8192,200:65536"),
        ("0:64,3:128K", {}, "'128K' is ambiguous; give 128Ki"),
        ("0:64,-3:128", {}, "-3 is below 0"),
        ("0:64,3:128:swiglu", {}, "sets 'swiglu'; a stage can set position-embedding-type, rotary"),
        ("0:64,3:128:rotary-base=x", {}, "stage 2: argument --rotary-base: 'x' is not a number"),
        ("0:64,3:128:yarn-beta-fast=8", {}, "stage 2: --yarn-beta-fast has no effect without"),
        ("2:64,3:128", {}, "stage 1: it starts at 2; the first stage starts at 0"),
        ("0:64,3:128,3:256", {}, "stage 3: it starts after iteration 3, not after the stage"),
        ("0:64,3:128,100tok:256", {}, "stage 3: it starts after iteration 2, not after the stage"),
        ("0:64,3:64", {}, "stage 2: it changes nothing; leave it out"),
        ("0:64,10:128", {}, "starts after iteration 10, and --train-iters is 10"),
        ("0:64,3:96", {"keep_batch_tokens": True}, "256 tokens of an iteration are no whole"),
        ("0:64,3:130", {"world": 4}, "stage 2: --seq-length 130 is not divisible over 4 context"),
        ("0:64,3:256", {"keep_batch_tokens": True, "world": 2, "context_parallel_size": 1},
         "stage 2: --global-batch-size 1 is not a multiple of --micro-batch-size 1 x 2"),
        ("0:64,3:128", {"max_position_embeddings": 64},
         "stage 2: --seq-length 128 is above --max-position-embeddings 64"),
        ("0:64,3:128", {"seq_length": 64}, "--seq-length cannot be given with --seq-length-sch"),
        ("0:64,3:128", {"sft": True}, "--sft cannot be given with --seq-length-schedule"),
        ("0:64,3:128", {"mock_data": None, "data_path": "a b"}, "give WEIGHT PREFIX WEIGHT PREFIX"),
        (None, {"seq_length": 64, "keep_batch_tokens": True}, "--keep-batch-tokens has no effect"),
    ],
)  # fmt: skip
def test_refuses_a_schedule_that_cannot_be_followed(schedule, changes, message):
    world = changes.pop("world", 1)
    changes = {"context_parallel_size": world} | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_config(world, **{"seq_length": None, "seq_length_schedule": schedule} | changes)


def test_weights_by_length():
    weighted = tiny_config(long_document_weight="0:0.5,32Ki:4")
    assert weighted.data.long_document_weight == ((0, 0.5), (32768, 4.0))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("4", "'4' is not LENGTH:WEIGHT"),
        ("64:-1", "'64:-1' is not LENGTH:WEIGHT"),
        ("64:nan", "'64:nan' is not LENGTH:WEIGHT"),
        ("64:2,32:1", "the lengths must rise"),
        ("0:0", "leaves no document"),
    ],
)
def test_refuses_weights_that_mean_nothing(weights, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_config(long_document_weight=weights)


def test_chats_have_no_weights_by_length():
    flags = {"mock_data": None, "sft": True, "data_path": "x", "vocab_size": None}
    flags["tokenizer_type"] = "HuggingFaceTokenizer"
    with pytest.raises(ValueError, match="--long-document-weight has no effect with --sft"):
        tiny_config(long_document_weight="64:2", **flags)
