"""A run of the tiny model, traced in a process of its own."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from megatron_untied.cli.arguments import parse_arguments
from megatron_untied.config.run import RunConfig
from megatron_untied.tracing.step import StepTrace, trace_step
from tests.support.command_line import command_line

RUN = {
    "num_layers": 3,
    "num_attention_heads": 6,  # with 3 groups: two Ulysses ranks share a key-value head
    "num_query_groups": 3,
    "seq_length": 2048,
    "bf16": True,
    "train_iters": 1,
}


def config_of(flags: str, world_size: int) -> RunConfig:
    """The tiny model on longer sequences; ``flags`` may change anything."""
    argv = command_line(**RUN, global_batch_size=None) + flags.split()
    return parse_arguments(argv, world_size=world_size)


def trace_all(cases: dict[str, str], world_size: int) -> dict[str, StepTrace]:
    """The trace of each case, by its name: flags after those of the run.

    In another process, as a trace has process groups of its own.
    """
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(_trace_all, cases, world_size).result()


def _trace_all(cases: dict[str, str], world_size: int) -> dict[str, StepTrace]:
    return {
        name: trace_step(config_of(flags, world_size), world_size=world_size)
        for name, flags in cases.items()
    }
