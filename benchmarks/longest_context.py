r"""The longest context by GPU and host memory, planned: table, picture, and rows of the README.

    python benchmarks/longest_context.py

Full training of Llama 3 8B on one and on eight GPUs, all weights, every option searched that
changes no result, with the optimizer on the host. Every cell is the answer of `plan_memory.py
--max-context`; all of them take some minutes of one core.
"""

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from matplotlib import pyplot
from rich.progress import track

from megatron_untied.cli.context_flags import context_flags
from megatron_untied.cli.planner_flags import parse_plan_request
from megatron_untied.planner.machine import DISK_GB_PER_SECOND
from megatron_untied.planner.plan import Plan
from megatron_untied.planner.search import longest_context
from megatron_untied.platform.device import GIB

HERE = Path(__file__).parent
MI = 2**20
RANKS = (1, 8)
GPUS = {
    "16 GB": "rtx-4080",
    "24 GB": "rtx-4090",
    "48 GB": "rtx-6000-ada",
    "80 GB": "h100-80",
    "141 GB": "h200",
    "192 GB": "b200",
}
"""Of B200's 192 GB its data sheet counts 180, and CUDA gives programs 178 GiB."""
DISK_BYTES, NUM_DISKS = 16e12, 4
HOSTS = {
    "256 GiB": (256, False),
    "1 TiB": (1024, False),
    "2 TiB": (2048, False),
    "2 TiB and 16 TB of NVMe": (2048, True),
}
"""GiB of a node, and whether it has disks."""
RUN = "--model llama3-8b --bf16 --use-torch-fsdp2 --optimizer-cpu-offload --max-context"
PREFACE = """\
# The longest context, planned

Full training of Llama 3 8B on one sample, all weights, optimizer on the host: Mi tokens by GPUs and
host memory of a node, and the time of a step by the planner's roofline. Nothing of this was
measured on a GPU. With NVMe, {disks} drives of {rate:g} GB/s hold saved activations.
GPUs: {cards}.
`longest_context.json` has flags, bytes and limit of every cell. `benchmarks/longest_context.py`
writes both files.
"""
BEGIN, END = "<!-- longest context -->", "<!-- end of longest context -->"
README_ROWS = ((1, "24 GB"), (8, "24 GB"), (8, "80 GB"))


@dataclass(frozen=True, slots=True)
class Cell:
    """One machine of the table."""

    ranks: int
    card: str
    host: str

    @property
    def flags(self) -> list[str]:
        """Those of `plan_memory.py`."""
        gib, has_disks = HOSTS[self.host]
        words = f"{RUN} --gpus-per-node {self.ranks} --context-parallel-size {self.ranks} "
        words += f"--gpu {GPUS[self.card]} --host-memory-gib {gib} "
        if has_disks:
            folders = ",".join(f"/nvme{number}" for number in range(NUM_DISKS))
            words += "--recompute-granularity full --cpu-offloading-num-layers all "
            words += f"--activation-disk {folders} --disk-gib {DISK_BYTES / GIB:.0f}"
        return words.split()

    def planned(self) -> dict:
        """The longest context, what it takes per GPU and node, and its flags."""
        request = parse_plan_request(self.flags)
        found = longest_context([Plan(request.config, request.machine)])
        if found is None:
            return {"tokens": 0}
        plan, disk = found.plan, found.plan.activation_disk
        return {
            "tokens": found.tokens,
            "step_seconds": round(plan.time.seconds, 1),
            "gpu_gib": round(plan.peak.num_bytes / GIB, 1),
            "host_gib_per_node": round(plan.host.total() * self.ranks / GIB),
            "disk_gib_per_node": round(disk.node_bytes / GIB) if disk else 0,
            "written_terabytes_per_day_and_disk": round(
                disk.written_terabytes_per_day if disk else 0.0, 2
            ),
            "limit": found.limit,
            "flags": context_flags(plan.config),
        }


def committed(file: Path = HERE / "results/longest_context.json") -> dict[Cell, dict]:
    """What :func:`write` wrote."""
    named = json.loads(file.read_text())
    return {Cell(x.pop("ranks"), x.pop("gpu"), x.pop("host")): x for x in named}


