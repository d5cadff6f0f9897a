r"""Write the memory tables in benchmarks/results: one trace per model, length and setting.

Every trace is `memory_trace.py` in a process of its own, and its numbers are kept in a file, so an
interrupted run continues where it stopped. On two cores all traces take about an hour.

    python benchmarks/memory_table.py --folder runs/memory --jobs 2
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import track

from megatron_untied.platform.device import GIB

HERE = Path(__file__).parent
MI = 2**20
LENGTHS = {"128K": MI // 8, "512K": MI // 2} | {f"{m}M": m * MI for m in (1, 2, 3, 4, 5, 8, 10)}
ALWAYS = (
    "--micro-batch-size 1 --bf16 --use-torch-fsdp2 --no-cp-overlap --loss-chunk-size 2048 "
    "--sequence-tile-size {tile} --cpu-offloading-num-layers {layers} --seq-length {tokens} "
)
SETTINGS = {
    "one exchange, full": "--cp-heads-per-chunk all --recompute-granularity full",
    "untied, full": "--cp-heads-per-chunk 8 --recompute-granularity full",
    "untied, selective": "--cp-heads-per-chunk 8 --recompute-granularity selective",
    "untied, selective, parked": "--cp-heads-per-chunk 8 --recompute-granularity selective "
    "--park-during-attention",
}
ON_THE_HOST = {
    "untied, selective, parked": "--cp-heads-per-chunk {ranks} --recompute-granularity "
    "selective --park-during-attention --optimizer-cpu-offload",
}
LARGE_ON_THE_HOST = {
    "untied, full every 4 layers, parked": "--cp-heads-per-chunk {ranks} "
    "--recompute-granularity full --recompute-num-layers 4 --park-during-attention "
    "--optimizer-cpu-offload",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and the ranks that train it."""

    title: str
    model: str
    layers: int
    world_size: int
    parallel: str
    tiles: tuple[tuple[int, int], ...]
    """Longest sequence, in Mi tokens, and the tile up to there; the last for all longer ones.

    Large tiles are traced faster. Up to these sizes the peak is attention's, not that of a tile.
    """
    lengths: tuple[str, ...] = tuple(LENGTHS)
    settings: dict[str, str] = field(default_factory=lambda: SETTINGS, compare=False)
    files: str = ""
    """What names of files add to the model's, where a model has several subjects."""

    def residual_bytes(self, tokens: int) -> int:
        """H: one bf16 residual, [tokens / ranks, hidden size]."""
        hidden = {"llama3-8b": 4096, "qwen3-32b": 5120, "llama3.1-70b": 8192}[self.model]
        return tokens // self.world_size * hidden * 2


