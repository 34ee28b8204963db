"""An advice as a picture: memory by category for each strategy, and the step time over bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from .advise import Advice, Estimate
from .machine import Link, Machine
from .memory import Bytes
from .text import shown

_SCALES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
_COLORS = ("#30638e", "#7aa6c2", "#e3b23c", "#d1495b", "#66a182", "#9aa0a6", "#8f6bb3")
_LINES = 6


def draw(advice: Advice, path: str | Path, most: int = 12) -> None:
    """Draw the memory of each strategy, and the step time of the best layouts over the bandwidth of the link.

    Args:
        advice: the advice.
        path: the picture to write. Its extension selects the format.
        most: number of strategies to draw, the recommended one first.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    estimates = shown(advice, most)
    figure = Figure(figsize=(11, 2.4 + 0.3 * len(estimates)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _memory(left, advice, estimates)
    best = {
        (each.strategy.name, each.strategy.layout): each
        for each in reversed(advice.estimates)
        if not each.strategy.offloads
    }
    _times(right, advice, list(reversed(best.values()))[:_LINES])
    figure.suptitle(f"{advice.model} on {advice.devices} x {advice.machine.name}", x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=150)


def _memory(axes: Any, advice: Advice, estimates: Sequence[Estimate]) -> None:
    names = [str(each.strategy) for each in estimates]
    begin = [0.0] * len(estimates)
    for color, field in zip(_COLORS, fields(Bytes), strict=True):
        sizes = [getattr(each.memory.most, field.name) / 2**30 for each in estimates]
        axes.barh(range(len(names)), sizes, left=begin, color=color, label=field.name)
        begin = [one + two for one, two in zip(begin, sizes, strict=True)]
    for row, (each, end) in enumerate(zip(estimates, begin, strict=True)):
        axes.annotate(_words(each), (end, row), (4, 0), textcoords="offset points", va="center", fontsize=7)
    axes.axvline(advice.machine.memory / 2**30, color="black", linewidth=1, linestyle="--", zorder=0)
    axes.set_xlim(0, 1.3 * max([*begin, advice.machine.memory / 2**30]))  # space for the labels
    if advice.recommended is not None:
        names[0] = f"{names[0]} (recommended)"
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("GiB per device, maximum of each category (dashed: device memory)")
    axes.tick_params(axis="y", labelsize=8)
    axes.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=7)
    axes.spines[["top", "right"]].set_visible(False)


def _times(axes: Any, advice: Advice, estimates: Sequence[Estimate]) -> None:
    spans = advice.devices > advice.machine.devices_per_node
    link = advice.machine.inter_node if spans else advice.machine.intra_node
    bandwidths = [scale * link.bandwidth for scale in _SCALES]
    series: dict[str, list[float]] = {str(each.strategy): [] for each in estimates}
    for bandwidth in bandwidths:
        times = {str(each.strategy): each.time.seconds for each in advice.on(_with(advice.machine, bandwidth, spans))}
        for name, seconds in series.items():
            seconds.append(times[name])
    for heights, names in _alike(series).items():
        label = ", ".join(names)
        axes.plot([each / 1e9 for each in bandwidths], heights, marker="o", markersize=3, linewidth=1.2, label=label)
    axes.axvline(link.bandwidth / 1e9, color="black", linewidth=1, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(f"GB/s {'between nodes' if spans else 'within a node'} (dashed: this machine)")
    axes.set_ylabel("seconds per step")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _words(estimate: Estimate) -> str:
    """The label of a bar: the step time and the exposed communication."""
    fits = "" if estimate.fits else "does not fit; "
    return f"{fits}{estimate.time.seconds:.3g} s, {estimate.exposed_share:.0%} exposed"


def _alike(series: Mapping[str, Sequence[float]]) -> dict[tuple[float, ...], list[str]]:
    """The names of all series with the same curve, by its values."""
    names: dict[tuple[float, ...], list[str]] = {}
    for name, values in series.items():
        names.setdefault(tuple(float(f"{value:.3g}") for value in values), []).append(name)
    return names


def _with(machine: Machine, bandwidth: float, spans: bool) -> Machine:
    if spans:
        return replace(machine, inter_node=Link(bandwidth, machine.inter_node.latency))
    return replace(machine, intra_node=Link(bandwidth, machine.intra_node.latency))
