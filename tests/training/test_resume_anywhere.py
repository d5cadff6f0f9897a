"""A run stopped twice and resumed in another way each time is the run that was never stopped.

Real steps on a blend of two token files that it reads 9 and 3 times, with unequal masks. Against
one rank that never stopped, losses agree to 1e-6 and norms to 1e-5: only sums are in another order,
and Adam's epsilon of 1e-3 keeps it from turning their rounding into whole steps. In one layout all
is bit for bit.
"""

from unittest import mock

import pytest
import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_untied import backends
from megatron_untied.checkpoint import load_checkpoint
from megatron_untied.training.metrics import read_metrics
from tests.support.command_line import tiny_config
from tests.support.corpus import random_documents, write_token_files
from tests.support.fsdp2_flags import CONTEXT, FULL, OFFLOAD, PARKED, SEQUENCE, TENSOR, layers
from tests.support.ranks import run_on_ranks
from tests.support.tiny_run import train, train_state_on
from tests.support.whole_model import gather_state

STOPS = (4, 6, 9)
SCHEDULE = {"train_iters": 9, "lr": "1e-2", "lr_warmup_iters": 3, "adam_eps": 1e-3}
DISTRIBUTED = {"use_distributed_optimizer": True}
OTHER_IMPLEMENTATION = {"transformer_impl": "transformer_engine"}
ONE = (1, {})
CHANGES = {
    "dp": [(2, DISTRIBUTED), (4, DISTRIBUTED), ONE],
    "cp": [(2, CONTEXT), ONE, (4, {"context_parallel_size": 4, "cp_heads_per_chunk": 4})],
    "cp-kind": [
        (2, CONTEXT | {"cp_comm_type": "p2p"}),
        (2, CONTEXT | layers("selective", 1)),
        (4, CONTEXT | {"cp_comm_type": "p2p"} | DISTRIBUTED),
    ],
    "tp": [(2, SEQUENCE), (4, TENSOR | CONTEXT), ONE],
    "micro-batch": [(1, {"micro_batch_size": 4}), (2, {}), (1, {"micro_batch_size": 2})],
    "sharding": [(2, FULL | CONTEXT), (2, DISTRIBUTED), (4, FULL | SEQUENCE)],
    "offload": [(2, FULL), (2, FULL | OFFLOAD | CONTEXT), (2, CONTEXT)],
    "memory": [
        (2, CONTEXT | layers("full", 2)),
        (2, FULL | CONTEXT | layers("selective", 1, **PARKED)),
        (2, layers("selective", 2, cpu_offloading_num_layers=1)),
    ],
    "implementation": [ONE, (2, CONTEXT | OTHER_IMPLEMENTATION), (1, {"async_save": True})],
    "nothing": [(2, FULL | OFFLOAD | CONTEXT | layers("selective", 2))] * 3,
}

ORDINARY = ("tp", "sharding", "nothing")
"""Of every kind of layout one; the others are slow tests."""


def other_implementation() -> backends.Backend:
    """In place of transformer-engine, which needs a GPU: torch's own norms."""
    local = backends.choose_backend("local", "RMSNorm")
    return backends.Backend(
        norm=WrappedTorchNorm,
        column_parallel_linear=local.column_parallel_linear,
        row_parallel_linear=local.row_parallel_linear,
    )


def part(group, metrics, **flags) -> None:
    with mock.patch.object(backends, "_transformer_engine", other_implementation):
        train(group, metrics, **flags)


def run(prefixes: list[str], folder, parts: list[tuple[int, dict]], stops=STOPS) -> list[dict]:
    """Metrics of a run in ``parts``, each on so many ranks with flags of its own."""
    data = f"3 {prefixes[0]} 1 {prefixes[1]}"
    for (world_size, flags), stop in zip(parts, stops, strict=True):
        run_on_ranks(
            part,
            world_size,
            folder / "metrics.jsonl",
            mock_data=None,
            data_path=data,
            split="1",
            save=folder / "checkpoints",
            load=folder / "checkpoints",
            **SCHEDULE | flags | ({"exit_interval": stop} if stop < STOPS[-1] else {}),
        )
    return read_metrics(folder / "metrics.jsonl")


def final_state(group, folder) -> dict[str, torch.Tensor]:
    train_state = train_state_on(group, **SCHEDULE)
    config = tiny_config(load=folder / "checkpoints").checkpoint
    load_checkpoint(config, train_state.checkpoint_state, seed=5)
    return gather_state(train_state.checkpoint_state)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return [
        write_token_files(folder / name, random_documents(12, vocab_size=250, eod=250, seed=seed))
        for seed, name in enumerate(("a", "b"))
    ]


@pytest.fixture(scope="module")
def uninterrupted(prefixes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    steps = run(prefixes, folder, [ONE], stops=(9,))
    return steps, run_on_ranks(final_state, 1, folder)[0]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, marks=() if change in ORDINARY else pytest.mark.slow)
        for change in CHANGES
    ],
)
def test_a_run_that_is_resumed_in_other_ways_is_the_same_run(
    change, prefixes, uninterrupted, tmp_path
):
    steps, expected = uninterrupted
    parts = CHANGES[change]
    found = run(prefixes, tmp_path, parts)
    assert [step["iteration"] for step in found] == list(range(1, 10))
    for ours, theirs in zip(found, steps, strict=True):
        for name in ("consumed_samples", "valid_tokens", "learning_rate"):
            assert ours[name] == theirs[name]
        assert ours["lm_loss"] == pytest.approx(theirs["lm_loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    (state,) = run_on_ranks(final_state, 1, tmp_path)
    for name, values in expected.items():
        scale = values.abs().max()
        # Second moments are squares: their relative error is twice that of the gradients.
        torch.testing.assert_close(state[name], values, rtol=0, atol=2e-5 * scale.item())
    if change == "nothing":
        whole = tmp_path / "whole"
        again = run(prefixes, whole, parts[:1], stops=(9,))
        same = ("lm_loss", "grad_norm", "learning_rate", "valid_tokens")
        assert [[s[name] for name in same] for s in again] == [[s[n] for n in same] for s in found]
        (bits,) = run_on_ranks(final_state, 1, whole)
        assert all(torch.equal(bits[name], state[name]) for name in bits)
