"""Draw the heads of each rank in each chunk, and when keys and values are exchanged.

    python tools/plot_schedule.py --heads 32 --kv-heads 8 --ranks 8 --heads-per-chunk 8

A row is a rank, a column a chunk, and a color a key-value head.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot: nodes have no display

from matplotlib import pyplot

from megatron_untied.cli.flag_values import count
from megatron_untied.commands import documentation
from megatron_untied.context_parallel.head_schedule import (
    ChunkAssignment,
    HeadSchedule,
    head_schedule,
)


def span(heads: range) -> str:
    """Such as 3 or 3-5: heads of a chunk are consecutive."""
    return f"{heads[0]}" if len(heads) == 1 else f"{heads[0]}-{heads[-1]}"


def words(assignment: ChunkAssignment) -> str:
    """The text in the cell of one rank and chunk."""
    lines = [f"q {span(assignment.query_heads)}" if assignment.query_heads else "idle"]
    if assignment.kv_to_load:
        lines.append(f"k, v {span(assignment.kv_to_load)} arrive")
    if assignment.kv_finished:
        lines.append(f"dk, dv {span(assignment.kv_finished)} leave")
    return "\n".join(lines)


def draw(schedule: HeadSchedule):
    """A figure with a row for each rank and a column for each chunk; a color is a kv head."""
    num_chunks, num_ranks = len(schedule.chunks), len(schedule.chunks[0])
    size = 1.5 + 1.7 * num_chunks, 0.8 + 0.62 * num_ranks
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    colors = pyplot.get_cmap("Pastel1")
    for chunk, assignments in enumerate(schedule.chunks):
        for rank, assignment in enumerate(assignments):
            # Pastel1 has nine colors; white is a rank without a head in this chunk.
            color = colors(assignment.kv_heads[0] % 9) if assignment.query_heads else "white"
            axes.add_patch(pyplot.Rectangle((chunk, rank), 1, 1, facecolor=color, edgecolor="gray"))
            axes.text(
                chunk + 0.5,
                rank + 0.5,
                words(assignment),
                ha="center",
                va="center",
                fontsize="small",
            )
    # Rank 0 is at the top, as the first row of a table.
    axes.set(xlim=(0, num_chunks), ylim=(num_ranks, 0), xlabel="chunk", ylabel="rank")
    axes.set_xticks([chunk + 0.5 for chunk in range(num_chunks)], range(num_chunks))
    axes.set_yticks([rank + 0.5 for rank in range(num_ranks)], range(num_ranks))
    return figure


def main(argv: list[str] | None = None) -> None:
    """Schedule, draw, save."""
    parser = argparse.ArgumentParser(
        description=documentation(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=count, required=True, help="query heads")
    parser.add_argument("--kv-heads", type=count, required=True, help="key-value heads")
    parser.add_argument("--ranks", type=count, required=True, help="Ulysses ranks")
    parser.add_argument(
        "--heads-per-chunk", type=count, required=True, help="query heads per chunk, over all ranks"
    )
    parser.add_argument("--output", type=Path, default=Path("schedule.png"), help="image")
    flags = parser.parse_args(argv)
    try:
        schedule = head_schedule(flags.heads, flags.kv_heads, flags.ranks, flags.heads_per_chunk)
        flags.output.parent.mkdir(parents=True, exist_ok=True)
        draw(schedule).savefig(flags.output, dpi=110)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"wrote {flags.output}")
