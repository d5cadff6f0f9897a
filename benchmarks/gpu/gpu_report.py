r"""Report on a new GPU: does everything work, how fast, and is memory as planned.

    bash benchmarks/gpu/run.sh                       # one GPU, under 8 minutes
    bash benchmarks/gpu/run.sh --device cpu --toy    # the same program, in small
    bash benchmarks/gpu/run.sh --only kernels layer --scale 3

Every part is a process of its own with a time budget: one that fails or takes too long is reported,
and the others run. Results are JSON and Markdown in ``benchmarks/results/gpu/``.
"""

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.record import Record, markdown
from benchmarks.gpu.sizes import FULL, ROOT, TOY
from megatron_untied.context_parallel.kernels.flash_attention import FlashAttention4

RESULTS = ROOT / "benchmarks" / "results" / "gpu"


@dataclass(frozen=True, slots=True)
class Part:
    """A question, the function that answers it, and the seconds that it may take."""

    name: str
    question: str
    function: str
    """``module.function`` in this folder, called with a ``Record`` and ``Sizes``. It is imported in
    the part's own process, so that a part that cannot be imported fails alone."""
    budget_seconds: float


PARTS = (
    Part("environment", "What is installed, and does it import?", "environment.run", 30),
    Part("tests", "Do the tests that need a GPU pass?", "unit_tests.run", 60),
    Part("kernels", "Are the attention kernels right, and how fast?", "kernels.run", 45),
    Part("layer", "What does each setting cost in a streamed layer?", "layer.run_settings", 110),
    Part("offload", "Are copies to the host hidden?", "layer.run_offload", 30),
    Part("memory", "Is peak memory what planner and tracer say?", "memory.run_peaks", 75),
    Part("context", "Is the longest context what the planner says?", "memory.run_longest", 90),
    Part("agreement", "Does a GPU train as a CPU does?", "agreement.run", 40),
)


def run_part(part: Part, folder: Path, options: Sequence[str], scale: float) -> dict[str, Any]:
    """Run one part in a process of its own; what it found so far counts, however it ends."""
    found, errors = folder / f"{part.name}.json", folder / f"{part.name}.err"
    budget = part.budget_seconds * scale
    command = [sys.executable, "-m", "benchmarks.gpu.gpu_report", "--part", part.function]
    command += ["--file", str(found), "--budget", str(budget), *options]
    began, state = time.monotonic(), "done"
    with errors.open("w") as stderr:
        # A session of its own, so that ending it ends what the part has started, and nothing else.
        process = subprocess.Popen(command, cwd=ROOT, stderr=stderr, start_new_session=True)
        try:
            process.wait(budget)
        except subprocess.TimeoutExpired:
            state = f"ended after its {budget:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if state == "done" and process.returncode:
        state = f"failed: {errors.read_text()[-2000:].strip()}"
    content = json.loads(found.read_text()) if found.exists() else {"tables": {}, "problems": []}
    if state == "done" and content["problems"]:
        state = f"{len(content['problems'])} problems"
    seconds = time.monotonic() - began
    return {
        "part": part.name,
        "question": part.question,
        "state": state,
        "seconds": seconds,
    } | content


def run_parts(parts: Sequence[Part], options: Sequence[str], scale: float) -> list[dict[str, Any]]:
    """Run all parts one after the other, and print the progress."""
    results, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number, part in enumerate(parts):
            left = timedelta(seconds=round(scale * sum(p.budget_seconds for p in parts[number:])))
            elapsed = timedelta(seconds=round(time.monotonic() - began))
            print(f"[{number + 1}/{len(parts)}] {part.name}: {part.question} | elapsed {elapsed}, "
                  f"at most {left} left", flush=True)  # fmt: skip
            results.append(run_part(part, Path(folder), options, scale))
            print(f"    {results[-1]['state']} in {results[-1]['seconds']:.0f} s", flush=True)
    return results


def report(results: list[dict[str, Any]], title: str) -> str:
    """The Markdown page: a summary of all parts, then each with its tables and problems."""
    summary = [
        {"part": r["part"], "question": r["question"], "state": r["state"].splitlines()[0],
         "seconds": r["seconds"]} for r in results
    ]  # fmt: skip
    lines = [f"# {title}", "", "Written by `bash benchmarks/gpu/run.sh`.", "", markdown(summary)]
    for result in results:
        lines += ["", f"## {result['part'].capitalize()}", "", result["question"]]
        if result["state"].startswith("failed"):
            lines += ["", "```", result["state"], "```"]
        lines += ["", *(f"- {problem}" for problem in result["problems"])] * bool(
            result["problems"]
        )
        for name, table in result["tables"].items():
            lines += ["", f"{name.capitalize()}:", "", markdown(table)]
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--toy", action="store_true", help="toy sizes, which a CPU does quickly")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="some parts only")
    parser.add_argument(
        "--scale",
        type=float,
        help="factor of all time budgets (1; 3 with FlashAttention-4, 5 with --device cpu)",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    # In the process of a part: its function, its record's file, and its seconds.
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.scale = args.scale or default_scale(args.device)
    return args


def default_scale(device: str) -> float:
    """Factor of time budgets, which bound the report on a GPU that is paid by the minute.

    A CPU's cores may be shared. FlashAttention-4 compiles a kernel for every kind of mask and width
    of heads when it is first called, in each process.
    """
    if device == "cpu":
        return 5.0
    compiles = torch.cuda.is_available() and not FlashAttention4.missing(torch.device("cuda", 0))
    return 3.0 if compiles else 1.0


def result_name(card: str, parts: Sequence[str], at: datetime) -> str:
    """Name of the results; no other run, and no run of fewer parts, has the same."""
    which = [] if len(parts) == len(PARTS) else [*parts]
    return "_".join([card.lower().replace(" ", "-"), *which, f"{at:%Y%m%d-%H%M%S}"])


def main() -> None:
    """Run the parts and write the results; exit with 1 if one has not succeeded."""
    args = parse()
    if args.device == "cpu" and torch.cuda.is_available():
        # CUDA reads the variable once, so the program starts anew without GPUs.
        words = [sys.executable, "-m", "benchmarks.gpu.gpu_report", *sys.argv[1:]]
        os.execvp("env", ["env", "CUDA_VISIBLE_DEVICES=", *words])
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: there is no GPU here; give --device cpu --toy to try the program")
    parts = [part for part in PARTS if part.name in args.only]
    if args.part:
        record = Record(args.file, args.budget)
        module, function = args.part.split(".")
        run = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)
        return run(record, TOY if args.toy else FULL)
    args.out.mkdir(parents=True, exist_ok=True)
    options = ["--device", args.device, *(["--toy"] if args.toy else [])]
    results = run_parts(parts, options, args.scale)
    card = torch.cuda.get_device_name(0) if args.device == "cuda" else "CPU"
    name = result_name(card, [part.name for part in parts], datetime.now())
    (args.out / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    title = f"Report on {card}" + (", toy sizes" if args.toy else "")
    (args.out / f"{name}.md").write_text(report(results, title))
    print(f"wrote {args.out / name}.md and .json")
    sys.exit(any(result["state"] != "done" for result in results))


if __name__ == "__main__":
    main()
