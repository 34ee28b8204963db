"""The time of a step as a figure: total compute and waits, and the waits of each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composable_shard._plan.course import COMPUTE
from composable_shard._plan.record import own_seconds
from composable_shard._plan.schedule import ROOT_NAME, Kind
from composable_shard._plan.waits import waits_of
from composable_shard.report._explain import with_times
from composable_shard.report._measured import measured, worked
from composable_shard.report._plots import figure

if TYPE_CHECKING:
    from composable_shard._plan.plan import ShardPlan
    from composable_shard._plan.record import Record

_COLORS = {
    "forward": "#30638e",
    "backward": "#1f3d57",
    "waiting for gathers": "#9cc3e0",
    "waiting for reductions": "#e3a15f",
    "outside of groups": "#d5dde4",
}
_KINDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.WAIT: "waiting for gathers",
    Kind.UNSHARD: "waiting for gathers",
    Kind.REDUCED: "waiting for reductions",
    Kind.REDUCE: "waiting for reductions",
}
_WAITS = ("waiting for gathers", "waiting for reductions")
_MEASURED = "#d1495b"
_LEAST_TEXT = 0.05  # least fraction of the figure's width for a part with its milliseconds
_MOST = 24  # limit of groups in the figure
_UPRIGHT = 6  # limit of groups whose names fit horizontally

_ByGroup = dict[str, dict[str, float]]  # seconds by kind, by group


def time(plan: ShardPlan, path: str | Path, record: Record | None = None) -> None:
    """Draw where the time of a training step goes: total compute and waits above, the waits of each group below.

    Args:
        plan: a plan with costs, as `PrefetchPolicy.auto` measures them. A plan without costs uses those of the record.
        path: the picture to write. Its extension selects the format.
        record: the record of an iteration. If the model was watched, its times are drawn next to the predicted ones. On
            an accelerator they are host times.

    Raises:
        ShardConfigValueError: neither the plan nor the record has times, or the record is of another model.
        ImportError: matplotlib is missing.
    """
    predicted = _predicted(with_times(plan, record))
    sides = {"predicted": _in_all(predicted)}
    seen = None if record is None else measured(record)
    by_group: _ByGroup = {}
    if record is not None and seen is not None:
        by_group = _by_group(own_seconds(worked(record)))
        sides["measured"] = {**_in_all(by_group), "outside of groups": seen.elsewhere}
    with figure(path, width=10.0, height=6.0, rows=2) as (above, below):
        _draw_sides(above, sides)
        _draw_waits(below, predicted, by_group)


def _predicted(plan: ShardPlan) -> _ByGroup:
    step = plan.trace()
    assert step is not None
    seconds: dict[tuple[Kind, str], float] = {}
    for kind, fqn, begin, end in step.spans:
        if kind in COMPUTE:
            seconds[kind, fqn] = seconds.get((kind, fqn), 0.0) + end - begin
    for wait in waits_of(plan):
        seconds[wait.kind, wait.fqn] = seconds.get((wait.kind, wait.fqn), 0.0) + wait.waited
    return {fqn: {} for fqn in plan.order} | _by_group(seconds)


def _by_group(seconds: Mapping[tuple[Kind, str], float]) -> _ByGroup:
    groups: _ByGroup = {}
    for (kind, fqn), took in seconds.items():
        group = groups.setdefault(fqn, {})
        group[_KINDS[kind]] = group.get(_KINDS[kind], 0.0) + took
    return groups


def _in_all(groups: _ByGroup) -> dict[str, float]:
    return {kind: sum(group.get(kind, 0.0) for group in groups.values()) for kind in _COLORS}


def _draw_sides(axes: Any, sides: Mapping[str, Mapping[str, float]]) -> None:
    whole = max(sum(parts.values()) for parts in sides.values())
    names = [f"{name}\n{1e3 * sum(parts.values()):,.2f} ms" for name, parts in sides.items()]
    begins = [0.0] * len(sides)
    for kind, color in _COLORS.items():
        widths = [1e3 * parts.get(kind, 0.0) for parts in sides.values()]
        if not any(widths):
            continue
        bars = axes.barh(names, widths, left=begins, color=color, label=kind, height=0.6)
        shown = [f"{width:,.2f}" if width >= _LEAST_TEXT * 1e3 * whole else "" for width in widths]
        light = "white" if kind in ("forward", "backward") else "black"
        axes.bar_label(bars, shown, label_type="center", color=light, fontsize=8)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ms of a training step")
    axes.set_title("Where the step's time goes", pad=24)
    axes.legend(frameon=False, fontsize=8, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _draw_waits(axes: Any, predicted: _ByGroup, seen: _ByGroup) -> None:
    """Draw the waits of groups, in order. If there are many, draw those with the longest waits."""
    shown = _longest(predicted, seen)
    numbers = range(len(shown))
    tops = _draw_bars(axes, [predicted[fqn] for fqn in shown])
    waited = [1e3 * _waited(seen, fqn) for fqn in shown]
    if seen:
        axes.plot(numbers, waited, "D", color=_MEASURED, markersize=5, label="measured, total")
    turned: dict[str, Any] = {"rotation": 45, "ha": "right"} if len(shown) > _UPRIGHT else {}
    axes.set_xticks(numbers, [fqn or ROOT_NAME for fqn in shown], **turned)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylim(0, 1.3 * max([*tops, *waited], default=0.0) or 1.0)  # space for the legend
    axes.set_ylabel("exposed ms")
    left_out = len(predicted) - len(shown)
    title = "Exposed communication by group, in the order of forward"
    axes.set_title(f"{title}; {left_out} groups with less are not shown" if left_out else title)
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=3)


def _draw_bars(axes: Any, groups: Sequence[Mapping[str, float]]) -> list[float]:
    """Draw a bar for each group with its types of waits stacked. Return the heights."""
    floor = [0.0] * len(groups)
    for kind in _WAITS:
        heights = [1e3 * group.get(kind, 0.0) for group in groups]
        axes.bar(range(len(groups)), heights, bottom=floor, color=_COLORS[kind], label=kind, width=0.7)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    return floor


def _longest(predicted: _ByGroup, seen: _ByGroup) -> list[str]:
    """The groups with the longest waits, in their order."""
    longest = sorted(predicted, key=lambda fqn: -max(_waited(predicted, fqn), _waited(seen, fqn)))[:_MOST]
    return [fqn for fqn in predicted if fqn in longest]


def _waited(groups: _ByGroup, fqn: str) -> float:
    return sum(groups.get(fqn, {}).get(kind, 0.0) for kind in _WAITS)
