"""Numbers gone wrong are found in their step, on all ranks, and nothing is changed by them.

Each fault is planted on one of several ranks, at one place of the step.
"""

import contextlib
import io
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch

import pretrain_gpt
from megatron_untied.checkpoint.replicas import require_equal_replicas
from megatron_untied.config.run import LoopConfig
from megatron_untied.data.datasets import build_datasets
from megatron_untied.data.tokenizers import build_tokenizer
from megatron_untied.residual import Rows
from megatron_untied.streaming import layer as streamed
from megatron_untied.training.guards import StepGuard
from megatron_untied.training.initialize import UserError
from megatron_untied.training.metrics import read_metrics
from megatron_untied.training.reporting import LossSpikes
from megatron_untied.training.step import train_step
from tests.support.command_line import tiny_config
from tests.support.corpus import random_documents, write_token_files
from tests.support.fsdp2_flags import CONTEXT, FULL, OFFLOAD, PARKED, SEQUENCE, TENSOR, layers
from tests.support.ranks import RankFailure, run_on_ranks
from tests.support.tiny_run import batch_of, train, train_state_on
from tests.support.whole_model import gather_state

forward_step_of_run = pretrain_gpt.forward_step

LAYOUTS = {
    "dp2": (2, layers("full", 1)),
    "dp2-distributed": (2, {"use_distributed_optimizer": True} | layers("selective", 1)),
    "cp2-full-sharding": (2, FULL | CONTEXT | layers("selective", 2)),
    "tp2-sequence": (2, SEQUENCE | layers("full", 2)),
    "cp2-tp2-full-sharding": (4, FULL | CONTEXT | SEQUENCE | layers("full", 1)),
}
GRADIENT = "decoder.layers.0.mlp.linear_fc1.weight"
PLACES = {
    "loss": "the loss, nan in micro-batch 2 of 2",
    "gradient": f"the gradient of {GRADIENT} in micro-batch 2 of 2",
}


@contextlib.contextmanager
def planted(kind: str, *, on_this_rank: bool, times: int = 1000):
    """A ``forward_step``; on this rank a NaN comes up ``times`` times, in each second call."""
    calls = dict.fromkeys(("loss", "gradient", "output"), 0)
    originals = streamed.layer_backward, streamed.mlp_forward

    def is_due(place: str) -> bool:
        if kind != place or not on_this_rank:
            return False
        calls[place] += 1
        return calls[place] % 2 == 0 and calls[place] <= 2 * times

    def forward_step(model, batch, weights):
        loss = forward_step_of_run(model, batch, weights)
        return loss * torch.nan if is_due("loss") else loss

    def layer_backward(layer, *args):
        sums = originals[0](layer, *args)
        if layer.layer_number == 1 and is_due("gradient"):
            sums._sums["mlp.linear_fc1.weight"][3, 5] = torch.nan
        return sums

    def mlp_forward(layer, x, out, result):
        originals[1](layer, x, out, result)
        if layer.layer_number == 2 and is_due("output"):  # backward of groups repeats layer 1
            result.as_tensor()[0, 0, 0] = torch.inf

    with (
        mock.patch.object(streamed, "layer_backward", layer_backward),
        mock.patch.object(streamed, "mlp_forward", mlp_forward),
    ):
        yield forward_step


def guarded(train_state, **loop) -> StepGuard:
    return StepGuard(train_state.model, LoopConfig(train_iters=1, **loop))


def two_micro_batches(train_state):
    """Of 8 samples: rank d of the data-parallel ranks has those with its remainder."""
    groups = train_state.groups
    parts = []
    for number in range(2):
        mine = range(4 * number + groups.dp.rank(), 4 * number + 4, groups.dp.size())
        parts.append(replace(batch_of(groups, seed=number), samples=tuple(mine)))
    return parts


def stopped_step(group, kind: str, flags: dict, times: int = 1000, **loop) -> tuple[str, bool]:
    """The message of a step with a planted fault, after a good one; whether any bit changed."""
    train_state = train_state_on(group, **flags)
    guard, batches = guarded(train_state, **loop), two_micro_batches(train_state)
    last = group.size() - 1
    step = {"num_samples": 8, "guard": guard}
    train_step(train_state, batches, forward_step=forward_step_of_run, **step, iteration=6)
    before = gather_state(train_state.checkpoint_state)
    with planted(kind, on_this_rank=group.rank() == last, times=times) as forward_step:
        with pytest.raises(UserError) as stopped:
            train_step(train_state, batches, forward_step=forward_step, **step, iteration=7)
    after = gather_state(train_state.checkpoint_state)
    is_same = all(torch.equal(before[name], after[name]) for name in before)
    # The same step without the fault: nothing of the failed one is left.
    train_step(train_state, batches, forward_step=forward_step_of_run, **step, iteration=7)
    return str(stopped.value), is_same


