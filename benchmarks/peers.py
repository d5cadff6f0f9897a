r"""Compare one training step with other systems: the same Llama, tokens, dtype, ranks and threads.

    DS_BUILD_OPS=0 pip install --no-build-isolation -r requirements-bench.txt
    python -m benchmarks.peers --lengths 2048:7 4096:7 8192:5 16384:3 32768:2

A step is forward, backward, the sum of gradients over ranks and AdamW. First every system runs two
steps alone: its losses must be those of the first system, and its peak memory is measured. Then
rounds of one step of each system in turn are timed. On a shared machine seconds change from minute
to minute, so ratios are taken within a round, and of CPU seconds as well as of wall seconds. A
system that cannot run here is listed with its error. ``--plot`` draws results that are there.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from rich.progress import track

from benchmarks.peer_systems import ONE_RANK, SYSTEMS, Measured, Shape

RESULTS = Path(__file__).parent / "results"
TOLERANCE = 2e-5
"""Of losses, relative: fp32 sums of other orders. The second one also compares gradients."""


class Ranks:
    """The processes of one system."""

    def __init__(self, system: str, shape: Shape, num_ranks: int, *, trims: bool):
        """``trims``: freed memory returns to the system at once, so that a peak counts tensors."""
        alone = system in ONE_RANK
        self.size, threads = (1, num_ranks) if alone else (num_ranks, 1)
        self.folder = tempfile.TemporaryDirectory()
        self.errors = Path(self.folder.name) / "errors"
        command = ["env", f"OMP_NUM_THREADS={threads}"]
        if trims:
            command += ["MALLOC_MMAP_THRESHOLD_=65536", "MALLOC_TRIM_THRESHOLD_=65536"]
        command += [sys.executable, "-m", "benchmarks.peer_systems", system]
        command += [json.dumps(asdict(shape)), self.folder.name, str(self.size)]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank)],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors.open("a"),
                text=True,
            )
            for rank in range(self.size)
        ]

    def answers(self) -> list[Any]:
        """One line of each rank.

        Raises:
            RuntimeError: with the last error that a rank wrote that ended.
        """
        lines = [process.stdout.readline() for process in self.processes]
        if not all(lines):
            written = self.errors.read_text()
            # Torch puts the rank before each line of a traceback.
            errors = re.findall(r"^(?:\[rank\d+\]: )?([\w.]*Error: .*)", written, re.MULTILINE)
            raise RuntimeError((errors or written.strip().splitlines() or ["no message"])[-1])
        return [json.loads(line) for line in lines]

    def step(self) -> Measured:
        """One step of all ranks: its loss, the longest time, all CPU seconds, the largest peak."""
        for process in self.processes:
            print(file=process.stdin, flush=True)
        answers = self.answers()
        largest = {name: max(x[name] for x in answers) for name in ("loss", "wall", "memory_mib")}
        return largest | {"cpu": sum(x["cpu"] for x in answers)}

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.folder.cleanup()


def compare(
    shape: Shape, num_ranks: int, rounds: int, systems: Sequence[str]
) -> dict[str, Measured]:
    """All ``systems`` at one length; ratios to the first one are made by :func:`table`.

    Raises:
        ValueError: for a system whose losses are not those of the first one.
    """
    measured: dict[str, Measured] = {}
    for name in systems:
        ranks = Ranks(name, shape, num_ranks, trims=True)
        try:
            ranks.answers()
            steps = [ranks.step() for _ in range(2)]
            # Of the second step: in the first one AdamW allocates its moments.
            losses, memory = [x["loss"] for x in steps], steps[1]["memory_mib"]
            measured[name] = {"loss": losses, "memory_mib": memory, "wall": [], "cpu": []}
        except RuntimeError as error:
            measured[name] = {"error": str(error)}
        finally:
            ranks.close()
    check_losses(measured)
    running = [name for name, each in measured.items() if "error" not in each]
    started = {name: Ranks(name, shape, num_ranks, trims=False) for name in running}
    try:
        for ranks in started.values():
            ranks.answers()
            ranks.step()  # the first one fills caches
        for turn in track(range(rounds), f"{shape.seq_length} tokens"):
            for name in running if turn % 2 else reversed(running):
                step = started[name].step()
                for kind in ("wall", "cpu"):
                    measured[name][kind].append(step[kind])
    finally:
        for ranks in started.values():
            ranks.close()
    return measured


def check_losses(measured: dict[str, Measured]) -> None:
    """Raise a ValueError if two systems do not compute the same two losses."""
    expected = first_of(measured)["loss"]
    for name, each in measured.items():
        for loss, right in zip(each.get("loss", []), expected, strict=False):
            if not abs(loss - right) <= TOLERANCE * abs(right):
                raise ValueError(
                    f"{name} has a loss of {loss} where the first system has {right}; their times "
                    "cannot be compared."
                )


def first_of(measured: dict[str, Measured]) -> Measured:
    """That of the system which the others are compared with: the first that ran."""
    return next(each for each in measured.values() if "error" not in each)


def time_ratios(own: Measured, first: Measured, kind: str) -> list[float]:
    """Seconds of a system over those of the first one, round by round."""
    return [a / b for a, b in zip(own[kind], first[kind], strict=True)]


def table(measured: dict[str, Measured]) -> str:
    """Markdown: medians of the first system, and of the others' ratios to it within a round."""
    lines = ["| system | wall time | CPU time | memory |", "|---|---|---|---|"]
    first = first_of(measured)
    for name, each in measured.items():
        if "error" in each:
            lines.append(f"| {name} | {each['error']} | | |")
            continue
        cells = []
        for kind in ("wall", "cpu"):
            ratios = time_ratios(each, first, kind)
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            cells.append(f"{statistics.median(ratios):.2f} ({spread})")
            if each is first:
                cells[-1] = f"{statistics.median(each[kind]):.1f} s"
        memory = f"{each['memory_mib'] / first['memory_mib']:.2f}"
        if each is first:
            memory = f"{each['memory_mib']:.0f} MiB"
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {memory} |")
    return "\n".join(lines)


