"""A picture of a step: device memory by cause, from the first forward to the optimizer."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_untied.phases import Phase
from megatron_untied.planner.causes import Cause
from megatron_untied.planner.machine import GIB
from megatron_untied.planner.plan import Plan
from megatron_untied.planner.step import Moment

COLORS = {
    Cause.STATES: "#4c566a",
    Cause.GRADIENTS: "#7b88a1",
    Cause.GATHERED: "#8fbcbb",
    Cause.WEIGHT_GRADIENTS: "#5e81ac",
    Cause.INPUTS: "#d8dee9",
    Cause.KEPT: "#a3be8c",
    Cause.RESIDUAL: "#ebcb8b",
    Cause.SLOTS: "#d08770",
    Cause.CHUNKS: "#bf616a",
    Cause.KERNEL: "#7d2e38",
    Cause.TILES: "#b48ead",
    Cause.LOGITS: "#88c0d0",
}
"""From the bottom of the stack to its top: what lasts longest first."""


def draw(plan: Plan) -> Figure:
    """Stacked memory over the moments of a step, with the limit and the peak.

    Layers that are like their neighbors are left out.
    """
    moments = replace(plan, every_layer=False).moments
    limit, peak = plan.machine.device_bytes / GIB, plan.peak.num_bytes / GIB
    figure, axes = pyplot.subplots(figsize=(12, 5.5), layout="constrained")
    causes = [cause for cause in COLORS if any(moment.by_cause[cause] for moment in moments)]
    bottom = [0.0] * len(moments)
    for cause in causes:
        heights = [moment.by_cause[cause] / GIB for moment in moments]
        axes.bar(_places(moments), heights, 0.94, bottom, color=COLORS[cause], label=cause)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    top = 1.2 * max(limit, peak) if limit < 2 * peak else 1.35 * peak
    axes.set(ylim=(0, top), ylabel="GiB on one GPU", title=_title(plan))
    _mark_limit(axes, limit, top)
    _mark_peak(axes, moments)
    _name_parts(axes, moments)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    return figure


def _parts(moments: Sequence[Moment]) -> list[tuple[str, list[int]]]:
    """Moments in a row that are of one layer, or of none, with a name."""
    parts = []
    for (layer, is_loss), some in itertools.groupby(
        enumerate(moments), lambda each: (each[1].layer, each[1].phase is Phase.LOSS)
    ):
        name = "loss" if is_loss else "" if layer is None else str(layer + 1)
        parts.append((name, [index for index, _ in some]))
    return parts


def _places(moments: Sequence[Moment]) -> list[float]:
    """Of each bar: one apart, and a little more between layers."""
    return [index + 0.6 * part for part, (_, some) in enumerate(_parts(moments)) for index in some]


def _mark_limit(axes: Axes, limit: float, top: float) -> None:
    text = f"{limit:g} GiB for tensors"
    if limit < top:
        axes.axhline(limit, color="black", linestyle="--", linewidth=1)
    else:
        text += ", above this picture"
    at = {"xy": (0, min(limit, 0.985 * top)), "xycoords": ("axes fraction", "data")}
    axes.annotate(text, **at, xytext=(4, 3 if limit < top else -10), textcoords="offset points")


def _mark_peak(axes: Axes, moments: Sequence[Moment]) -> None:
    index = max(range(len(moments)), key=lambda each: moments[each].num_bytes)
    place, height = _places(moments)[index], moments[index].num_bytes / GIB
    axes.plot([place], [height], marker="v", color="black", clip_on=False)
    right = index > len(moments) / 2
    axes.annotate(
        f"{height:.1f} GiB: {moments[index].phase}",
        (place, height),
        xytext=(-6 if right else 6, 9),
        textcoords="offset points",
        ha="right" if right else "left",
    )


def _name_parts(axes: Axes, moments: Sequence[Moment]) -> None:
    """Layers under their bars, and under them the way that a step goes."""
    places, parts = _places(moments), _parts(moments)
    middles = [sum(places[index] for index in some) / len(some) for _, some in parts]
    axes.set_xticks(middles, [name for name, _ in parts])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(places[0] - 1, places[-1] + 1)
    loss = next(place for (name, _), place in zip(parts, middles, strict=True) if name == "loss")
    ways = {"forward, layers": (places[0] + loss) / 2, "backward, layers": (loss + places[-1]) / 2}
    for way, place in ways.items():
        at = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        axes.annotate(way, (place, 0), xytext=(0, -32), ha="center", **at)


def _title(plan: Plan) -> str:
    geometry, config = plan.geometry, plan.config
    return (
        f"{config.batch.seq_length:,} tokens over {geometry.p} ranks, "
        f"{config.model.num_layers} layers of {config.model.hidden_size}"
    )