@pytest.mark.parametrize("kind", list(PLACES))
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("tp2")) for name in LAYOUTS],
)
def test_a_nan_is_found_before_the_update_and_its_rank_place_and_samples_named(layout, kind):
    world_size, flags = LAYOUTS[layout]
    answers = run_on_ranks(stopped_step, world_size, kind, flags)
    assert len({message for message, _ in answers}) == 1
    message, is_same = answers[0]
    assert is_same
    assert message.startswith("error: iteration 7: lm loss ")
    samples = "sample 5, sample 7" if layout.startswith("dp2") else "sample 4, sample 5, sample 6"
    # Ranks that share a sequence may share its NaN: attention or their part of the loss.
    assert re.search(rf"It began on .*{world_size - 1} \(", message)
    assert f"with {PLACES[kind]}: {samples}" in message


@pytest.mark.parametrize(
    ("kind", "times", "conclusion"),
    [
        ("loss", 1, "it did not repeat: suspect a device, not the data"),
        ("gradient", 1, "it did not repeat: suspect a device, not the data"),
        ("loss", 2, "it repeated at the same place: the data or the weights are the cause"),
        ("output", 2, "it repeated at the same place: the data or the weights are the cause"),
    ],
)
@pytest.mark.parametrize("layout", ["dp2-distributed", "cp2-full-sharding"])
def test_a_rerun_tells_a_flaky_device_from_bad_data(layout, kind, times, conclusion):
    world_size, flags = LAYOUTS[layout]
    answers = run_on_ranks(stopped_step, world_size, kind, flags, times, rerun_on_nan=True)
    assert len({message for message, _ in answers}) == 1
    message, is_same = answers[0]
    assert is_same
    assert message.endswith(conclusion)
    assert "It began on rank 1 (" in message
    if kind == "output":
        assert "with the output of layer 2 of 2 in micro-batch 2 of 2: sample" in message


def test_a_fault_that_moves_is_the_devices():
    ((message, _),) = run_on_ranks(moving_fault, 1)
    assert "it began elsewhere (It began on rank 0" in message
    assert message.endswith("): suspect a device")


def moving_fault(group):
    original = StepGuard.verdict

    def verdict(self, first, again, samples):
        def other():
            with planted("gradient", on_this_rank=True) as forward_step:
                return again(forward_step=forward_step)

        return original(self, first, other, samples)

    with mock.patch.object(StepGuard, "verdict", verdict):
        return stopped_step(group, "loss", layers("full", 1), rerun_on_nan=True)


def skipping_run(group, path):
    with planted("loss", on_this_rank=group.rank() == 1, times=2) as forward_step:
        with mock.patch.object(pretrain_gpt, "forward_step", forward_step):
            train(
                group,
                path,
                no_check_for_nan_in_loss_and_grad=True,
                train_iters=6,
                global_batch_size=2,
                lr_decay_style="linear",
            )


def test_without_the_check_such_a_step_is_skipped_and_counted(tmp_path):
    run_on_ranks(skipping_run, 2, tmp_path / "m")
    steps = read_metrics(tmp_path / "m")
    assert [step["skipped"] for step in steps] == [0, 1, 0, 1, 0, 0]
    assert [step["lm_loss"] is None for step in steps] == [False, True, False, True, False, False]
    rates = [step["learning_rate"] for step in steps]
    assert rates[1] == rates[0]  # of the schedule
    assert rates[2] < rates[1]


VERIFIED = {
    "full": (1, layers("full", 1)),
    "full-groups": (2, CONTEXT | layers("full", 2)),
    "selective": (2, CONTEXT | layers("selective", 1)),
    "selective-groups-offloaded": (
        2,
        CONTEXT | layers("selective", 2, cpu_offloading_num_layers=2),
    ),
    "parked-full-sharding": (2, FULL | OFFLOAD | CONTEXT | layers("selective", 1, **PARKED)),
    "tp2-sequence-bf16": (2, SEQUENCE | layers("full", 1) | {"bf16": True}),
}


