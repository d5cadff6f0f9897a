r"""Compare step times of several settings of one run, as ratios within rounds of short runs.

Seconds on a shared machine change from minute to minute. So each round runs every setting once, and
the result is a setting's time over that of the first setting in the same round.

    python benchmarks/compare_steps.py --ranks 2 --rounds 5 --run "--num-layers 2 --swiglu \
        --hidden-size 256 --num-attention-heads 4 --seq-length 16384 --disable-bias-linear \
        --normalization RMSNorm --context-parallel-size 2 --vocab-size 500 --train-iters 3" \
        --setting "full=--recompute-granularity full" \
        --setting "selective=--recompute-granularity selective"

``NAME@FOLDER=FLAGS`` runs the code in FOLDER, a checkout of another commit.
"""

import argparse
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.progress import track

from megatron_untied.cli.planner_flags import complete
from megatron_untied.training.metrics import read_metrics

ROOT = Path(__file__).parents[1]
Setting = tuple[str, Path, list[str]]
"""Name, folder of the code, flags."""


def setting(text: str) -> Setting:
    """Parse NAME=FLAGS or NAME@FOLDER=FLAGS."""
    name, _, flags = text.partition("=")
    name, _, folder = name.partition("@")
    return name, Path(folder).absolute() if folder else ROOT, shlex.split(flags)


def step_seconds(ranks: int, code: Path, flags: list[str]) -> float:
    """The median step of one run of the code in a folder, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        launcher = "-m torch.distributed.run --standalone --nproc-per-node".split()
        # A script's own folder comes first in the path of imports.
        run = [str(code / "pretrain_gpt.py"), *complete(flags), "--eval-iters", "0"]
        subprocess.run(
            [sys.executable, *launcher, str(ranks), *run, "--metrics-jsonl", str(metrics)],
            check=True,
            capture_output=True,
        )
        steps = [line["step_seconds"] for line in read_metrics(metrics) if "lm_loss" in line]
    return statistics.median(steps[1:])  # the first step compiles and fills caches


def table(seconds: dict[str, list[float]]) -> str:
    """Markdown: the median step, and the ratio to the first setting in each round."""
    lines = [
        "| setting | median step, s | over the first: median | of all rounds |",
        "|---|---|---|---|",
    ]
    first = next(iter(seconds.values()))
    for name, own in seconds.items():
        ratios = [a / b for a, b in zip(own, first, strict=True)]
        lines.append(
            f"| {name} | {statistics.median(own):.2f} | {statistics.median(ratios):.3f} | "
            f"{min(ratios):.3f} to {max(ratios):.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the rounds, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes per run (2)")
    parser.add_argument("--rounds", type=int, default=5, help="runs per setting (5)")
    parser.add_argument("--run", required=True, help="flags of all runs; at least 3 iterations")
    parser.add_argument(
        "--setting", type=setting, action="append", required=True, metavar="NAME[@FOLDER]=FLAGS"
    )
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name, _, _ in options.setting}
    for _ in track(range(options.rounds), "rounds"):
        for name, code, flags in options.setting:
            own = [*shlex.split(options.run), *flags]
            seconds[name].append(step_seconds(options.ranks, code, own))
    print(table(seconds))


if __name__ == "__main__":
    main()
