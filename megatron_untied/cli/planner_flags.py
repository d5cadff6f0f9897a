"""The command line of the planner: training flags, and flags that describe the machine.

Training flags are parsed and checked as in training. Flags that training requires but memory does
not depend on, such as the learning rate, have defaults here.
"""

import argparse
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_untied.checkpoint.run_config import read_model_config
from megatron_untied.cli.arguments import FlagParser, parse_arguments, parse_flags
from megatron_untied.cli.flag_values import count, real
from megatron_untied.cli.validate import problems
from megatron_untied.config.flag_names import flag_of, value_name
from megatron_untied.config.run import RunConfig
from megatron_untied.planner.automatic import legal_chunks
from megatron_untied.planner.machine import (
    DEFAULT_GPU,
    DEVICE_RESERVE_GIB,
    DISK_GB_PER_SECOND,
    Gpu,
    GpuRates,
    Machine,
    read_gpus,
    unlisted_gpu,
)

ASSUMED_FLAGS = {
    "micro_batch_size": ["--micro-batch-size", "1"],
    "train_iters": ["--train-iters", "1"],
    "lr": ["--lr", "1e-4"],
    "tokenizer_type": ["--tokenizer-type", "NullTokenizer"],
}
"""Flags that training requires and memory does not depend on, by name of their value."""

