"""Evaluation of the context: every layout against one process, and faults that its numbers show."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_untied.checkpoint import CheckpointSave, CheckpointState, Progress
from megatron_untied.commands import evaluate_context
from megatron_untied.config import ParallelConfig
from megatron_untied.context_parallel.kernels.matrix_products import MatrixProducts
from megatron_untied.context_parallel.kernels.tensors import Qkv
from megatron_untied.model import Runtime, build_model, build_run_model
from megatron_untied.sharding.parameter_layout import parameter_layouts
from megatron_untied.sharding.shards import ModelShards
from megatron_untied.streaming.host_arena import HostArena
from tests.support.command_line import words
from tests.support.copying_model import VOCABULARY, write_copying_model
from tests.support.corpus import write_token_files
from tests.support.ranks import RankFailure, run_on_ranks
from tests.support.tiny_model import TINY, make_model, parallel_groups
from tests.support.tiny_run import launch_of

S, WINDOW = 128, 20
FLAGS = {
    "--use-checkpoint-args": True,
    "--tokenizer-type": "NullTokenizer",
    "--split": "1,3,0",
    "--seq-length": S,
    "--window-tokens": WINDOW,
    "--num-documents": 3,
    "--depths": 3,
    "--trials": 1,
    "--lengths": f"{S // 2} {S}",
}


def write_tiny_model(group, folder):
    groups = parallel_groups(ParallelConfig())
    model = make_model(groups=groups)
    layouts = parameter_layouts(model, TINY, tp_rank=0, tp_size=1)
    state = CheckpointState(
        model_config=TINY, layouts=layouts, shards=ModelShards(model), groups=groups
    )
    CheckpointSave(directory=folder, progress=Progress(iteration=1)).write(state)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Flags of the tiny model and random documents: a short one, one of S tokens, longer ones."""
    folder, rng = tmp_path_factory.mktemp("tiny"), np.random.default_rng(0)
    run_on_ranks(write_tiny_model, 1, folder)
    lengths = (S + 9, S + 9, 5, S, S + 1, 3 * S, S)  # a quarter of them is for training
    documents = [rng.integers(0, TINY.vocab_size - 1, n) for n in lengths]
    write_token_files(folder / "tokens", documents)
    return FLAGS | {
        "--load": folder,
        "--data-path": folder / "tokens",
        "--vocab-size": TINY.vocab_size - 1,
        "--output": folder / "out",
    }


@pytest.fixture(scope="module")
def copying(tmp_path_factory):
    """Flags of the model that copies, and documents in which 44 different tokens repeat."""
    folder, rng = tmp_path_factory.mktemp("copying"), np.random.default_rng(0)
    run_on_ranks(write_copying_model, 1, folder)
    documents = [np.resize(rng.permutation(VOCABULARY - 1)[:44], S + 1) for _ in range(4)]
    write_token_files(folder / "tokens", documents)
    return FLAGS | {
        "--load": folder,
        "--data-path": folder / "tokens",
        "--vocab-size": VOCABULARY - 1,
        "--output": folder / "out",
    }


def results_of(group, flags, provider=build_run_model):
    request = evaluate_context.parse_request(words(flags), group.size())
    return evaluate_context.evaluate(request, launch_of(group), provider)


# --- values ---------------------------------------------------------------------------------------


def plain_losses(model, tokens, labels):
    """Losses from the logits of all tokens, [s]."""
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None])[0, :, : TINY.vocab_size]
    labels = torch.from_numpy(labels)
    return F.cross_entropy(logits, labels, reduction="none").numpy()


def expected_of_documents(group, documents):
    """Means over bins by definition: what a token sees is all that the model is given."""
    model, edges = (
        make_model(groups=parallel_groups(ParallelConfig())),
        [0, 1, 2, 4, *range(8, S + 1, 8)],
    )
    full, near, gain = [], [], []
    for ids in documents:
        labels = np.resize(ids[1 : S + 1], S)
        num = min(len(ids) - 1, S)
        losses = plain_losses(model, ids[:S], labels)
        alone = losses.copy()
        for start in range(WINDOW, S - WINDOW, WINDOW):  # of the later half of each block
            block = slice(start, min(start + 2 * WINDOW, S))
            later = plain_losses(model, ids[block], labels[block])[WINDOW:]
            alone[start + WINDOW : block.stop] = later
        bins = [slice(a, min(b, num)) for a, b in zip(edges, edges[1:], strict=False)]
        full.append([losses[x].mean() for x in bins])
        near.append([alone[x].mean() for x in bins])
        gain.append((alone - losses)[2 * WINDOW : num].mean())
    return edges, np.array(full), np.array(near), np.array(gain)


