"""A small run's flags, traced in a process of its own."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from megatron_untied.cli.arguments import parse_arguments
from megatron_untied.config.run import RunConfig
from megatron_untied.tracing.step import StepTrace, trace_step

MODEL = """
    --num-layers 3 --hidden-size 48 --num-attention-heads 6 --group-query-attention
    --num-query-groups 3 --swiglu --disable-bias-linear --normalization RMSNorm
    --untie-embeddings-and-output-weights --vocab-size 499 --tokenizer-type NullTokenizer
    --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --seq-length 2048 --bf16
"""


def config_of(flags: str, world_size: int) -> RunConfig:
    """The small model, of which ``flags`` may change anything."""
    return parse_arguments((MODEL + flags).split(), world_size=world_size)


def trace_all(cases: dict[str, str], world_size: int) -> dict[str, StepTrace]:
    """The trace of each case, by its name: flags after those of the small model.

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