def verified_step(group, flags: dict, damage: str | None):
    """A step before and one with the check; ``damage``: what one rank's backward gets wrong."""
    train_state = train_state_on(group, **flags)
    guard, original = guarded(train_state, verify_recompute=2), streamed.recompute
    compared = []

    def recompute(*args):
        saved = original(*args)
        if saved.index == 0:
            compared.append(saved.checksums is not None)
        if damage and group.rank() == group.size() - 1 and saved.index == 1:
            part = saved.x if damage == "input" else saved.out
            flip_a_bit(part, saved.layer)
        return saved

    batches = two_micro_batches(train_state)
    step = {"num_samples": 8, "guard": guard, "forward_step": forward_step_of_run}
    train_step(train_state, batches, **step, iteration=1)
    with mock.patch.object(streamed, "recompute", recompute):
        result = train_step(train_state, batches, **step, iteration=2)
    assert compared == [True, True]
    return result, gather_state(train_state.checkpoint_state)


def flip_a_bit(part, layer) -> None:
    """The lowest bit of one element of rows [n, b, m] or of attention outputs."""
    if isinstance(part, Rows):
        tiles = layer.tiles(part.shape[0])
        for x, y in part.updates(tiles, part):
            y.copy_(x)
            bits = y.view(-1).view(torch.int32)
            bits[5] ^= 1
    else:
        part.send_buffer(0).view(torch.int32)[7] ^= 1


@pytest.mark.parametrize("mode", list(VERIFIED))
def test_what_backward_recomputes_is_what_forward_computed(mode):
    world_size, flags = VERIFIED[mode]
    checked = run_on_ranks(verified_step, world_size, flags, None)
    plain = run_on_ranks(plain_steps, world_size, flags)
    for (result, state), (expected, expected_state) in zip(checked, plain, strict=True):
        assert result == expected
        assert all(torch.equal(state[name], expected_state[name]) for name in state)


def plain_steps(group, flags: dict):
    train_state = train_state_on(group, **flags)
    batches = two_micro_batches(train_state)
    for _ in range(2):
        result = train_step(train_state, batches, num_samples=8, forward_step=forward_step_of_run)
    return result, gather_state(train_state.checkpoint_state)


@pytest.mark.parametrize(
    ("mode", "damage", "named"),
    [
        ("full", "input", "input of layer 2, output of layer 2 on rank 0"),
        ("selective", "input", "input of layer 2, output of layer 2 on rank 1"),
        ("selective", "attention output", "attention output of layer 2, output of layer 2 on"),
        ("selective-groups-offloaded", "input", "input of layer 2, output of layer 2 on rank 1"),
    ],
)
def test_one_flipped_bit_of_what_was_saved_is_found_and_named(mode, damage, named):
    world_size, flags = VERIFIED[mode]
    with pytest.raises(RankFailure, match=f"error: iteration 2: recomputed values .*{named}"):
        run_on_ranks(verified_step, world_size, flags, damage)


REPLICATED = {
    "weights-dp3": (3, {"global_batch_size": 3}, "decoder.layers.1.mlp.linear_fc2.weight"),
    "moments-dp3": (3, {"global_batch_size": 3}, "optimizer.exp_avg_sq.output_layer.weight"),
    "copies-dp2-distributed-bf16": (
        2,
        {"use_distributed_optimizer": True, "bf16": True},
        "decoder.layers.1.mlp.linear_fc2.weight",
    ),
    "norms-tp2-full-sharding": (2, FULL | TENSOR, "model.decoder.final_layernorm.weight"),
    "norms-tp2-cp2": (4, SEQUENCE | CONTEXT, "decoder.layers.0.input_layernorm.weight"),
}


def damaged_replica(group, flags: dict, name: str | None):
    train_state = train_state_on(group, **flags)
    batches = two_micro_batches(train_state)
    train_step(train_state, batches, num_samples=8, forward_step=forward_step_of_run)
    state = train_state.checkpoint_state
    require_equal_replicas(state)
    if group.rank() == group.size() - 1:
        for shard in state.shards.shards(with_moments=True):
            found = {f"model.{shard.name}": shard.value}
            found |= {f"optimizer.{k}.{shard.name}": x for k, x in shard.moments.items()}
            if name in found:
                found[name].view(-1).view(torch.int32)[3] ^= 1
        for own, tensor in state.shards.working_copies():
            if own == name:
                tensor.view(-1).view(torch.uint8)[6] ^= 4
    with pytest.raises(ValueError, match="ranks hold different values of ") as refused:
        require_equal_replicas(state)
    return str(refused.value)