LAYOUTS = {
    "one rank": (1, {}),
    "streamed": (1, {"--recompute-granularity": "full", "--sequence-tile-size": 24}),
    "Ulysses 2": (2, {"--context-parallel-size": 2, "--loss-chunk-size": 5}),
    "ring 2": (2, {"--context-parallel-size": 2, "--cp-comm-type": "p2p"}),
    "fully sharded 2, data parallel": (2, {"--use-torch-fsdp2": True}),
    "Ulysses 4, parked, fully sharded": (
        4,
        {
            "--context-parallel-size": 4,
            "--use-torch-fsdp2": True,
            "--recompute-granularity": "selective",
            "--cpu-offloading-num-layers": "all",
            "--park-during-attention": True,
            "--cp-heads-per-chunk": 4,
            "--sequence-tile-size": 24,
        },
    ),
    "ring 2 of Ulysses 2": (
        4,
        {
            "--context-parallel-size": 4,
            "--cp-comm-type": "a2a+p2p",
            "--hierarchical-context-parallel-sizes": "2 2",
            "--recompute-granularity": "full",
        },
    ),
    "tensor and sequence parallel": (
        4,
        {
            "--context-parallel-size": 2,
            "--tensor-model-parallel-size": 2,
            "--sequence-parallel": True,
            "--recompute-granularity": "full",
        },
    ),
}


@pytest.fixture(scope="module")
def one_process(tiny):
    """Documents by definition, and the whole evaluation on one rank."""
    rng = np.random.default_rng(0)
    documents = [
        rng.integers(0, TINY.vocab_size - 1, n) for n in (S + 9, S + 9, 5, S, S + 1, 3 * S, S)
    ]
    (expected,) = run_on_ranks(expected_of_documents, 1, documents[3:6])
    (whole,) = run_on_ranks(results_of, 1, tiny)
    return expected, whole


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_measures_the_same(tiny, one_process, name):
    (edges, *expected), whole = one_process
    world_size, flags = LAYOUTS[name]
    by_rank = run_on_ranks(results_of, world_size, tiny | flags)
    for results in by_rank:
        documents = results["documents"]
        assert documents.edges == edges
        # fp32: sums in another order; near context also at other angles of the rotation.
        found = documents.full, documents.near, documents.gain
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)
        for task in ("passkey", "needles", "copy"):
            ours, theirs = results[task], whole[task]
            assert np.array_equal(ours.right, theirs.right)
            np.testing.assert_allclose(ours.nats, theirs.nats, rtol=0, atol=2e-4)
    np.testing.assert_allclose(
        by_rank[0]["copy"].random_nats, whole["copy"].random_nats, rtol=0, atol=2e-4
    )


def test_weights_are_loaded_in_bf16(tiny, one_process):
    expected = one_process[1]["copy"].nats
    for flags in ({}, {"--use-torch-fsdp2": True}):
        (results,) = run_on_ranks(results_of, 1, tiny | flags | {"--bf16": True, "--tasks": "copy"})
        # Of logits up to 5, and their means over 4 to 8 tokens.
        np.testing.assert_allclose(results["copy"].nats, expected, rtol=0, atol=0.1)


def test_a_copying_model_reads_its_far_context(copying):
    (results,) = run_on_ranks(results_of, 1, copying)
    documents, copy = results["documents"], results["copy"]
    bins = dict(zip(documents.edges, documents.full.mean(0), strict=False))
    assert all(bins[position] < 0.01 for position in range(48, S, 8))
    assert bins[32] > 3
    # 20 to 39 tokens before hold no repetition after 44.
    assert documents.near[:, -1].min() > 3
    assert documents.gain.min() > 2
    assert copy.right[:, 0].mean() > 0.6  # a token that occurred twice has two continuations
    assert "no leak: random tokens" in copy.verdict()
    report = json.loads((copying["--output"] / "context.json").read_text())
    assert report["documents"]["edges"] == documents.edges
    assert report["copy"]["rows"][0] == "1 of 8"
    for task in ("documents", "passkey", "needles", "copy"):
        assert (copying["--output"] / f"{task}.png").stat().st_size > 5_000


# --- planted faults -------------------------------------------------------------------------------


class Leaky(MatrixProducts):
    """Its keys are one place early: a query sees the next token."""

    def _forward(self, x, out, call):
        k, v = (torch.cat([y[1:], y[-1:]]) for y in (x.k, x.v))
        return super()._forward(Qkv(x.q, k, v), out, call)


def leaky_model(config, groups, progress):
    runtime = Runtime(kernel=Leaky(), progress=progress)
    return build_model(
        config.model, config.parallel, config.memory, config.precision, groups, runtime=runtime
    )


def shifted_model(config, groups, progress):
    """On the second rank positions count one too far."""
    model = build_run_model(config, groups, progress)
    for layer in model.decoder.layers:
        attention = layer.self_attention
        attention.context = replace(
            attention.context, layout=Shifted.of(config.parallel, rank=groups.cp.rank())
        )
    return model


