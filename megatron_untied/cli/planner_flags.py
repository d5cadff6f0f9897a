"""The command line of a planner: the flags of training, and those that say on what it would run."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_untied.checkpoint.run_config import read_model_config
from megatron_untied.cli.arguments import parse_arguments, parse_flags
from megatron_untied.cli.flag_values import count, real
from megatron_untied.config.run import RunConfig
from megatron_untied.planner.machine import (
    DEFAULT_GPU,
    DEVICE_RESERVE_GIB,
    Gpu,
    GpuRates,
    Machine,
    read_gpus,
    unlisted_gpu,
)

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
class PlanRequest:
    """A run and a machine to plan, and what to report."""

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


def parse_plan_request(argv: Sequence[str], description: str | None = None) -> PlanRequest:
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
    return PlanRequest(
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


_MEMORY, _HOST, _NODE_LINK, _NETWORK = (
    "--gpu-memory-gib",
    "--host-memory-gib",
    "--gpu-node-link-gb-per-second",
    "--gpu-network-gb-per-second",
)
_GPU_FLAGS = {
    _MEMORY: ("memory_gib", "GiB", "memory of one GPU"),
    "--gpu-tflops": ("bf16_tflops", "TFLOP/s", "its peak in bf16, dense"),
    "--gpu-bandwidth-gb-per-second": ("memory_gb_per_second", "GB/s of memory", "of its memory"),
    "--gpu-host-link-gb-per-second": ("pcie_gb_per_second", "GB/s to the host", "one direction"),
    _NODE_LINK: (
        "nvlink_gb_per_second",
        "GB/s to other GPUs of the node",
        "one direction; for a GPU not in the list: the host link's",
    ),
    _NETWORK: ("network_gb_per_second", "GB/s to other nodes", "one direction, for each GPU"),
}
"""By flag: the field of a Gpu, its unit, and what it is."""


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that :func:`machine_of` reads."""
    group = parser.add_argument_group(
        "machine",
        "A GPU that is not in the list is planned for under any name, if flags describe it: "
        f"{' '.join(_needed(nodes=1))}, and {_NETWORK} for several nodes.",
    )
    group.add_argument("--gpus-per-node", type=count, default=8, help="ranks of a node (8)")
    group.add_argument("--nodes", type=count, default=1, help="nodes of equal GPUs (1)")
    group.add_argument(
        "--gpu",
        metavar="NAME",
        default=DEFAULT_GPU,
        help=f"one of {', '.join(sorted(read_gpus()))}, or a name of yours ({DEFAULT_GPU})",
    )
    for flag, (_, unit, described) in _GPU_FLAGS.items():
        least = DEVICE_RESERVE_GIB + 1.0 if flag == _MEMORY else 0.001
        number = unit.split()[0]
        group.add_argument(
            flag, type=real(least, 1e6), metavar=number, help=f"{described} (as --gpu)"
        )
    group.add_argument(
        _HOST,
        type=real(1.0, 1e6),
        metavar="GiB",
        help="memory of one node (as nodes of --gpu have)",
    )


def machine_of(own: argparse.Namespace) -> Machine:
    """The nodes that the flags describe.

    Raises:
        ValueError: a GPU that is not in the list and not described in full.
    """
    given = {
        field: getattr(own, _value_name(flag))
        for flag, (field, _, _) in _GPU_FLAGS.items()
        if getattr(own, _value_name(flag)) is not None
    }
    listed = read_gpus().get(own.gpu)
    gpu = _described(own, given) if listed is None else _changed(listed, given)
    return Machine(
        gpus_per_node=own.gpus_per_node,
        nodes=own.nodes,
        gpu=gpu,
        gpu_memory_gib=gpu.memory_gib,
        host_memory_gib=own.host_memory_gib or gpu.host_memory_gib,
    )


def _changed(listed: Gpu, given: dict[str, float]) -> Gpu:
    """A GPU of the list with values of its own; its title and source say which."""
    units = {field: unit for field, unit, _ in _GPU_FLAGS.values()}
    changes = [
        f"{value:g} {units[field]}"
        for field, value in given.items()
        if value != getattr(listed, field)
    ]
    if not changes:
        return listed
    told = f"with {', '.join(changes)}"
    source = f"{listed.source}; by flags: {', '.join(changes)}"
    return replace(listed, **given, title=f"{listed.title} {told}", source=source)


def _described(own: argparse.Namespace, given: dict[str, float]) -> Gpu:
    values = {flag: getattr(own, _value_name(flag)) for flag in _needed(own.nodes)}
    missing = [flag for flag, value in values.items() if value is None]
    if missing:
        raise ValueError(
            f"--gpu {own.gpu} is none of {', '.join(sorted(read_gpus()))}; to plan for another "
            f"GPU, describe it: {' '.join(missing)} missing"
        )
    link, assumed = given["pcie_gb_per_second"], []
    if "nvlink_gb_per_second" not in given and own.gpus_per_node > 1:
        assumed.append(f"{link:g} GB/s to other GPUs of the node, as to the host ({_NODE_LINK})")
    links = {"nvlink_gb_per_second": link, "network_gb_per_second": link}  # one node has no network
    return unlisted_gpu(
        own.gpu,
        GpuRates(**links | given),
        host_memory_gib=own.host_memory_gib,
        source="flags",
        assumed="; ".join(assumed),
    )


def _needed(nodes: int) -> list[str]:
    """Flags without which a GPU that is not in the list cannot be planned for."""
    optional = {_NODE_LINK} if nodes > 1 else {_NODE_LINK, _NETWORK}
    return [flag for flag in (*_GPU_FLAGS, _HOST) if flag not in optional]


def _value_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
