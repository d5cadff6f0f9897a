"""The buffers of attention by phase: how large each is, and which buffers share its memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_untied.context_parallel.buffer_plan import Buffer
from megatron_untied.phases import Phase
from megatron_untied.planner.activations import memory_plan, plain_buffers
from megatron_untied.planner.machine import GIB
from megatron_untied.planner.plan import Plan, distinct_ranks
from megatron_untied.planner.report import print_line


@dataclass(slots=True)
class BufferUse:
    """A buffer, and the phases in which it is used."""

    buffer: Buffer
    phases: list[Phase] = field(default_factory=list)


@dataclass(slots=True)
class SharedMemory:
    """One memory of the workspace, and all buffers that lie in it."""

    uses: list[BufferUse]
    num_bytes: int
    """Of the largest of its buffers."""


def shared_memories(
    uses: Iterable[tuple[Phase, tuple[Buffer, ...]]],
) -> dict[str, SharedMemory]:
    """The memories of a step by name, the largest first."""
    found: dict[str, dict[str, BufferUse]] = {}
    for phase, buffers in uses:
        for buffer in buffers:
            use = found.setdefault(buffer.memory, {}).setdefault(buffer.name, BufferUse(buffer))
            if phase not in use.phases:
                use.phases.append(phase)
    memories = {}
    for name, by_name in found.items():
        # The buffer that the memory is named after comes first.
        sharing = sorted(by_name.values(), key=lambda use: bool(use.buffer.because))
        memories[name] = SharedMemory(sharing, max(use.buffer.num_bytes for use in sharing))
    return dict(sorted(memories.items(), key=lambda item: -item[1].num_bytes))


def buffers_of_rank(plan: Plan) -> tuple[int, dict[str, SharedMemory]]:
    """The Ulysses rank whose workspace is largest, and its memories."""
    geometry = plan.geometry
    by_rank = {
        rank: shared_memories(
            memory_plan(geometry, rank).uses()
            if geometry.is_streamed
            else plain_buffers(geometry, rank).items()
        )
        for rank in distinct_ranks(geometry)
    }
    return max(
        by_rank.items(), key=lambda item: sum(memory.num_bytes for memory in item[1].values())
    )


def print_buffers(plan: Plan, console: Console) -> None:
    """Print a list per phase: a line per memory, with the buffers that share it.

    Numbers in brackets are reasons why memory can be shared; they follow the lists.
    """
    rank, memories = buffers_of_rank(plan)
    used_in = {phase for memory in memories.values() for use in memory.uses for phase in use.phases}
    reasons: dict[str, int] = {}
    print_line(console, f"buffers of attention, Ulysses rank {rank}, in GiB")
    for phase in (phase for phase in Phase if phase in used_in):
        lines: list[tuple[int, str]] = []
        for name, memory in memories.items():
            used = [use.buffer for use in memory.uses if phase in use.phases]
            if used:
                size = max(buffer.num_bytes for buffer in used)
                lines.append((size, f"{name}{_sharing(name, used, reasons)}"))
        print_line(console, f"{phase}: {sum(size for size, _ in lines) / GIB:.3f}")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(justify="right", width=8)
        grid.add_column()
        for size, text in sorted(lines, key=lambda line: -line[0]):
            grid.add_row(f"{size / GIB:.3f}", Text(text))
        console.print(grid)
    if reasons:
        print_line(console, "memory is shared because")
    for reason, number in reasons.items():
        print_line(console, f"  [{number}] {reason}")


def _sharing(memory: str, buffers: Sequence[Buffer], reasons: dict[str, int]) -> str:
    """The buffers in ``memory`` beside the one it is named after, those of one reason together.

    ``reasons`` numbers them, and takes new ones.
    """
    by_reason: dict[str, list[str]] = {}
    for buffer in buffers:
        if buffer.because:
            by_reason.setdefault(buffer.because, []).append(buffer.name)
    groups = [
        f"{', '.join(names)} [{reasons.setdefault(reason, len(reasons) + 1)}]"
        for reason, names in by_reason.items()
    ]
    owner_is_used = any(buffer.name == memory for buffer in buffers)
    verb = " = " if owner_is_used else " for "  # otherwise only others use it in this phase
    return verb + ", ".join(groups) if groups else ""


def as_json(plan: Plan) -> list[dict[str, object]]:
    """The memories as data; ``phases`` are those of :class:`.phases.Phase`."""
    return [
        {
            "memory": name,
            "bytes": memory.num_bytes,
            "buffers": [
                {
                    "name": use.buffer.name,
                    "bytes": use.buffer.num_bytes,
                    "phases": [str(phase) for phase in use.phases],
                    "shared_because": use.buffer.because,
                }
                for use in memory.uses
            ],
        }
        for name, memory in buffers_of_rank(plan)[1].items()
    ]
