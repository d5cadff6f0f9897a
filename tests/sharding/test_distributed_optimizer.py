from types import SimpleNamespace

import pytest
import torch

from megatron_untied.sharding.zero1 import OptimizerShards
from tests.support.optimizer_run import Split, small_run
from tests.support.ranks import run_on_ranks
from tests.support.whole_model import gather_parameters, gather_state


def shards_of_a_run(group, split):
    run = small_run(split)
    run.train(range(2))
    names = [name for name, _ in run.model.named_parameters()]
    found = list(run.state.shards.shards(with_moments=True))
    for shard in found:
        numel = sum(tensor_slice.numel for tensor_slice in shard.slices)
        assert shard.value.dtype == torch.float32
        assert {numel} == {shard.value.numel(), *(m.numel() for m in shard.moments.values())}
    adam = run.optimizer.chained_optimizers[0].optimizer
    steps = [state["step"] for state in adam.state.values()]
    assert len({step.data_ptr() for step in steps}) == len(steps) > 0  # none is shared
    return names, [shard.name for shard in found], gather_state(run.state)


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("bf16", [True, False])
def test_all_ranks_together_hold_everything(distributed, bf16):
    split = Split(distributed_optimizer=distributed, bf16=bf16)
    answers = run_on_ranks(shards_of_a_run, 2, split)
    held = [set(answer[1]) for answer in answers]
    everything = set(answers[0][0])
    assert held[0] | held[1] == everything
    if distributed:
        assert held[0] != everything
        assert len(held[0] & held[1]) > 3  # parameters that are cut in two
    for _, _, state in answers:
        assert not any(values.isnan().any() for values in state.values())


def write_main_values(group, split):
    run = small_run(split)
    for shard in run.state.shards.shards(with_moments=False):
        assert not shard.moments
        layout = run.state.layouts[shard.name]
        for part in layout.global_slices(shard.value, shard.slices):
            part.tensor.fill_(len(shard.name) / 3)
    run.state.shards.sync_model_params()
    return gather_parameters(run.model, run.state.layouts)


@pytest.mark.parametrize("split", [
    Split(), Split(bf16=True), Split(distributed_optimizer=False),
    Split(distributed_optimizer=False, bf16=True),
])  # fmt: skip
def test_published_values_are_in_the_model_on_every_rank(split):
    for parameters in run_on_ranks(write_main_values, 2, split):
        for name, values in parameters.items():
            is_rounded = split.bf16 and "norm" not in name
            expected = torch.tensor(len(name) / 3)
            expected = expected.bfloat16().float() if is_rounded else expected
            assert torch.equal(values, expected.expand_as(values)), name


def steps_are_counted_one_by_one(group):
    run = small_run(Split())
    list(run.state.shards.shards(with_moments=True))
    run.state.shards.set_step(10)
    assert run.state.shards.step() == 10
    run.train(range(1))
    assert run.state.shards.step() == 11


def test_a_step_that_was_set_goes_on():
    run_on_ranks(steps_are_counted_one_by_one, 1)


class GroupCounting(torch.optim.Optimizer):
    """Counts its steps in the group, like the fused Adams of Transformer Engine and Apex."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0})

    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


def test_steps_counted_in_the_group_are_read_and_set():
    model = torch.nn.Linear(2, 2)
    adam = GroupCounting(model.parameters())
    shards = OptimizerShards(SimpleNamespace(optimizer=adam), model)
    assert shards.step() == 0
    adam.step()
    assert shards.step() == 1
    shards.set_step(7)
    adam.step()
    assert shards.step() == 8
    assert not adam.state  # nothing of torch's way of counting