ASSUMED_VOCAB_SIZE = "128255"
"""--vocab-size if it, a preset and a tokenizer are all missing: Llama 3's, without one token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """A run to plan, the machine to plan for, and the reports to make."""

    config: RunConfig
    machine: Machine
    training: tuple[str, ...]
    """Training flags, including those that were assumed."""
    other_ranks: tuple[RunConfig, ...] = ()
    """The same run with other parallel sizes, if the flags do not give them."""
    more_context_ranks: tuple[tuple[str, RunConfig], ...] = ()
    """Flags, and the same run with them: every larger context-parallel size, smallest first."""
    assumed_length: bool
    """No --seq-length was given, so only the search for the longest context is reported."""
    max_context: bool
    """Search the longest context."""
    tune: bool
    """List the fastest plans that fit."""
    compare: bool
    """Compare with published methods."""
    buffers: bool
    """List all buffers."""
    json: str | None
    """File for the plan as JSON; "-" for stdout."""
    plot: str | None
    """File for the picture."""


def parse_plan_request(argv: Sequence[str], description: str | None = None) -> PlanRequest:
    """Parse the command line of the planner.

    Args:
        argv: without the program's name.
        description: for --help.

    Raises:
        ValueError: as ``parse_arguments`` does.
    """
    # Unknown flags are those of training, which parse_flags checks.
    own, training = planner_parser(description).parse_known_args(argv)
    machine = machine_of(own)
    words, given = complete(training), parse_flags(training)
    if own.max_context and "seq_length_schedule" in given:
        raise ValueError(
            "--max-context searches one length, and --seq-length-schedule has several; leave out "
            "one of them"
        )
    if own.tune:
        for name in ("heads_per_chunk", "recompute_granularity"):
            words += [] if name in given else [flag_of(name), "auto"]
    assumed_length = own.max_context and "seq_length" not in given
    if assumed_length:
        # Divisible over all ranks at every split; the search replaces it.
        shortest = 2 * machine.world_size * given.get("tensor_model_parallel_size", 1)
        words += ["--seq-length", str(shortest)]
    config = parse_arguments(words, world_size=machine.world_size, leaves_sizes=True)
    larger = tuple(_more_context_ranks(config, given, machine))
    other_ranks: tuple[RunConfig, ...] = ()
    if own.max_context and "context_parallel_size" not in given:
        ranks = machine.world_size // config.parallel.tensor_model_parallel_size
        other_ranks = tuple(
            each for _, each in larger if each.parallel.context_parallel_size == ranks
        )
    return PlanRequest(
        config=config,
        machine=machine,
        training=tuple(words),
        other_ranks=other_ranks,
        more_context_ranks=larger,
        assumed_length=assumed_length,
        max_context=own.max_context,
        tune=own.tune,
        compare=own.compare,
        buffers=own.buffers,
        json=own.json,
        plot=own.plot,
    )


def _more_context_ranks(
    config: RunConfig, given: Mapping[str, Any], machine: Machine
) -> Iterator[tuple[str, RunConfig]]:
    """Flags and runs of all valid context-parallel sizes above that of ``config``, ascending.

    Ranks of several nodes share a sequence as one Ulysses group, and also as a ring of nodes.
    """
    if given.keys() & {"cp_comm_type", "hierarchical_context_parallel_sizes"}:
        return
    t, batch = config.parallel.tensor_model_parallel_size, config.batch
    ranks, per_node = machine.world_size // t, machine.gpus_per_node // t
    for p in range(config.parallel.context_parallel_size + 1, ranks + 1):
        if ranks % p:
            continue
        sizes = [("a2a", None)]
        # A window needs whole sequences on each rank, so it excludes a ring.
        if per_node and p > per_node and p % per_node == 0 and config.model.window_size is None:
            sizes.append(("a2a+p2p", (per_node, p // per_node)))
        for comm_type, hierarchical in sizes:
            flags = f"--context-parallel-size {p}"
            if hierarchical is not None:
                flags += f" --cp-comm-type {comm_type} --hierarchical-context-parallel-sizes "
                flags += " ".join(map(str, hierarchical))
            shared = replace(
                config.parallel,
                context_parallel_size=p,
                cp_comm_type=comm_type,
                hierarchical_context_parallel_sizes=hierarchical,
            )
            # By default a step has one micro-batch on each data-parallel rank.
            samples = given.get("global_batch_size") or batch.micro_batch_size * (ranks // p)
            larger = replace(
                config, parallel=shared, batch=replace(batch, global_batch_size=samples)
            )
            u = shared.heads_per_chunk
            if u not in ("all", "auto") and u not in legal_chunks(larger):
                flags += " --cp-heads-per-chunk auto"
                larger = replace(larger, parallel=replace(shared, heads_per_chunk="auto"))
            if not any(problems(larger, machine.world_size)):  # such as an indivisible length
                yield flags, larger


def complete(training: Sequence[str]) -> list[str]:
    """Complete the flags ``training`` with those that memory does not depend on."""
    given = parse_flags(training)
    # How long the stages of a schedule are decides between automatic settings: not assumed.
    known = given.keys() | ({"train_iters"} if "seq_length_schedule" in given else set())
    words = [word for name, flag in ASSUMED_FLAGS.items() if name not in known for word in flag]
    if not given.keys() & {"data_path", "mock_data", "sft"}:
        words.append("--mock-data")  # token files need not be on this machine
    null = given.get("tokenizer_type", "NullTokenizer") == "NullTokenizer"
    if null and not given.keys() & {"vocab_size", "model"}:
        vocab_size = ASSUMED_VOCAB_SIZE
        if given.keys() >= {"use_checkpoint_args", "load"}:
            stored = read_model_config(given["load"], given.get("ckpt_step"))
            vocab_size = str(stored.vocab_size - 1)  # one more is the end of document
        words += ["--vocab-size", vocab_size]
    return [*words, *training]


def planner_parser(description: str | None = None) -> argparse.ArgumentParser:
    """A parser of the flags that training does not have."""
    built = FlagParser(
        usage="%(prog)s [PLANNER FLAGS] TRAINING FLAGS",
        allow_abbrev=False,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Training flags: python pretrain_gpt.py --help",
    )
    add_machine_flags(built)
    built.add_argument(
        "--max-context",
        action="store_true",
        help="also find the longest context that fits, with these flags and with the best ones; "
        "--seq-length may be left out",
    )
    built.add_argument(
        "--tune",
        action="store_true",
        help="leave chunks of heads and recomputation to the planner unless they are given, and "
        "list the fastest plans that fit with their times",
    )
    built.add_argument("--compare", action="store_true", help="also estimate published methods")
    built.add_argument(
        "--buffers",
        action="store_true",
        help="also list every planned buffer: size, phases, what shares its memory",
    )
    built.add_argument(
        "--json",
        metavar="FILE",
        help="write the plan as JSON; - writes it to stdout instead of the tables",
    )
    built.add_argument("--plot", metavar="FILE.png", help="plot memory over the phases of a step")
    return built


_MEMORY, _HOST, _NODE_LINK, _NETWORK = (
    "--gpu-memory-gib",
    "--host-memory-gib",
    "--gpu-node-link-gb-per-second",
    "--gpu-network-gb-per-second",
)
_GPU_FLAGS = {
    _MEMORY: ("memory_gib", "GiB", "memory of one GPU"),
    "--gpu-tflops": ("bf16_tflops", "TFLOP/s", "peak bf16 TFLOP/s without sparsity"),
    "--gpu-bandwidth-gb-per-second": ("memory_gb_per_second", "GB/s of memory", "memory bandwidth"),
    "--gpu-host-link-gb-per-second": (
        "pcie_gb_per_second",
        "GB/s to the host",
        "host link, one direction",
    ),
    _NODE_LINK: (
        "nvlink_gb_per_second",
        "GB/s to other GPUs of the node",
        "link to the GPUs of the node, one direction; for a GPU not in the list: the host link's",
    ),
    _NETWORK: ("network_gb_per_second", "GB/s to other nodes", "network per GPU, one direction"),
}
"""By flag: the field of a Gpu, its unit, and its description."""


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that :func:`machine_of` reads."""
    group = parser.add_argument_group(
        "machine",
        textwrap.fill(
            "A GPU that is not in the list can have any name, if flags describe it: "
            f"{' '.join(_needed(nodes=1))}, and {_NETWORK} for several nodes.",
            width=78,
            break_on_hyphens=False,
        ),
    )
    group.add_argument("--gpus-per-node", type=count, default=8, help="ranks per node (8)")
    group.add_argument("--nodes", type=count, default=1, help="number of equal nodes (1)")
    group.add_argument(
        "--gpu",
        metavar="NAME",
        default=DEFAULT_GPU,
        help=f"one of {', '.join(sorted(read_gpus()))}, or any name ({DEFAULT_GPU})",
    )
    for flag, (_, unit, described) in _GPU_FLAGS.items():
        # Less than the reserve would leave nothing to plan with.
        least = DEVICE_RESERVE_GIB + 1.0 if flag == _MEMORY else 0.001
        number = unit.split()[0]
        group.add_argument(
            flag, type=real(least, 1e6), metavar=number, help=f"{described} (that of --gpu)"
        )
    group.add_argument(
        _HOST,
        type=real(1.0, 1e6),
        metavar="GiB",
        help="host memory of a node (that of nodes with --gpu)",
    )
    group.add_argument(
        "--disk-gib",
        type=real(0.0, 1e9),
        default=math.inf,
        metavar="GiB",
        help="free space of a node in the folders of --activation-disk (no limit)",
    )
    group.add_argument(
        "--disk-gb-per-second",
        type=real(0.001, 1e6),
        default=DISK_GB_PER_SECOND,
        metavar="GB/s",
        help=f"what one of these folders is written and read with ({DISK_GB_PER_SECOND:g})",
    )


