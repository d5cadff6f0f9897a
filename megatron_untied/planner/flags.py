"""The command line of a planner: the flags of training, and those that say on what it would run."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_untied.checkpoint.run_config import read_model_config
from megatron_untied.planner.machine import DEFAULT_GPU, DEFAULT_HOST_GIB, Machine, read_gpus
from megatron_untied.training.arguments import parse_arguments, parse_flags
from megatron_untied.training.config import RunConfig
from megatron_untied.training.flag_values import count, real

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
    gpu = read_gpus()[own.gpu]
    machine = Machine(
        gpus_per_node=own.gpus_per_node,
        nodes=own.nodes,
        gpu=gpu,
        gpu_memory_gib=own.gpu_memory_gib or gpu.memory_gib,
        host_memory_gib=own.host_memory_gib,
    )
    config = parse_arguments(complete(training), world_size=machine.world_size)
    said = {
        "max_context": own.max_context,
        "compare": own.compare,
        "buffers": own.buffers,
        "json": own.json,
        "plot": own.plot,
    }
    return Question(config=config, machine=machine, **said)


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
    built.add_argument("--gpus-per-node", type=count, default=8, help="ranks of a node (8)")
    built.add_argument("--nodes", type=count, default=1, help="(1)")
    built.add_argument(
        "--gpu", choices=sorted(read_gpus()), default=DEFAULT_GPU, help=f"({DEFAULT_GPU})"
    )
    built.add_argument("--gpu-memory-gib", type=real(5.0, 1e6), help="of one GPU (as --gpu has)")
    built.add_argument(
        "--host-memory-gib",
        type=real(1.0, 1e6),
        default=float(DEFAULT_HOST_GIB),
        help=f"of one node ({DEFAULT_HOST_GIB})",
    )
    built.add_argument(
        "--max-context", action="store_true", help="also the longest sequence that fits"
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