def report(results: dict[str, Any]) -> str:
    """The page of results."""
    parts = [PREFACE.format(**results["run"])]
    for length, measured in results["lengths"].items():
        parts += [f"## {int(length):,} tokens", table(measured)]
    return "\n\n".join(parts) + "\n"


PREFACE = """\
# One training step, beside other systems

Made by `python -m benchmarks.peers {arguments}` on {cpu}: {num_ranks} ranks of one thread;
*transformers, one rank* has the threads of all. Llama with {num_layers} layers of width
{hidden_size}, {num_attention_heads} query and {num_query_groups} key-value heads, a vocabulary of
{vocab_size}, fp32, AdamW. Packages: {packages}.

The first row has the median seconds of a step and its peak memory per rank. The others have their
ratio to it, above 1 is slower or larger: the median and the range of the ratios within each round.
CPU time is that of all ranks. Memory is the peak of resident memory beyond what was there before
the step, which is weights and moments. Losses of two steps agree within {tolerance}."""


def draw(results: dict[str, Any], picture: Path, kind: str) -> None:
    """Time and memory over those of the first system, by length."""
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), sharex=True)
    lengths = list(results["lengths"])
    for name in SYSTEMS:
        rows = [results["lengths"][length].get(name, {"error": ""}) for length in lengths]
        firsts = [next(iter(results["lengths"][length].values())) for length in lengths]
        pairs = [
            (x, y, z) for x, y, z in zip(lengths, rows, firsts, strict=True) if "error" not in y
        ]
        ticks = [f"{int(length) // 1024}K" for length, _, _ in pairs]
        times = [statistics.median(time_ratios(own, first, kind)) for _, own, first in pairs]
        axes[0].plot(ticks, times, "o-", label=name)
        memory = [own["memory_mib"] / first["memory_mib"] for _, own, first in pairs]
        axes[1].plot(ticks, memory, "o-", label=name)
    titles = f"{'CPU' if kind == 'cpu' else 'wall'} time of a step", "peak memory of a step"
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=f"{title}, over {next(iter(SYSTEMS))}", xlabel="tokens", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)


def run_of(options: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """What the results page says of the run."""
    packages = []
    for name in ("torch", "megatron-core", "transformers", "deepspeed", "yunchang"):
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            packages.append(f"no {name}")
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(
        (line.split(":")[1].strip() for line in cpus if line.startswith("model name")), "CPU"
    )
    return asdict(shape) | {
        "num_ranks": options.ranks,
        "cpu": cpu,
        "packages": ", ".join(packages),
        "arguments": "--lengths " + " ".join(f"{a}:{b}" for a, b in options.lengths),
        "tolerance": TOLERANCE,
    }


def length_and_rounds(text: str) -> tuple[int, int]:
    """Parse LENGTH:ROUNDS."""
    length, _, rounds = text.partition(":")
    return int(length), int(rounds or 5)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, then write the results, their page and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=length_and_rounds, nargs="+", metavar="TOKENS:ROUNDS")
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread each (2)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON: fields of the model")
    parser.add_argument("--output", type=Path, default=RESULTS / "peers.json", help="%(default)s")
    parser.add_argument("--plot", type=Path, help="draw the results of --output into this file")
    parser.add_argument("--plot-time", choices=["wall", "cpu"], default="wall")
    options = parser.parse_args(arguments)
    for length, rounds in options.lengths or []:
        shape = Shape(seq_length=length, **options.shape)
        measured = compare(shape, options.ranks, rounds, options.systems)
        results = {"run": run_of(options, shape), "lengths": {}}
        if options.output.exists():
            results["lengths"] = json.loads(options.output.read_text())["lengths"]
        results["lengths"][str(length)] = measured
        results["lengths"] = dict(sorted(results["lengths"].items(), key=lambda x: int(x[0])))
        options.output.write_text(json.dumps(results, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(report(results))
        print(table(measured))
    if options.plot:
        draw(json.loads(options.output.read_text()), options.plot, options.plot_time)


if __name__ == "__main__":
    main()