def machine_of(own: argparse.Namespace) -> Machine:
    """The machine that the flags describe.

    Raises:
        ValueError: the GPU is neither in the list nor completely described.
    """
    given = {
        field: getattr(own, value_name(flag))
        for flag, (field, _, _) in _GPU_FLAGS.items()
        if getattr(own, value_name(flag)) is not None
    }
    # An unknown name is never planned as another GPU: its rates have to be given.
    listed = read_gpus().get(own.gpu)
    gpu = _described(own, given) if listed is None else _changed(listed, given)
    return Machine(
        gpus_per_node=own.gpus_per_node,
        nodes=own.nodes,
        gpu=gpu,
        gpu_memory_gib=gpu.memory_gib,
        host_memory_gib=own.host_memory_gib or gpu.host_memory_gib,
        disk_gib=own.disk_gib,
        disk_gb_per_second=own.disk_gb_per_second,
    )


def _changed(listed: Gpu, given: dict[str, float]) -> Gpu:
    """A listed GPU with some values replaced, which its title and source name."""
    units = {field: unit for field, unit, _ in _GPU_FLAGS.values()}
    changes = [
        f"{value:g} {units[field]}"
        for field, value in given.items()
        if value != getattr(listed, field)  # repeated values leave the title as it is
    ]
    if not changes:
        return listed
    source = f"{listed.source}; by flags: {', '.join(changes)}"
    return replace(
        listed, **given, title=f"{listed.title} with {', '.join(changes)}", source=source
    )


def _described(own: argparse.Namespace, given: dict[str, float]) -> Gpu:
    values = {flag: getattr(own, value_name(flag)) for flag in _needed(own.nodes)}
    missing = [flag for flag, value in values.items() if value is None]
    if missing:
        raise ValueError(
            f"--gpu {own.gpu} is not one of {', '.join(sorted(read_gpus()))}; to plan for another "
            f"GPU, describe it: {' '.join(missing)} missing"
        )
    link, assumed = given["pcie_gb_per_second"], []
    # Cards without NVLink reach each other over PCIe.
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
    """Flags that are required for a GPU that is not in the list."""
    optional = {_NODE_LINK} if nodes > 1 else {_NODE_LINK, _NETWORK}
    return [flag for flag in (*_GPU_FLAGS, _HOST) if flag not in optional]
