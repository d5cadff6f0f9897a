"""Print the page of figures: kills survived, flags and files tried, growth in a soak, peers.

    python -m benchmarks.figures
    python -m benchmarks.figures --measure kills pairs --seed 7

The page is made of committed results. ``--measure`` first makes some of them anew, with the checks
of ``tests/faults``; the first one that fails ends it. ``--share`` tries a part of what is in the
slow tests. The ratios to other systems are those of ``benchmarks.peers``.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

import megatron_untied  # noqa: F401 - before any test imports megatron.core
from benchmarks.peers import first_of, time_ratios

RESULTS = Path(__file__).parent / "results"
KILLS, SOAK_STEPS = 200, 500


def kills(share: float, seed: int, folder: Path) -> dict[str, Any]:
    """Kill a rank at random moments, most of them in a save, and load what is there."""
    from tests.faults.test_killed_saves import kill_often

    count = max(1, round(share * KILLS))
    said = kill_often(folder, count, seed)
    partial = sum("was not saved completely, and is skipped" in line for line in said)
    return {"kills": count, "survived": count, "partial checkpoints met": partial}


def pairs(share: float, seed: int, folder: Path) -> dict[str, Any]:
    """Train with pairs of flags on two ranks, or see them refused."""
    from tests.faults import test_flag_pairs as checks

    found, runs = checks.pairs(), checks.PairRuns(folder)
    for flags in track(random.Random(seed).sample(found, round(share * len(found))), "pairs"):
        runs.check(flags)
    return {"of": len(found), "tried": runs.counts.total(), **runs.counts}


def mutations(share: float, seed: int, folder: Path) -> dict[str, Any]:
    """Read mutated files of every kind."""
    from tests.faults.test_mutated_files import KINDS, mutate_often

    counts = {}
    for number, (name, kind) in enumerate(track(KINDS.items(), "kinds of files")):
        (folder / str(number)).mkdir()
        draws = max(1, round(share * kind.draws))
        counts[name] = mutate_often(name, draws, seed, folder / str(number))
    total = sum(map(Counter, counts.values()), Counter())
    return {"tried": total.total(), **total, "kinds": counts}


def soak(share: float, seed: int, folder: Path) -> dict[str, Any]:
    """Train on two ranks with everything on; how much each of them grows."""
    from tests.faults.test_soak import require_flat
    from tests.faults.test_soak import soak as train

    steps = max(40, round(share * SOAK_STEPS))
    found = train(folder, steps, timeout=20.0 * steps)
    require_flat(found)
    return {"steps": steps, "ranks": found}


PARTS: dict[str, Callable[[float, int, Path], dict[str, Any]]] = {
    "kills": kills,
    "pairs": pairs,
    "mutations": mutations,
    "soak": soak,
}


def page(results: dict[str, Any], peers: dict[str, Any] | None) -> str:
    """All figures, in Markdown."""
    rows, parts = [], [PREFACE]
    if found := results.get("kills"):
        rows.append(
            f"| ranks killed, most of them in a save | {found['survived']} of {found['kills']} "
            f"survived; {found['partial checkpoints met']} times a partial checkpoint was skipped |"
        )
    if found := results.get("pairs"):
        rows.append(
            f"| pairs of flags on two ranks | {found['tried']:,} of {found['of']:,}: "
            f"{found['trained']:,} trained as plain runs do, {found['refused']:,} were refused |"
        )
    if found := results.get("mutations"):
        rows.append(
            f"| mutated files | {found['tried']:,}: {found['refused']:,} refused in one line, "
            f"{found['accepted']:,} read as a second reader reads them |"
        )
    if found := results.get("soak"):
        rows.append(f"| soak, {found['steps']} steps on two ranks | {_growth(found)} |")
    parts.append("\n".join(["| what | result |", "|---|---|", *rows]))
    if found := results.get("mutations"):
        lines = ["| files | refused | accepted |", "|---|---|---|"]
        for name, counts in found["kinds"].items():
            lines.append(f"| {name} | {counts.get('refused', 0)} | {counts.get('accepted', 0)} |")
        parts += ["## Mutated files", "\n".join(lines)]
    if peers:
        parts += ["## Other systems", PEERS, _ratios(peers["lengths"])]
    return "\n\n".join(parts) + "\n"


PREFACE = """\
# Figures

Made by `python -m benchmarks.figures`, which repeats each part with `--measure` and other random
choices with `--seed`."""
PEERS = """\
CPU time of a training step over that of the first system, and its peak memory: medians of
[the comparison](peers.md), where the settings and the spread are."""


def _growth(found: dict[str, Any]) -> str:
    worst = {
        name: max((rank[name] for rank in found["ranks"]), key=lambda one: abs(one["growth"]))
        for name in found["ranks"][0]
    }
    resident = worst["resident_bytes"]
    return (
        f"resident memory {resident['slope'] / 1024:+.2f} KiB a step of "
        f"{resident['mean'] / 2**20:.0f} MiB, file descriptors "
        f"{worst['descriptors']['slope']:+.4f}, threads {worst['threads']['slope']:+.4f}"
    )


def _ratios(lengths: dict[str, Any]) -> str:
    names = list(dict.fromkeys(name for measured in lengths.values() for name in measured))
    lines = ["| system | " + " | ".join(f"{int(n):,} tokens" for n in lengths) + " |"]
    lines.append("|---|" + "---|" * len(lengths))
    for name in names:
        cells = []
        for measured in lengths.values():
            first, own = first_of(measured), measured.get(name, {"error": "not measured"})
            if "error" in own:
                cells.append("-")
                continue
            time = statistics.median(time_ratios(own, first, "cpu"))
            cells.append(f"{time:.2f}, {own['memory_mib'] / first['memory_mib']:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is asked for, then print the page and write it beside the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", nargs="+", choices=PARTS, default=[], help="these anew")
    parser.add_argument("--seed", type=int, default=0, help="of random choices (0)")
    parser.add_argument("--share", type=float, default=1.0, help="part of the slow tests (1)")
    parser.add_argument("--output", type=Path, default=RESULTS / "figures.json", help="%(default)s")
    options = parser.parse_args(arguments)
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    for name in options.measure:
        with tempfile.TemporaryDirectory() as folder:
            measured = PARTS[name](options.share, options.seed, Path(folder))
        results[name] = {"seed": options.seed} | measured
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    peers = RESULTS / "peers.json"
    made = page(results, json.loads(peers.read_text()) if peers.exists() else None)
    options.output.with_suffix(".md").write_text(made)
    print(made)


if __name__ == "__main__":
    main()