SUBJECTS = (
    Subject(
        "Llama3-8B, 8 ranks",
        "llama3-8b",
        32,
        8,
        "--context-parallel-size 8",
        ((1, 8192), (3, 16384), (10, 32768)),
    ),
    Subject(
        "Qwen3-32B, 16 ranks: 8 exchange heads, in a ring of 2",
        "qwen3-32b",
        64,
        16,
        "--context-parallel-size 16 --cp-comm-type a2a+p2p "
        "--hierarchical-context-parallel-sizes 8 2",
        ((1, 8192), (5, 16384), (10, 32768)),
        ("128K", "512K", "1M", "2M", "5M", "10M"),
    ),
    *(
        Subject(
            f"Llama3-8B, {ranks} {'GPU' if ranks == 1 else 'ranks'}, optimizer on the host",
            "llama3-8b",
            32,
            ranks,
            f"--context-parallel-size {ranks}",
            ((10, 8192),),
            lengths,
            ON_THE_HOST,
            f"{ranks}-ranks_",
        )
        for ranks, lengths in ((1, ("1M",)), (8, ("5M", "10M")))
    ),
    *(
        Subject(
            f"{title}, 8 ranks, optimizer on the host",
            model,
            layers,
            8,
            "--context-parallel-size 8",
            ((10, 8192),),
            (length,),
            LARGE_ON_THE_HOST,
            "8-ranks_",
        )
        for title, model, layers, length in (
            ("Qwen3-32B", "qwen3-32b", 64, "5M"),
            ("Llama3.1-70B", "llama3.1-70b", 80, "2M"),
        )
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One line of a table."""

    subject: Subject
    length: str
    setting: str

    @property
    def tile(self) -> int:
        """Tokens; smaller when parked, as attention takes less and a tile must not be the peak."""
        sizes = [size for limit, size in self.subject.tiles if LENGTHS[self.length] <= limit * MI]
        parked = "parked" in self.setting and LENGTHS[self.length] < 8 * MI
        return min(sizes[0], 16384) if parked else sizes[0]

    @property
    def flags(self) -> str:
        """The flags of memory_trace.py."""
        tokens = LENGTHS[self.length]
        always = ALWAYS.format(layers=self.subject.layers, tokens=tokens, tile=self.tile)
        return " ".join(
            [
                f"--world-size {self.subject.world_size} --model {self.subject.model}",
                always + self.subject.parallel,
                self.subject.settings[self.setting].format(ranks=self.subject.world_size),
            ]
        )

    def numbers(self, folder: Path) -> dict:
        """The numbers of the trace, from ``folder`` or made now."""
        prefix = f"{self.subject.model}_{self.subject.files}"
        name = f"{prefix}{self.length}_{self.setting.replace(', ', '_')}.json"
        file = folder / name.replace(" ", "-")
        if not file.exists():
            command = [sys.executable, str(HERE / "memory_trace.py"), "--json", str(file)]
            subprocess.run(command + shlex.split(self.flags), check=True, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text())


def rows(subject: Subject, found: dict[Case, dict]) -> Iterator[str]:
    """The lines of one model's table."""
    yield (
        "| tokens | setting | tile | device peak, GiB | in H | in phase | host, GiB per rank | "
        "attention forward calls per layer | attention FLOPs | exchanged per layer, H |"
    )
    yield "|" + "---|" * 10
    for case, x in found.items():
        if case.subject is not subject:
            continue
        h = subject.residual_bytes(LENGTHS[case.length])
        cells = [
            case.length,
            case.setting,
            f"{case.tile}",
            f"{x['peak_device_bytes'] / GIB:.2f}",
            f"{(x['peak_device_bytes'] - x['model_state_bytes']) / h:.2f}",
            x["peak_phase"],
            f"{x['host_bytes'] / GIB:.1f}",
            f"{x['attention_forward_calls_per_layer']:g}",
            f"{x['attention_flops']:.3e}",
            f"{x['exchange_bytes_per_layer'] / h:.2f}",
        ]
        yield "| " + " | ".join(cells) + " |"


def report(found: dict[Case, dict], before: str = "") -> str:
    """All tables, in Markdown; those that nothing was found for are taken from ``before``."""
    lines = ["# Memory of a training step, traced", ""]
    lines += [(HERE / "results/memory_preface.md").read_text().rstrip(), ""]
    for subject in SUBJECTS:
        title = f"## {subject.title}\n\n"
        if any(case.subject is subject for case in found):
            lines += [title + "\n".join(rows(subject, found)), ""]
        elif title in before:
            lines += [title + before.partition(title)[2].partition("\n\n")[0], ""]
    lines += ["## Flags", "", "Of every line, for Llama3-8B at 5M:", "", "```"]
    for setting in SETTINGS:
        case = Case(SUBJECTS[0], "5M", setting)
        lines.append(f"python benchmarks/memory_trace.py {case.flags}")
    return "\n".join([*lines, "```", ""])


def main() -> None:
    """Make missing traces and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="of the traces' numbers")
    parser.add_argument("--jobs", type=int, default=1, help="traces at the same time (1)")
    parser.add_argument("--out", type=Path, default=HERE / "results/memory.md")
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="leave tables without them in the title alone"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    cases = [
        Case(subject, length, setting)
        for subject in SUBJECTS
        if options.only in subject.title
        for length in subject.lengths
        for setting in subject.settings
    ]
    with ThreadPoolExecutor(options.jobs) as executor:
        numbers = executor.map(lambda case: case.numbers(options.folder), cases)
        found = dict(zip(cases, track(numbers, "tracing", len(cases)), strict=True))
    before = options.out.read_text() if options.out.exists() else ""
    options.out.write_text(report(found, before))
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
