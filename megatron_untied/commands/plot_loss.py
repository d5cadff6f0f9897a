"""Draw the loss curves of a metrics file.

    python tools/plot_loss.py runs/tiny/metrics.jsonl --output loss.png --unigram-entropy 5.1

Values that are not finite are left out.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot: nodes have no display

from matplotlib import pyplot

from megatron_untied.commands import documentation
from megatron_untied.training.metrics import read_metrics

Curve = tuple[list[int], list[float]]


def curve(lines: list[dict], key: str) -> Curve:
    """Iterations and values of one metric; what was not finite is left out."""
    # null stands for nan and infinity; evaluations have lines of their own, with other keys.
    points = [(line["iteration"], line[key]) for line in lines if line.get(key) is not None]
    return [iteration for iteration, _ in points], [value for _, value in points]


def draw(train: Curve, validation: Curve, unigram_entropy: float | None):
    """A figure of the curves, in nats per token."""
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.plot(*train, linewidth=1, label="training")
    if validation[0]:
        axes.plot(*validation, marker="o", label="validation")
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, color="gray", linestyle="--", label="unigram entropy")
    axes.set(xlabel="iteration", ylabel="cross-entropy (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def main(argv: list[str] | None = None) -> None:
    """Read, draw, save."""
    parser = argparse.ArgumentParser(
        description=documentation(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("metrics", type=Path, help="the file of --metrics-jsonl")
    parser.add_argument("--output", type=Path, help="image (loss.png beside the metrics)")
    parser.add_argument("--unigram-entropy", type=float, metavar="NATS", help="a line to be below")
    arguments = parser.parse_args(argv)
    try:
        lines = read_metrics(arguments.metrics)
        train, validation = curve(lines, "lm_loss"), curve(lines, "validation_loss")
    except OSError as error:
        parser.exit(2, f"error: {error}\n")
    except (ValueError, AttributeError, KeyError) as error:  # no JSON, no objects, no iterations
        reason = f"{arguments.metrics} is not a file of --metrics-jsonl ({error!r})"
        parser.exit(2, f"error: {reason}\n")
    if not train[0] and not validation[0]:
        parser.exit(2, f"error: {arguments.metrics} has no losses\n")
    output = arguments.output or arguments.metrics.with_name("loss.png")
    if output.is_dir():  # savefig would write beside it
        parser.exit(2, f"error: --output {output} is a folder; give the image to write\n")
    try:
        draw(train, validation, arguments.unigram_entropy).savefig(output, dpi=150)
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: --output {output}: {error}\n")
    print(f"wrote {output}")
