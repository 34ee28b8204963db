"""The parts that all figures of this package share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composable_shard._plan.schedule import Action

MIB = 1 << 20


def tick_actions(axes: Any, actions: Sequence[Action]) -> None:
    """Label an axis with the names of actions; with some of them if there are many."""
    shown = range(0, len(actions), max(1, len(actions) // 40))
    axes.set_xticks([i + 0.5 for i in shown], [str(actions[i]) for i in shown], rotation=90, fontsize=6)
    axes.set_xlabel("actions in order of issue")


@contextmanager
def figure(path: str | Path, *, width: float = 7.0, height: float = 4.5, rows: int = 1) -> Iterator[list[Any]]:
    """Context with axes, one above the other. It saves them to `path`, without a display or global state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "composable_shard.report draws with matplotlib, which is not installed: pip install matplotlib"
        ) from error
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    every_axes = [made.add_subplot(rows, 1, row + 1) for row in range(rows)]
    for axes in every_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    yield every_axes
    made.savefig(path, dpi=130)
