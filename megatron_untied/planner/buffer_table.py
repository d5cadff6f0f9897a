"""The buffers alive in each phase: how large each is, and which buffers share its memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_untied.context_parallel.buffer_plan import Buffer
from megatron_untied.phases import Phase
from megatron_untied.planner.activations import bytes_by_category
from megatron_untied.planner.plan import Plan
from megatron_untied.planner.report import print_line
from megatron_untied.planner.step import MemorySnapshot
from megatron_untied.platform.device import GIB


@dataclass(slots=True)
class BufferUse:
    """A buffer, and the phases in which it is alive."""

    buffer: Buffer
    phases: list[Phase] = field(default_factory=list)


@dataclass(slots=True)
class SharedMemory:
    """One memory, and all buffers that lie in it."""

    uses: list[BufferUse]
    num_bytes: int
    """Of the largest of its buffers."""
    bytes_by_phase: dict[Phase, int]
    """While it is alive: workspace memory stays as large as the largest buffer up to then."""


def shared_memories(
    alive: Iterable[tuple[Phase, Sequence[Buffer]]],
) -> dict[str, SharedMemory]:
    """The memories of a step by name, the largest first, from what is alive in each phase."""
    found: dict[str, dict[str, BufferUse]] = {}
    sizes: dict[str, dict[Phase, int]] = {}
    for phase, buffers in alive:
        for buffer in (buffer for buffer in buffers if buffer.num_bytes):
            use = found.setdefault(buffer.memory, {}).setdefault(buffer.name, BufferUse(buffer))
            if phase not in use.phases:
                use.phases.append(phase)
            if use.buffer.num_bytes < buffer.num_bytes:
                use.buffer = buffer
            in_phase = sizes.setdefault(buffer.memory, {})
            in_phase[phase] = max(in_phase.get(phase, 0), buffer.num_bytes)
    memories = {}
    for name, by_name in found.items():
        # The buffer that the memory is named after comes first.
        sharing = sorted(by_name.values(), key=lambda use: bool(use.buffer.because))
        memories[name] = SharedMemory(sharing, max(sizes[name].values()), sizes[name])
    return dict(sorted(memories.items(), key=lambda item: -item[1].num_bytes))


def fullest_moments(plan: Plan) -> dict[Phase, MemorySnapshot]:
    """For each phase the moment when its buffers take most, on the rank with the highest peak.

    With tiles of weights and activations beside them another moment may be the phase's peak.
    """
    moments: dict[Phase, tuple[int, MemorySnapshot]] = {}
    for snapshot in plan.snapshots:
        num_bytes = bytes_by_category(snapshot.buffers).total()
        if num_bytes > moments.get(snapshot.phase, (0, None))[0]:
            moments[snapshot.phase] = num_bytes, snapshot
    return {phase: snapshot for phase, (_, snapshot) in moments.items()}


def memories_of(plan: Plan) -> dict[str, SharedMemory]:
    """All memories of a step, with what lies in them at the fullest moment of each phase."""
    moments = fullest_moments(plan).items()
    return shared_memories((phase, moment.buffers) for phase, moment in moments)


def print_buffers(plan: Plan, console: Console) -> None:
    """Print a list per phase: a line per memory, with the buffers that share it.

    Numbers in brackets are reasons why memory can be shared; they follow the lists.
    """
    memories, reasons = memories_of(plan), {}
    print_line(console, "buffers alive in each phase, when they take most, in GiB")
    for phase in Phase:
        lines: list[tuple[int, str]] = []
        for name, memory in memories.items():
            if phase in memory.bytes_by_phase:
                used = [use.buffer for use in memory.uses if phase in use.phases]
                line = f"{name}{_sharing(name, used, reasons)}"
                lines.append((memory.bytes_by_phase[phase], line))
        if not lines:
            continue
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
    verb = " = " if owner_is_used else " for "  # else only others use it in this phase
    return verb + ", ".join(groups) if groups else ""


def as_json(plan: Plan) -> list[dict[str, object]]:
    """The memories as data; ``phases`` are those of :class:`.phases.Phase`.

    ``bytes_by_phase`` add up to what the plan counts of these categories in each phase.
    """
    return [
        {
            "memory": name,
            "bytes": memory.num_bytes,
            "bytes_by_phase": {str(phase): n for phase, n in memory.bytes_by_phase.items()},
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
        for name, memory in memories_of(plan).items()
    ]