class Shifted(evaluate_context.SequenceLayout):
    def positions(self, n, device="cpu"):
        return super().positions(n, device) + (self.rank == 1)


def wrong_label_model(config, groups, progress):
    """The last label of a shard is its own first token, not that of the next rank."""
    model = build_run_model(config, groups, progress)

    def cut(module, args, kwargs):
        labels = kwargs["labels"].clone()
        labels[:, -1] = args[0][:, 0]
        return args, kwargs | {"labels": labels}

    model.register_forward_pre_hook(cut, with_kwargs=True)
    return model


TWO = {"--context-parallel-size": 2}


def test_a_mask_that_lets_the_next_token_through_is_called_a_leak(copying):
    results = run_on_ranks(results_of, 2, copying | TWO, leaky_model)[0]
    assert results["copy"].random_nats.max() < 2.5 < results["copy"].floor
    assert results["copy"].verdict().startswith("LEAK: tokens see what they are to predict")
    # The documents cost nothing from the beginning.
    assert results["documents"].full.mean(0)[8] < 0.5


def test_positions_that_are_wrong_on_one_rank_are_a_bump_in_the_curve(copying):
    flags = copying | {"--context-parallel-size": 4, "--tasks": "documents"}
    right, wrong = (
        run_on_ranks(results_of, 4, flags, provider)[0]["documents"]
        for provider in (build_run_model, shifted_model)
    )
    bumps = dict(zip(right.edges, (wrong.full - right.full).mean(0), strict=False))
    # The second shard begins at 32. Its first token, by its position as near to itself as to that
    # before it, takes both for the one before, and predicts itself.
    assert bumps.pop(32) > 1
    assert max(map(abs, bumps.values())) < 0.01
    assert wrong.border.mean() - right.border.mean() > 1


def test_a_wrong_label_at_the_end_of_a_shard_stands_out(copying):
    right, wrong = (
        run_on_ranks(results_of, 2, copying | TWO | {"--tasks": "documents"}, provider)[0][
            "documents"
        ]
        for provider in (build_run_model, wrong_label_model)
    )
    assert abs(right.border.mean()) < 0.2
    assert wrong.border.mean() > 3
    assert "tokens at borders of shards" in wrong.describe()


# --- nothing is kept ------------------------------------------------------------------------------


def check_nothing_is_kept(group, flags):
    """Host bytes, and tensors that autograd would save, through a whole evaluation."""
    arenas, saved = [], []

    def provider(config, groups, progress):
        arenas.append(HostArena.for_device(torch.device("cpu")))
        runtime = Runtime(arena=arenas[-1], progress=progress)
        return build_model(
            config.model, config.parallel, config.memory, config.precision, groups, runtime=runtime
        )

    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        results_of(group, flags, provider)
    assert not saved
    assert arenas[0].reserved_bytes == 0


def test_an_evaluation_keeps_nothing_for_a_backward(tiny):
    streamed = {
        "--recompute-granularity": "selective",
        "--cpu-offloading-num-layers": "all",
        "--tasks": "documents",
    }
    run_on_ranks(check_nothing_is_kept, 2, tiny | TWO | streamed)


# --- bad input ------------------------------------------------------------------------------------


def check_refused(group, flags, message):
    """The same line on every rank."""
    with pytest.raises((SystemExit, ValueError), match=message) as error:
        results_of(group, flags)
    lines = [None] * group.size()
    dist.all_gather_object(lines, str(error.value))
    assert len(set(lines)) == 1
    assert "\n" not in lines[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--load": None, "--use-checkpoint-args": None, "--model": "llama3.2-1b"}, "--load is m"),
        ({"--window-tokens": S // 2}, "--window-tokens 64 leaves no far context.*at most 63"),
        ({"--lengths": S + 2}, "--lengths 130 must be 32 to --seq-length 128 tokens"),
        ({"--lengths": 33}, "--lengths 33 .* a multiple of 2; give for example 64"),
        ({"--split": "1,0,0"}, "--split 1,0,0 holds out no documents"),
        ({"--seq-length": 250, "--split": "6,1,0"}, "none of the 1 documents .* longest has 128"),
        ({"--data-path": None, "--mock-data": True, "--tasks": "documents"}, "give --data-path"),
        ({"--lengths": 40, "--tasks": "needles"}, "3 needles .* 48 tokens, more than the 40"),
        ({"--output": "/dev/null/x"}, "--output /dev/null/x"),
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated_is_one_line_on_every_rank(tiny, change, message):
    run_on_ranks(check_refused, 2, tiny | TWO | change, message)


def test_a_damaged_checkpoint_is_one_line(tiny, tmp_path):
    with pytest.raises(RankFailure, match="has no checkpoint"):
        run_on_ranks(results_of, 1, tiny | {"--load": tmp_path})
