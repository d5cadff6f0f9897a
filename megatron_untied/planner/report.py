"""A plan for people, as tables, and for programs, as JSON."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_untied.config.parameters import TRAIN_ALL
from megatron_untied.phases import MemoryCategory
from megatron_untied.planner.disk import Disk
from megatron_untied.planner.geometry import Bytes
from megatron_untied.planner.machine import DEVICE_RESERVE_GIB, HOST_RESERVE_GIB
from megatron_untied.planner.plan import Plan
from megatron_untied.planner.weights import num_parameters
from megatron_untied.platform.device import GIB


def print_plan(plan: Plan, console: Console) -> None:
    """Print the answer, then memory by phase and category, host memory, time and disk."""
    machine, host, time = plan.machine, plan.host, plan.time
    print_line(console, summary(plan))
    print_line(console, headline(plan))
    if machine.gpu.assumed:
        print_line(console, f"assumed: {machine.gpu.assumed}")

    categories = _categories(snapshot.by_category for snapshot in plan.phases.values())
    cells = {}
    for phase, snapshot in plan.phases.items():
        mark = " <- peak" if phase == plan.peak.phase else ""
        row = [snapshot.num_bytes, *(snapshot.by_category[category] for category in categories)]
        cells[phase + mark] = [_gib(num_bytes) for num_bytes in row]
    title = "GPU, GiB at the highest moment of each phase"
    print_table(console, title, "phase", ["all", *categories], cells)

    rows = {category: host[category] for category in _categories([host])} | {"all": host.total()}
    cells = {name: [_gib(n), _gib(n * machine.gpus_per_node)] for name, n in rows.items()}
    print_table(console, "host, GiB", "category", ["per rank", "per node"], cells)

    cells = {category: [f"{seconds:,.2f}"] for category, seconds in time.by_category.items()}
    cells["all"] = [f"{time.seconds:,.2f}"]
    cells["tokens/s/GPU"] = [f"{time.tokens_per_second_per_gpu:,.1f}"]
    print_table(console, "time of a step, s, by a roofline", "category", ["seconds"], cells)

    if plan.activation_disk is not None:
        print_line(console, plan.activation_disk.describe())
    disk = Disk.of(plan.config, machine.world_size)
    print_line(console, disk.describe())
    if (shortfall := disk.shortfall()) is not None:
        print_line(console, shortfall)
    print_line(
        console,
        f"evaluation without an optimizer (tools/evaluate_context.py): the peak per GPU is "
        f"{plan.evaluation_peak.num_bytes / GIB:.1f} GiB, in {plan.evaluation_peak.phase}",
    )
    print_line(console, verdict(plan))


def summary(plan: Plan) -> str:
    """The answer in one line: whether it fits, where the peak is, how long a step takes."""
    machine, peak = plan.machine, plan.peak
    answer = "this run fits" if plan.fits else "this run does not fit"
    return (
        f"{answer}: the peak per GPU is {peak.num_bytes / GIB:.1f} of "
        f"{machine.device_bytes / GIB:.1f} GiB, in {peak.phase}; host memory per rank is "
        f"{plan.host.total() / GIB:.1f} of {machine.host_bytes / GIB:.1f} GiB; a step takes "
        f"about {plan.time.seconds:,.1f} s"
    )


def headline(plan: Plan) -> str:
    """The model, the ranks and the sequence in one line."""
    config, geometry, machine = plan.config, plan.geometry, plan.machine
    data_parallel = geometry.num_sharding // geometry.num_context
    num_trained = num_parameters(config.model, config.adaptation, trained=True)
    trained = "" if config.adaptation == TRAIN_ALL else f" ({num_trained:,} trained)"
    precision = "bf16" if config.precision.bf16 else "fp32 (--bf16 halves activations)"
    return (
        f"{num_parameters(config.model, config.adaptation):,} parameters{trained} in {precision} "
        f"on {machine.nodes} x {machine.gpus_per_node} {machine.gpu.title}: tensor "
        f"{geometry.num_tensor} x context {geometry.num_context} x data {data_parallel}; "
        f"{config.batch.seq_length:,} tokens, H = {geometry.residual_bytes / GIB:.3f} GiB, "
        f"attention by {geometry.kernel.kind.name}"
    )


def verdict(plan: Plan) -> str:
    """Whether it fits into what the reserves leave, in the terms of the first line."""
    machine, host = plan.machine, plan.host.total() * plan.machine.gpus_per_node / GIB
    reserve = HOST_RESERVE_GIB * machine.gpus_per_node
    answer = "fits" if plan.fits else "does not fit"
    disk, disks = plan.activation_disk, ""
    if disk is not None and not math.isinf(machine.disk_gib):
        disks = f"; disks {disk.node_bytes / GIB:,.1f} of {machine.disk_gib:,.1f} GiB per node"
    return (
        f"{answer}: GPU {plan.peak.num_bytes / GIB:.1f} of {machine.device_bytes / GIB:.1f} GiB "
        f"after {DEVICE_RESERVE_GIB} GiB reserve; host {host:.1f} of "
        f"{machine.host_memory_gib - reserve:.1f} GiB per node after {reserve} GiB reserve{disks}"
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """The whole plan in bytes and seconds. Keys are an interface: programs read them."""
    machine, disk = plan.machine, Disk.of(plan.config, plan.machine.world_size)
    activations = plan.activation_disk
    return {
        "fits": plan.fits,
        "fits_device": plan.fits_device,
        "fits_host": plan.fits_host,
        "parameters": num_parameters(plan.config.model, plan.config.adaptation),
        "seq_length": plan.config.batch.seq_length,
        "heads_per_chunk": plan.config.parallel.heads_per_chunk,
        "attention_kernel": plan.geometry.kernel.kind.name,
        "recompute_granularity": plan.config.memory.recompute_granularity,
        "residual_bytes": plan.geometry.residual_bytes,
        "device": {
            "peak_bytes": plan.peak.num_bytes,
            "peak_phase": plan.peak.phase,
            "limit_bytes": machine.device_bytes,
            "bytes_by_phase": {
                name: _named(peak.by_category) for name, peak in plan.phases.items()
            },
        },
        "evaluation": {
            "peak_bytes": plan.evaluation_peak.num_bytes,
            "peak_phase": plan.evaluation_peak.phase,
        },
        "host": {
            "rank_bytes": plan.host.total(),
            "node_bytes": plan.host.total() * machine.gpus_per_node,
            "rank_limit_bytes": machine.host_bytes,
            "rank_bytes_by_category": _named(plan.host),
        },
        "step": {
            "seconds": plan.time.seconds,
            "seconds_by_category": plan.time.by_category,
            "tokens_per_second_per_gpu": plan.time.tokens_per_second_per_gpu,
            "gpu": machine.gpu.title,
            "source_of_rates": machine.gpu.source,
            "assumed": machine.gpu.assumed,
        },
        "activation_disk": activations
        and {
            "rank_bytes": activations.rank_bytes,
            "node_bytes": activations.node_bytes,
            "written_bytes_per_step": activations.written_bytes,
            "read_bytes_per_step": activations.read_bytes,
            "gb_per_second_per_node": activations.needed_gb_per_second,
            "written_terabytes_per_day_and_disk": activations.written_terabytes_per_day,
        },
        "disk": {
            "checkpoint_bytes": disk.checkpoint_bytes,
            "checkpoints_written": len(disk.saved),
            "checkpoints_kept": disk.num_kept,
            "kept_bytes": disk.num_kept * disk.checkpoint_bytes,
            "most_bytes": disk.peak_bytes,
            "free_bytes": disk.free_bytes(),
        },
    }


def _named(by_category: Bytes) -> dict[str, int]:
    return {str(category): num_bytes for category, num_bytes in by_category.items() if num_bytes}


def _categories(tables: Iterable[Bytes]) -> list[MemoryCategory]:
    """Those with bytes in any of ``tables``, in the order of the enum."""
    largest = Bytes()
    for by_category in tables:
        largest |= by_category
    return [category for category in MemoryCategory if largest[category]]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f}" if num_bytes else ""


_BORDER = 3
"""Characters between two columns: the line and a space on each side of it."""
_LABEL_PART = 3
"""A label is folded where it would take more than one part in so many of the width."""


def print_table(
    console: Console, title: str, label: str, columns: Sequence[str], rows: Mapping[str, Sequence]
) -> None:
    """Print ``rows``, by label one cell for each of ``columns``, as wide as ``console`` is.

    Columns that do not fit beside each other follow below in a table of their own, with the labels
    repeated. A cell is never cut or folded; labels and headers are folded between words.
    """
    cells = {name: [str(cell) for cell in row] for name, row in rows.items()}
    longest_word = {
        text: max(map(len, text.split()), default=0) for text in (label, *columns, *cells)
    }
    numbers = [max(map(len, column)) for column in zip(*cells.values(), strict=True)]
    labels = [label, *cells]
    label_width = min(
        max(map(len, labels)),
        max(console.width // _LABEL_PART, *(longest_word[text] for text in labels)),
    )
    room = console.width - label_width - _BORDER - 1
    for width_of in (len, longest_word.get):  # headers are folded only where there is no room
        widths = list(map(max, map(width_of, columns), numbers))
        groups = _side_by_side(widths, room)
        if len(groups) == 1:
            break
    for number, group in enumerate(groups):
        part = f" ({number + 1} of {len(groups)})" if len(groups) > 1 else ""
        whole = label_width + sum(widths[place] + _BORDER for place in group) + _BORDER + 1
        table = Table(title=title + part, title_justify="left", width=whole)
        table.add_column(label, width=label_width)
        for place in group:
            table.add_column(columns[place], justify="right", width=widths[place])
        for name, row in cells.items():
            table.add_row(Text(name), *(Text(row[place]) for place in group))
        # On a console that is narrower than two columns a line is too long rather than cut.
        console.print(table, crop=False)


def print_line(console: Console, line: str) -> None:
    """Print one line as it is: a terminal wraps it, and a log keeps it whole."""
    console.print(line, soft_wrap=True, markup=False)


def _side_by_side(widths: Sequence[int], room: int) -> list[list[int]]:
    """Places of columns in groups of at most ``room`` characters; at least one in each."""
    groups: list[list[int]] = [[]]
    taken = 0
    for place, width in enumerate(widths):
        if groups[-1] and taken + width + _BORDER > room:
            groups.append([])
            taken = 0
        groups[-1].append(place)
        taken += width + _BORDER
    return groups
