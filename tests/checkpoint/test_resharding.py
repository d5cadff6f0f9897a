"""Train, save at one split over ranks, load at another, train on.

Gradients are made up from the iteration and the parameter's name and Adam works element by element,
so everything is asked for bit for bit, against one rank that never stopped.
"""

import dataclasses
import functools

import pytest
import torch

from megatron_untied.checkpoint import (
    CheckpointConfig,
    Progress,
    load_checkpoint,
    save_checkpoint,
)
from tests.support.optimizer_run import MODEL, Split, small_run
from tests.support.ranks import run_on_ranks
from tests.support.whole_model import gather_parameters, gather_state

SPLITS = {
    "1": (1, Split()),
    "1-plain": (1, Split(distributed_optimizer=False)),
    "dp2": (2, Split()),
    "dp2-plain": (2, Split(distributed_optimizer=False)),
    "cp2": (2, Split(context=2)),
    "tp2": (2, Split(tensor=2)),
    "tp2-plain": (2, Split(tensor=2, distributed_optimizer=False)),
    "tp4": (4, Split(tensor=4)),
    "cp2-dp2": (4, Split(context=2)),
    "tp2-cp2": (4, Split(tensor=2, context=2)),
    "tp2-dp2-plain": (4, Split(tensor=2, distributed_optimizer=False)),
}
PAIRS = [
    ("1", "tp2-cp2"),
    ("dp2-plain", "tp4"),
    ("tp2", "cp2-dp2"),
    ("tp4", "1-plain"),
    ("tp2-cp2", "dp2"),
    ("tp2-dp2-plain", "tp2"),
    ("1-plain", "tp2-plain"),
    ("cp2", "1"),
]
TIED = dataclasses.replace(
    MODEL, untie_embeddings_and_output_weights=False, add_bias_linear=True, swiglu=False
)
GATED_WITH_BIASES = dataclasses.replace(MODEL, add_bias_linear=True, normalization="LayerNorm")


@functools.cache
def trained_without_a_stop(model, bf16):
    """The states of one rank after 3 and after 6 iterations."""
    (states,) = run_on_ranks(train, 1, Split(bf16=bf16), model)
    return states


def train(group, split, model):
    run = small_run(split, model)
    run.train(range(3))
    at_3 = gather_state(run.state)
    run.train(range(3, 6))
    return at_3, gather_state(run.state)


def train_and_save(group, split, model, path):
    run = small_run(split, model)
    run.train(range(3))
    before = gather_state(run.state)
    save_checkpoint(path, run.state, Progress(iteration=3, consumed_samples=12))
    after = gather_state(run.state)
    assert all(torch.equal(before[name], after[name]) for name in before)


def load_and_train(group, split, model, path):
    run = small_run(split, model, seed=99)
    progress = load_checkpoint(CheckpointConfig(load=path), run.state, seed=7)
    assert progress == Progress(iteration=3, consumed_samples=12)
    loaded, step = gather_state(run.state), run.state.shards.step()
    parameters = gather_parameters(run.model, run.state.layouts)
    run.train(range(3, 6))
    return loaded, step, parameters, gather_state(run.state), run.state.shards.step()


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_training_goes_on_at_another_split(tmp_path, saved, loaded):
    check_pair(tmp_path, SPLITS[saved], SPLITS[loaded])


@pytest.mark.parametrize(("saved", "loaded"), [("tp2", "dp2-plain"), ("tp2-plain", "tp2-cp2")])
def test_bf16_training_goes_on_at_another_split(tmp_path, saved, loaded):
    check_pair(tmp_path, SPLITS[saved], SPLITS[loaded], bf16=True)


@pytest.mark.parametrize("model", [TIED, GATED_WITH_BIASES], ids=["tied", "gated-with-biases"])
def test_other_architectures_go_on_at_another_split(tmp_path, model):
    check_pair(tmp_path, SPLITS["tp2"], SPLITS["dp2"], model=model)


def check_pair(tmp_path, saved, loaded, *, model=MODEL, bf16=False):
    at_3, at_6 = trained_without_a_stop(model, bf16)
    (saving_ranks, saving), (loading_ranks, loading) = saved, loaded
    saving = dataclasses.replace(saving, bf16=bf16)
    loading = dataclasses.replace(loading, bf16=bf16)
    run_on_ranks(train_and_save, saving_ranks, saving, model, str(tmp_path))
    for answer in run_on_ranks(load_and_train, loading_ranks, loading, model, str(tmp_path)):
        state, step, parameters, later, later_step = answer
        assert_same(state, at_3)
        assert_same(later, at_6)
        assert (step, later_step) == (3, 6)
        for name, values in parameters.items():
            # megatron-core's own norms keep fp32 weights in a bf16 model.
            dtype = torch.bfloat16 if bf16 and "norm" not in name else torch.float32
            assert torch.equal(values, at_3[f"model.{name}"].to(dtype).float()), name


def padding_after_loading(group, path):
    """Start from garbage: nothing but loading may be responsible for the padding's zeros."""
    run = small_run(Split(tensor=2))
    for shard in run.state.shards.shards(with_moments=True):
        for tensor in (shard.value, *shard.moments.values()):
            tensor.fill_(torch.nan)
    load_checkpoint(CheckpointConfig(load=path), run.state, seed=7)
    held = 251 - 128 * group.rank()
    return run.model.output_layer.weight.detach()[held:] if group.rank() else None


def test_vocabulary_padding_is_zero_after_loading(tmp_path):
    run_on_ranks(train_and_save, 1, Split(), MODEL, str(tmp_path))
    _, padding = run_on_ranks(padding_after_loading, 2, str(tmp_path))
    assert padding.shape == (5, 48)
    assert torch.equal(padding, torch.zeros(5, 48))
