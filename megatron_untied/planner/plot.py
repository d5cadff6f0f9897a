"""A picture of a step: device memory by category, from the first forward to the optimizer."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_untied.phases import MemoryCategory, Phase
from megatron_untied.planner.plan import Plan
from megatron_untied.planner.step import MemorySnapshot
from megatron_untied.platform.device import GIB

COLORS = {
    MemoryCategory.STATES: "#4c566a",
    MemoryCategory.GRADIENTS: "#7b88a1",
    MemoryCategory.GATHERED: "#8fbcbb",
    MemoryCategory.WEIGHT_GRADIENTS: "#5e81ac",
    MemoryCategory.INPUTS: "#d8dee9",
    MemoryCategory.KEPT: "#a3be8c",
    MemoryCategory.RESIDUAL: "#ebcb8b",
    MemoryCategory.SLOTS: "#d08770",
    MemoryCategory.CHUNKS: "#bf616a",
    MemoryCategory.KERNEL: "#7d2e38",
    MemoryCategory.TILES: "#b48ead",
    MemoryCategory.LOGITS: "#88c0d0",
}
"""From the bottom of the stack to its top: what lasts longest first."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Neighboring bars of one layer, or of none."""

    name: str
    places: list[float]
    """Of its bars on the x axis."""
    middle: float


def draw(plan: Plan) -> Figure:
    """Stacked memory over the snapshots of a step, with the limit and the peak.

    Layers that are like their neighbors are left out.
    """
    snapshots = replace(plan, every_layer=False).snapshots
    groups = _groups(snapshots)
    places = [place for group in groups for place in group.places]
    limit, peak = plan.machine.device_bytes / GIB, plan.peak.num_bytes / GIB
    figure, axes = pyplot.subplots(figsize=(12, 5.5), layout="constrained")
    bottom = [0.0] * len(snapshots)
    for category, color in COLORS.items():
        heights = [snapshot.by_category[category] / GIB for snapshot in snapshots]
        if any(heights):
            axes.bar(places, heights, 0.94, bottom, color=color, label=category)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    # A limit far above the peak would flatten the bars: it is stated at the top instead.
    top = 1.2 * max(limit, peak) if limit < 2 * peak else 1.35 * peak
    title = (
        f"{plan.config.batch.seq_length:,} tokens over {plan.geometry.num_context} ranks, "
        f"{plan.config.model.num_layers} layers of {plan.config.model.hidden_size}"
    )
    axes.set(ylim=(0, top), ylabel="GiB per GPU", title=title)
    text, is_inside = f"{limit:g} GiB for tensors", limit < top
    if is_inside:
        axes.axhline(limit, color="black", linestyle="--", linewidth=1)
    axes.annotate(
        text if is_inside else f"{text}, above this picture",
        xy=(0, min(limit, 0.985 * top)),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3 if is_inside else -10),
        textcoords="offset points",
    )
    _mark_peak(axes, snapshots, places)
    _label_groups(axes, groups)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    return figure


def _groups(snapshots: Sequence[MemorySnapshot]) -> list[_Group]:
    """Bars are one apart, and a little more between groups."""
    groups: list[_Group] = []
    by_layer = itertools.groupby(
        enumerate(snapshots), lambda item: (item[1].layer, item[1].phase is Phase.LOSS)
    )
    for (layer, is_loss), members in by_layer:
        name = "loss" if is_loss else "" if layer is None else str(layer + 1)
        gap = 0.6 * len(groups)
        places = [index + gap for index, _ in members]
        groups.append(_Group(name, places, sum(places) / len(places)))
    return groups


def _mark_peak(axes: Axes, snapshots: Sequence[MemorySnapshot], places: Sequence[float]) -> None:
    index = max(range(len(snapshots)), key=lambda i: snapshots[i].num_bytes)
    place, height = places[index], snapshots[index].num_bytes / GIB
    axes.plot([place], [height], marker="v", color="black", clip_on=False)
    is_right = index > len(snapshots) / 2  # then the text goes to the left, into the picture
    axes.annotate(
        f"{height:.1f} GiB: {snapshots[index].phase}",
        (place, height),
        xytext=(-6 if is_right else 6, 9),
        textcoords="offset points",
        ha="right" if is_right else "left",
    )


def _label_groups(axes: Axes, groups: Sequence[_Group]) -> None:
    """Layers under their bars, and below them the direction of the step."""
    first, last = groups[0].places[0], groups[-1].places[-1]
    axes.set_xticks([group.middle for group in groups], [group.name for group in groups])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(first - 1, last + 1)
    loss = next(group.middle for group in groups if group.name == "loss")
    position = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    for label, start, end in (("forward", first, loss), ("backward", loss, last)):
        middle = (start + end) / 2
        text = f"{label}, layers"
        axes.annotate(text, (middle, 0), xytext=(0, -32), ha="center", **position)