@pytest.mark.parametrize("case", list(REPLICATED))
def test_a_flipped_bit_on_one_rank_is_found_and_the_rank_named(case):
    world_size, flags, name = REPLICATED[case]
    (message,) = set(run_on_ranks(damaged_replica, world_size, flags, name))
    assert name in message
    assert re.search(rf"ranks 0 .*, another on ranks .*{world_size - 1} \(", message)


def save_damaged(group, folder):
    original = train_step

    def step(train_state, *args, **kwargs):
        result = original(train_state, *args, **kwargs)
        if kwargs["iteration"] == 3 and group.rank() == 1:
            next(train_state.model.parameters()).data[4, 2] += 1e-3
        return result

    with mock.patch("megatron_untied.training.loop.train_step", step):
        with pytest.raises(SystemExit) as refused:
            train(group, save=folder, save_interval=2, train_iters=6)
    return str(refused.value)


def test_ranks_that_differ_are_not_saved(tmp_path):
    for message in run_on_ranks(save_damaged, 2, tmp_path):
        assert message.startswith("error: ranks hold different values of ")
        assert "nothing was saved" in message
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000002"]


def spiky_run(group, path) -> str:
    calls = iter(range(1, 1000))

    def forward_step(model, batch, weights):
        return forward_step_of_run(model, batch, weights) * (20 if next(calls) > 106 else 1)

    said = io.StringIO()
    patched = mock.patch.object(pretrain_gpt, "forward_step", forward_step)
    with patched, contextlib.redirect_stdout(said):
        train(
            group,
            path,
            check_for_spiky_loss=True,
            train_iters=108,
            global_batch_size=1,
            seq_length=16,
            log_interval=54,
        )
    return said.getvalue()


def test_spikes_are_counted_in_the_log_line_and_the_metrics(tmp_path):
    (said,) = run_on_ranks(spiky_run, 1, tmp_path / "m")
    assert [step["loss_spike"] for step in read_metrics(tmp_path / "m")][100:] == [0] * 6 + [1, 1]
    assert "number of loss spikes:   0 |" in said
    assert "number of loss spikes:   2 |" in said
    assert "warning: the lm loss of iteration 107, 1." in said
    assert "is a spike" in said


def test_a_loss_that_is_not_finite_is_no_spike_and_no_yardstick():
    spikes = LossSpikes(num_first=2)
    losses = [float("nan"), 3.0, float("inf"), 2.0, 29.9, 30.0, float("inf")]
    assert [spikes.is_spike(loss) for loss in losses] == [False] * 5 + [True, False]


def test_samples_are_named_with_their_documents(tmp_path):
    prefixes = [
        write_token_files(tmp_path / name, random_documents(30, vocab_size=250, eod=250, seed=3))
        for name in ("a", "b")
    ]
    data = tiny_config(mock_data=None, data_path=f"1 {prefixes[0]} 1 {prefixes[1]}", split="1").data
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=250)
    (described,) = run_on_ranks(described_samples, 1, data, tokenizer)
    for index, (text, documents) in enumerate(described):
        assert text.startswith(f"sample {index}: sample ")
        assert documents in text
        assert re.search(r"documents [\d, ]+( and \d+ more)? of \S+/[ab]\)$", text)


def described_samples(group, data, tokenizer):
    dataset = build_datasets(data, tokenizer, seq_length=64, num_samples=(8, 0, 0), seed=1).train
    found = []
    for index in range(8):
        own = dataset.datasets[dataset.dataset_index[index]]
        _, documents = own._query_document_sample_shuffle_indices(
            dataset.dataset_sample_index[index]
        )
        found.append((dataset.describe_sample(index), ", ".join(map(str, documents[:6]))))
    return found


def test_a_rerun_without_the_check_is_refused():
    with pytest.raises(ValueError, match="--rerun-on-nan repeats a step before the run ends"):
        tiny_config(rerun_on_nan=True, no_check_for_nan_in_loss_and_grad=True)
    with pytest.raises(ValueError, match="--verify-recompute has no effect without --recompute"):
        tiny_config(verify_recompute=2)
