"""The planner's flags that say on what a run would run: nodes, GPUs in the list, any other GPU."""

import argparse
from dataclasses import replace

from megatron_untied.planner.machine import (
    DEFAULT_GPU,
    DEVICE_RESERVE_GIB,
    Gpu,
    Machine,
    described_gpu,
    read_gpus,
)
from megatron_untied.training.flag_values import count, real

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
    return described_gpu(
        own.gpu,
        **links | given,
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