CELLS = [Cell(ranks, card, host) for ranks in RANKS for card in GPUS for host in HOSTS]


def length(tokens: int) -> str:
    """Millions (Mi) of tokens, to three digits."""
    return f"{tokens / MI:.3g}M" if tokens else "none"


def duration(seconds: float) -> str:
    """Of a step, in a unit that leaves few digits."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"


def row(ranks: int, card: str, found: dict[Cell, dict]) -> str:
    """One line of a table: a cell for each host."""
    cells = [f"{ranks} x {card}"]
    for host in HOSTS:
        numbers = found[Cell(ranks, card, host)]
        seconds = f", {duration(numbers['step_seconds'])}" if numbers["tokens"] else ""
        cells.append(length(numbers["tokens"]) + seconds)
    return "| " + " | ".join(cells) + " |"


def table(rows: Iterator[tuple[int, str]], found: dict[Cell, dict]) -> list[str]:
    """The lines of a table of ``rows``, ranks with a card, as far as they were planned."""
    rows = [each for each in rows if all(Cell(*each, host) in found for host in HOSTS)]
    head = ["| GPUs | " + " | ".join(HOSTS) + " |", "|" + "---|" * (len(HOSTS) + 1)]
    return head + [row(ranks, card, found) for ranks, card in rows]


def report(found: dict[Cell, dict]) -> str:
    """The page, in Markdown."""
    cards = ", ".join(f"{gpu} ({card})" for card, gpu in GPUS.items())
    lines = [PREFACE.format(cards=cards, disks=NUM_DISKS, rate=DISK_GB_PER_SECOND)]
    lines += table(((ranks, card) for ranks in RANKS for card in GPUS), found)
    return "\n".join([*lines, ""])


def draw(found: dict[Cell, dict]) -> pyplot.Figure:
    """Bars: a panel for each number of GPUs, a group for each card, a bar for each host."""
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    colors = ("#a9d6e5", "#61a5c2", "#2a6f97", "#2b9348")
    for ranks, axes in zip(RANKS, panels, strict=True):
        for place, (host, color) in enumerate(zip(HOSTS, colors, strict=True)):
            cells = [Cell(ranks, card, host) for card in GPUS]
            millions = [found[cell]["tokens"] / MI if cell in found else 0 for cell in cells]
            at = [number + (place - 1.5) * 0.2 for number in range(len(GPUS))]
            bars = axes.bar(at, millions, 0.2, color=color, label=host)
            labels = [f"{value:.2g}" if value else "" for value in millions]
            axes.bar_label(bars, labels, fontsize=6.5, rotation=90, padding=2)
        axes.set(title=f"{ranks} GPU{'s' * (ranks > 1)}", yscale="log", ylim=(0.1, 100))
        axes.set_xticks(range(len(GPUS)), list(GPUS))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("longest context, millions of tokens (Mi)")
    panels[0].legend(frameon=False, title="host memory of the node", loc="upper left", fontsize=8)
    figure.suptitle("Full training of Llama 3 8B, optimizer on the host, by the planner")
    return figure


def main() -> None:
    """Plan every cell and write the table, its numbers and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1, help="cells at the same time (1)")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs) as executor:
        numbers = executor.map(Cell.planned, CELLS)
        found = dict(zip(CELLS, track(numbers, "planning", len(CELLS)), strict=True))
    write(found)


def write(found: dict[Cell, dict]) -> None:
    """Write the numbers, the page, the picture, and the rows of the README."""
    named = [
        {"ranks": cell.ranks, "gpu": cell.card, "host": cell.host} | x for cell, x in found.items()
    ]
    (HERE / "results/longest_context.json").write_text(json.dumps(named, indent=1) + "\n")
    (HERE / "results/longest_context.md").write_text(report(found))
    draw(found).savefig(HERE.parent / "docs/pictures/longest_context.png", dpi=140)
    readme = HERE.parent / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    rows = "\n".join(table(iter(README_ROWS), found))
    readme.write_text(f"{before}{BEGIN}\n\n{rows}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
