"""The table of buffers: how large each is, when it is used, and what it shares its memory with."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from megatron_untied.context_parallel.buffer_plan import Buffer
from megatron_untied.phases import Phase
from megatron_untied.planner.activations import PlainActivations, memory_plan
from megatron_untied.planner.machine import GIB
from megatron_untied.planner.plan import Plan, unlike_ranks


@dataclass(slots=True)
class BufferUse:
    """A buffer, and the phases in which it is used."""

    buffer: Buffer
    phases: list[Phase] = field(default_factory=list)


@dataclass(slots=True)
class SharedMemory:
    """Memory of the workspace, and all buffers that lie in it."""

    uses: list[BufferUse]

    @property
    def num_bytes(self) -> int:
        """Of the largest of its buffers."""
        return max(use.buffer.num_bytes for use in self.uses)


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
    memories = {
        # The buffer that the memory is named after comes first.
        name: SharedMemory(sorted(each.values(), key=lambda use: bool(use.buffer.because)))
        for name, each in found.items()
    }
    return dict(sorted(memories.items(), key=lambda item: -item[1].num_bytes))


def buffers_of_rank(plan: Plan) -> tuple[int, dict[str, SharedMemory]]:
    """The Ulysses rank whose workspace is largest, and its memories."""

    def memories(rank: int) -> dict[str, SharedMemory]:
        if plan.config.memory.recompute_granularity is None:
            return shared_memories(PlainActivations(plan.geometry, rank).uses())
        return shared_memories(memory_plan(plan.geometry, rank).uses())

    by_rank = {rank: memories(rank) for rank in unlike_ranks(plan.geometry)}
    return max(by_rank.items(), key=lambda item: sum(x.num_bytes for x in item[1].values()))


def print_buffers(plan: Plan, console: Console) -> None:
    """Print the table."""
    rank, memories = buffers_of_rank(plan)
    table = Table(
        "memory", "GiB", "used as", "in", "shared, because",
        title=f"Buffers of attention, Ulysses rank {rank}",
    )  # fmt: skip
    for name, memory in memories.items():
        for use in memory.uses:
            is_first = use is memory.uses[0]
            table.add_row(
                name if is_first else "",
                f"{memory.num_bytes / GIB:.3f}" if is_first else "",
                use.buffer.name,
                ", ".join(use.phases),
                use.buffer.because,
            )
    console.print(table)


def as_json(plan: Plan) -> list[dict[str, object]]:
    """The table as data."""
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
