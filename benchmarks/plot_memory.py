"""Draw peak memory per GPU against context length: this project, and published methods.

    python benchmarks/plot_memory.py --output docs/pictures/memory.png

Lines and the star of this project are the traced steps of `results/memory.md`. Published methods
are drawn as dashed lines by the buffer rules of `megatron_untied.planner.baselines.py`, with
markers where their authors report a number (`results/published.json`).
"""

import argparse
import json
from pathlib import Path

from matplotlib import pyplot
from matplotlib.axes import Axes

from megatron_untied.cli.arguments import parse_arguments
from megatron_untied.cli.planner_flags import complete
from megatron_untied.planner.baselines import METHODS, Setting

RESULTS = Path(__file__).parent / "results"
MI, GIB = 2**20, 2**30
SUBJECT = "Llama3-8B, 8 ranks"
OURS = {
    "untied, selective": ("this project, one head per rank per chunk", "#2a6f97"),
    "untied, selective, parked": ("this project, --park-during-attention", "#2b9348"),
}
ON_THE_HOST = {
    "Llama3-8B, 8 ranks, optimizer on the host": "8 GPUs, optimizer on the host too",
    "Llama3-8B, 1 GPU, optimizer on the host": "one GPU, optimizer on the host too",
}
PUBLISHED = {
    "Ulysses with tiling": ("Ulysses with tiling (USP + ALST)", "#9a8c98"),
    "untied Ulysses as published": ("Untied Ulysses, published code", "#bc4749"),
}


def traced(markdown: str, subject: str, setting: str) -> dict[int, float]:
    """Peak GiB per GPU by tokens, read from the table of ``subject`` in the results page."""
    section = markdown.split(f"## {subject}\n", 1)[1].split("\n## ", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    header, _, *body = rows
    tokens, settings = header.index("tokens"), header.index("setting")
    peak = next(i for i, name in enumerate(header) if name.startswith("device peak"))
    return {_num_tokens(row[tokens]): float(row[peak]) for row in body if row[settings] == setting}


def _num_tokens(text: str) -> int:
    return int(text[:-1]) * {"K": 1024, "M": MI}[text[-1]]


def _draw_ours(axes: Axes, markdown: str) -> None:
    for setting, (label, color) in OURS.items():
        points = traced(markdown, SUBJECT, setting)
        lengths = [tokens / MI for tokens in points]
        axes.plot(lengths, list(points.values()), "o-", color=color, label=label, lw=2.2, ms=5)
        axes.annotate(
            f"{points[5 * MI]:.1f}",
            (5, points[5 * MI]),
            xytext=(0, -15),
            textcoords="offset points",
            ha="center",
            color=color,
        )


def _draw_on_the_host(axes: Axes, markdown: str) -> None:
    for (subject, label), marker in zip(ON_THE_HOST.items(), ("o-", "*"), strict=True):
        points = traced(markdown, subject, "untied, selective, parked")
        lengths = [tokens / MI for tokens in points]
        axes.plot(lengths, list(points.values()), marker, color="#e07a00", label=label, ms=7)
        for millions, gib in zip(lengths, points.values(), strict=True):
            axes.annotate(
                f"{gib:.1f}",
                (millions, gib),
                xytext=(0, -16),
                textcoords="offset points",
                ha="center",
                color="#e07a00",
            )


def _draw_published(axes: Axes, published: dict) -> None:
    flags = f"--model {published['model']} --seq-length {MI} --bf16".split()
    model = parse_arguments(complete(flags), world_size=1).model
    lengths = [MI // 8, *(m * MI for m in range(1, 11))]
    for method, (label, color) in PUBLISHED.items():
        curve = [
            sum(
                METHODS[method](
                    Setting(model=model, seq_length=n, num_ulysses=published["ranks"])
                ).values()
            )
            / GIB
            for n in lengths
        ]
        axes.plot([n / MI for n in lengths], curve, "--", color=color, label=label, lw=1.6)
        reported = published["series"][label]["points"]
        axes.plot([int(n) / MI for n in reported], list(reported.values()), "s", color=color, ms=6)


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="PNG file to write")
    output = parser.parse_args().output
    figure, axes = pyplot.subplots(figsize=(9, 5.6), layout="constrained")
    _draw_published(axes, json.loads((RESULTS / "published.json").read_text()))
    _draw_ours(axes, (RESULTS / "memory.md").read_text())
    _draw_on_the_host(axes, (RESULTS / "memory.md").read_text())
    for height, card in ((80, "80 GB"), (24, "24 GB")):
        axes.axhline(height, color="black", lw=1)
        axes.annotate(f"GPU of {card}", (0.1, height + 1.5))
    axes.set(
        xlim=(0, 10.3),
        ylim=(0, 100),
        xlabel="context length, millions of tokens (Mi)",
        ylabel="peak memory per GPU, GiB",
        title="One training step of Llama 3 8B on 8 GPUs and on one, fully sharded",
    )
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        frameon=False,
        loc="outside lower center",
        ncols=2,
        title="squares: numbers reported by their authors",
    )
    figure.savefig(output, dpi=140)


if __name__ == "__main__":
    main()
