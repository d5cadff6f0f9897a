r"""Shares of a traced step: attention, matrix products, exchange, and every other operator.

    python pretrain_gpt.py ... --tensorboard-dir runs/profile --profile \
        --profile-step-start 2 --profile-step-end 3
    python benchmarks/step_shares.py runs/profile/rank0-iterations-3-3.pt.trace.json.gz

Reads the host's timeline of a CPU run, where an operator's time is its own, without the operators
that it calls. Autograd's functions are no operators. Time outside operators is exchange while a
collective runs, and otherwise Python's.
"""

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ATTENTION, PRODUCTS, EXCHANGE = "attention", "matrix products", "exchange"
OUTSIDE = "outside operators"
KINDS = (
    (ATTENTION, ("aten::_scaled_dot_product_flash_attention_for_cpu",)),
    (PRODUCTS, ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")),
    (EXCHANGE, ("c10d::", "gloo:", "record_param_comms")),
)
"""By kind: how the names of its operators begin."""


def kind_of(name: str) -> str:
    """The kind of an operator, or its own name."""
    return next((kind for kind, starts in KINDS if name.startswith(starts)), name)


def own_microseconds(events: list[dict]) -> tuple[Counter[str], float]:
    """Microseconds by kind in the traced iterations, and their sum."""
    steps = [e for e in events if e.get("name", "").startswith("iteration ") and "dur" in e]
    thread = steps[0]["tid"]
    operators = sorted(
        (e for e in events if e.get("cat") == "cpu_op" and e["tid"] == thread and "dur" in e
         and "::" in e["name"] and not e["name"].startswith("autograd::")),
        key=lambda e: (e["ts"], -e["dur"]),
    )  # fmt: skip
    own: Counter[str] = Counter()
    outer: list[dict] = []
    covered = []
    for event in operators:
        while outer and outer[-1]["ts"] + outer[-1]["dur"] <= event["ts"]:
            outer.pop()
        own[kind_of(event["name"])] += event["dur"]
        if outer:
            own[kind_of(outer[-1]["name"])] -= event["dur"]
        else:
            covered.append((event["ts"], event["ts"] + event["dur"]))
        outer.append(event)
    exchanges = [(e["ts"], e["ts"] + e["dur"]) for e in events
                 if e.get("name", "").startswith("gloo:") and "dur" in e]  # fmt: skip
    total = sum(e["dur"] for e in steps)
    gaps = list(_without([(e["ts"], e["ts"] + e["dur"]) for e in steps], covered))
    waiting = sum(b - a for a, b in gaps) - sum(b - a for a, b in _without(gaps, exchanges))
    own[EXCHANGE] += waiting
    own[OUTSIDE] += sum(b - a for a, b in gaps) - waiting
    return own, total


def _without(
    spans: Iterable[tuple[float, float]], removed: Iterable[tuple[float, float]]
) -> Iterable[tuple[float, float]]:
    """The parts of ``spans`` that are in none of ``removed``; both may overlap in themselves."""
    removed = sorted(removed)
    for start, stop in spans:
        for a, b in removed:
            if b <= start or a >= stop:
                continue
            if a > start:
                yield start, a
            start = max(start, b)
        if start < stop:
            yield start, stop


def main() -> None:
    """Print the shares of one trace."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="file of one rank, .json or .json.gz")
    parser.add_argument("--top", type=int, default=15, help="other operators to list (15)")
    args = parser.parse_args()
    content = args.trace.read_bytes()
    text = gzip.decompress(content) if args.trace.suffix == ".gz" else content
    own, total = own_microseconds(json.loads(text)["traceEvents"])
    kinds = [kind for kind, _ in KINDS]
    rest = total - sum(own[kind] for kind in kinds)
    print("| kind | seconds | share |\n|---|---|---|")
    for name, value in [*((kind, own[kind]) for kind in kinds), ("everything else", rest)]:
        print(f"| {name} | {value / 1e6:.3f} | {value / total:.1%} |")
    others = [(name, value) for name, value in own.most_common() if name not in kinds]
    for name, value in others[: args.top]:
        print(f"|   {name} | {value / 1e6:.3f} | {value / total:.1%} |")


if __name__ == "__main__":
    main()
