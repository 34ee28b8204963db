"""The memory of a plan as a figure: bytes by category over the actions of a step, and the offsets of its buffers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composable_shard._plan.schedule import MARKS, ROOT_NAME, Action, Kind
from composable_shard._plan.simulation import live_bytes
from composable_shard.report._plots import MIB, figure, tick_actions

if TYPE_CHECKING:
    from composable_shard._plan.arena import Arena, Lifetime
    from composable_shard._plan.plan import ShardPlan
    from composable_shard._plan.record import Record

_COLORS = {"kept": "#1f3d57", "weights": "#30638e", "landing": "#9cc3e0", "reductions": "#e3a15f"}
_WORDS = {
    "kept": "weights kept after forward",
    "weights": "weights",
    "landing": "landing buffers",
    "reductions": "reductions",
}
_MEASURED, _LIMIT = "#d1495b", "#6b7280"
_LEAST_TEXT = 0.04  # least fraction of the figure's width and height for a slot with a name
_LEAST_WIDTH, _LEAST_LENGTH = 0.012, 0.25  # least fractions of its width and height for a slot with a vertical name


def memory(plan: ShardPlan, path: str | Path, record: Record | None = None) -> None:
    """Draw the predicted memory of a training step: bytes by category above, offsets in the arena below.

    Args:
        plan: the plan. Its budget, if it has one, is drawn as a line.
        path: the picture to write. Its extension selects the format.
        record: the record of an iteration. Its live bytes are drawn next to the prediction, the i-th at the i-th
            action.

    Raises:
        ImportError: matplotlib is missing.
    """
    actions, lives, arena = plan.actions(), plan.lifetimes(), plan.arena()
    kept = frozenset(plan.effective_schedule().kept)
    with figure(path, width=10.0, height=7.0, rows=2) as (above, below):
        kinds = _by_kind(lives, kept, len(actions))
        _draw_bytes(above, kinds, record, plan.pool.budget)
        above.set_title(_peak(kinds, actions))
        _mark_backward(above, plan)
        _draw_arena(below, lives, arena, kept, actions)


def _kind(life: Lifetime, kept: frozenset[str]) -> str:
    """The category of a buffer. The weights of a kept group count as kept from their gather on."""
    what, _, fqn = life.name.partition(" ")
    if what == "small" or (what == "weights" and fqn in kept):
        return "kept"
    return "reductions" if what == "reduction" else what


def _by_kind(lives: Sequence[Lifetime], kept: frozenset[str], steps: int) -> dict[str, list[int]]:
    """Bytes after each action, by category."""
    kinds: dict[str, list[Lifetime]] = {kind: [] for kind in _COLORS}
    for life in lives:
        kinds[_kind(life, kept)].append(life)
    return {kind: live_bytes(each, steps) for kind, each in kinds.items()}


def _peak(kinds: dict[str, list[int]], actions: Sequence[Action]) -> str:
    """The title: the peak, and the first action after which it is reached."""
    live = [sum(each) for each in zip(*kinds.values(), strict=True)]
    peak = max(live, default=0)
    where = f", first at {actions[live.index(peak)]}" if live else ""
    return f"Where the memory of a step goes: peak {peak / MIB:.2f} MiB{where}"


def _mark_backward(axes: Any, plan: ShardPlan) -> None:
    """Mark the beginning of backward."""
    forward = list(itertools.takewhile(lambda action: action.kind is not Kind.BACKWARD, plan.timed()))
    turn = sum(action.kind not in MARKS for action in forward)
    if turn < len(plan.actions()):
        axes.axvline(turn, ymax=0.8, color=_LIMIT, linewidth=0.8, linestyle=":")
        middle = axes.get_ylim()[1] * 0.78
        axes.text(turn, middle, " backward", fontsize=7, color=_LIMIT, ha="left", va="bottom")


def _draw_bytes(axes: Any, kinds: dict[str, list[int]], record: Record | None, budget: int | None) -> None:
    steps = len(kinds["weights"])
    floor = [0.0] * steps
    for kind, live in kinds.items():
        top = [below + nbytes / MIB for below, nbytes in zip(floor, live, strict=True)]
        if any(live):
            axes.stairs(top, range(steps + 1), baseline=floor, fill=True, color=_COLORS[kind], label=_WORDS[kind])
        floor = top
    highest = max(floor, default=0.0)
    if record is not None:
        seen = [nbytes / MIB for nbytes in record.live_bytes]
        label = f"measured, peak {max(seen, default=0.0):.2f} MiB"
        axes.stairs(seen, range(len(seen) + 1), baseline=None, color=_MEASURED, linewidth=1.2, label=label)
        steps, highest = max(steps, len(seen)), max([highest, *seen])
    if budget is not None:
        axes.axhline(budget / MIB, color=_LIMIT, linestyle="--", label=f"budget {budget / MIB:.2f} MiB")
        highest = max(highest, budget / MIB)
    axes.set_xlim(0, max(1, steps))
    axes.set_ylim(0, 1.35 * highest or 1.0)  # space for the legend
    axes.tick_params(labelbottom=False)  # the axis below names the actions
    axes.set_ylabel("bytes leased (MiB)")
    axes.legend(frameon=False, loc="upper left", ncols=3, fontsize=8)


def _draw_arena(
    axes: Any, lives: Sequence[Lifetime], arena: Arena, kept: frozenset[str], actions: Sequence[Action]
) -> None:
    for life, slot in zip(arena.lifetimes, arena.slots, strict=True):
        if not slot.nbytes:
            continue
        bottom, height, width = slot.offset / MIB, slot.nbytes / MIB, life.closed - life.opened
        color = _COLORS[_kind(life, kept)]
        axes.broken_barh([(life.opened, width)], (bottom, height), facecolor=color, edgecolor="white", linewidth=0.6)
        share = width / len(actions), slot.nbytes / arena.nbytes
        _write_name(axes, life, (life.opened + width / 2, bottom + height / 2), share)
    gap = arena.nbytes / arena.bound - 1 if arena.bound else 0.0
    axes.set_title(
        f"Places in the arena: {arena.nbytes / MIB:.2f} MiB, {100 * gap:.1f} % above the lower bound of "
        f"{arena.bound / MIB:.2f} MiB"
    )
    axes.set_xlim(0, max(1, len(actions)))
    axes.set_ylim(0, 1.05 * arena.nbytes / MIB or 1.0)
    axes.set_ylabel("offset (MiB)")
    tick_actions(axes, actions)


def _write_name(axes: Any, life: Lifetime, middle: tuple[float, float], share: tuple[float, float]) -> None:
    """Write the name of a slot's group in its middle, vertically if it is narrow. Omit the name if it does not fit.

    Args:
        share: fraction of the figure's width and height that the slot takes.
    """
    upright = share[0] < _LEAST_TEXT
    if share[0] >= _LEAST_WIDTH and share[1] >= (_LEAST_LENGTH if upright else _LEAST_TEXT):
        words: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6, "color": "white", "clip_on": True}
        axes.text(*middle, life.name.partition(" ")[2] or ROOT_NAME, rotation=90 if upright else 0, **words)
