"""The command line of a planner: the flags of training, and those that say on what it would run."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_untied.checkpoint.run_config import read_model_config
from megatron_untied.planner.machine import Machine
from megatron_untied.planner.machine_flags import add_machine_flags, machine_of
from megatron_untied.training.arguments import parse_arguments, parse_flags
from megatron_untied.training.config import RunConfig

ASSUMED = {
    "micro_batch_size": ["--micro-batch-size", "1"],
    "train_iters": ["--train-iters", "1"],
    "lr": ["--lr", "1e-4"],
    "tokenizer_type": ["--tokenizer-type", "NullTokenizer"],
}
"""What training insists on and memory does not depend on."""
ASSUMED_TOKENS = "128255"
"""--vocab-size, if neither it nor a preset nor a tokenizer says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is to be planned, and what is to be said of it."""

    config: RunConfig
    machine: Machine
    training: tuple[str, ...]
    """Flags of training, with what was assumed."""
    other_ranks: tuple[RunConfig, ...] = ()
    """The same run with other ways to split the ranks, where the flags leave that open."""
    assumed_length: bool
    """No length was given: it is to be found."""
    max_context: bool
    compare: bool
    buffers: bool
    json: str | None
    plot: str | None


def parse_question(argv: Sequence[str], description: str | None = None) -> Question:
    """The run and the machine that ``argv`` describes; ``description`` is for --help.

    Raises:
        ValueError: as ``parse_arguments`` does.
    """
    own, training = own_parser(description).parse_known_args(argv)
    machine = machine_of(own)
    words, given = complete(training), parse_flags(training)
    assumed_length = own.max_context and "seq_length" not in given
    if assumed_length:
        words += ["--seq-length", str(_shortest(given, machine))]
    other_ranks = ()
    if own.max_context and "context_parallel_size" not in given:
        splits = _splits(given, machine)
        other_ranks = tuple(
            parse_arguments([*words, *split], world_size=machine.world_size) for split in splits
        )
    return Question(
        config=parse_arguments(words, world_size=machine.world_size),
        machine=machine,
        training=tuple(words),
        other_ranks=other_ranks,
        assumed_length=assumed_length,
        max_context=own.max_context,
        compare=own.compare,
        buffers=own.buffers,
        json=own.json,
        plot=own.plot,
    )


def _shortest(given: Mapping[str, Any], machine: Machine) -> int:
    """A length that divides over all ranks, however they are split."""
    return 2 * machine.world_size * given.get("tensor_model_parallel_size", 1)


def _splits(given: Mapping[str, Any], machine: Machine) -> Iterator[list[str]]:
    """Flags that let all ranks share one sequence: over all nodes, and by a ring of nodes."""
    t = given.get("tensor_model_parallel_size", 1)
    p, per_node = machine.world_size // t, machine.gpus_per_node // t
    if p == 1 or given.keys() & {"cp_comm_type", "hierarchical_context_parallel_sizes"}:
        return
    shared = ["--context-parallel-size", str(p)]
    yield shared
    if machine.nodes > 1 and per_node * machine.nodes == p and not given.get("window_size"):
        sizes = ["--hierarchical-context-parallel-sizes", str(per_node), str(machine.nodes)]
        yield [*shared, "--cp-comm-type", "a2a+p2p", *sizes]


def complete(training: Sequence[str]) -> list[str]:
    """``training`` and before it what it need not say: what memory does not depend on."""
    given = parse_flags(training)
    words = [word for name, flag in ASSUMED.items() if name not in given for word in flag]
    if "data_path" not in given and "mock_data" not in given:
        words.append("--mock-data")
    null = given.get("tokenizer_type", "NullTokenizer") == "NullTokenizer"
    if null and not given.keys() & {"vocab_size", "model"}:
        words += ["--vocab-size", _assumed_tokens(given)]
    return [*words, *training]


def _assumed_tokens(given: Mapping[str, Any]) -> str:
    if not given.keys() >= {"use_checkpoint_args", "load"}:
        return ASSUMED_TOKENS
    stored = read_model_config(given["load"], given.get("ckpt_step"))
    return str(stored.vocab_size - 1)  # the end of document is one more


def own_parser(description: str | None = None) -> argparse.ArgumentParser:
    """A parser of what training has no flags for."""
    built = _Parser(
        usage="%(prog)s [these] FLAGS OF TRAINING",
        allow_abbrev=False,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Flags of training: python pretrain_gpt.py --help",
    )
    add_machine_flags(built)
    built.add_argument(
        "--max-context",
        action="store_true",
        help="also the longest context that fits, with these flags and with the best ones; needs "
        "no --seq-length",
    )
    built.add_argument(
        "--compare", action="store_true", help="also what published methods would take"
    )
    built.add_argument(
        "--buffers", action="store_true", help="also every buffer: size, phases, what it shares"
    )
    built.add_argument("--json", metavar="FILE", help="write the plan as JSON; - is stdout, alone")
    built.add_argument("--plot", metavar="FILE.png", help="draw memory over the phases of a step")
    return built


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ValueError(message)
