"""Plain functions that draw rows or a record and write a picture file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composable_shard._plan.record import Record
    from composable_shard._plan.schedule import Action

    Row = Mapping[str, float]

MIB = 1 << 20

# Measured values, values that stand out, and values to compare with.
_MEASURED, _HELD_OUT, _REFERENCE = "#30638e", "#d1495b", "#6b7280"


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Read the rows of a metrics file with one JSON object per line. An incomplete last line is ignored.

    Raises:
        ValueError: another line is not valid JSON. The message gives its number.
    """
    rows: list[dict[str, float]] = []
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number}: not a JSON object: {error}") from error
    return rows


def plot_loss(
    metrics: Sequence[Row] | str | Path,
    path: str | Path,
    *,
    references: Mapping[str, float] | None = None,
) -> None:
    """Draw the loss of each step, raw and smoothed, and the held-out loss of the steps that have one.

    Args:
        metrics: rows with `step`, `loss` (nats per byte) and, in some rows, `held_out`; or a metrics file.
        path: the picture to write. Its extension selects the format.
        references: horizontal lines to compare with, by name.

    Raises:
        ValueError: no row has a loss.
        ImportError: matplotlib is missing.
    """
    rows: Sequence[Row] = read_metrics(metrics) if isinstance(metrics, str | Path) else metrics
    steps = [row["step"] for row in rows if "loss" in row]
    losses = [row["loss"] for row in rows if "loss" in row]
    if not steps:
        raise ValueError("plot_loss: no row has a `loss`; train at least one step first")
    measured = [(row["step"], row["held_out"]) for row in rows if "held_out" in row]
    with _figure(path) as axes:
        axes.plot(steps, losses, color=_MEASURED, alpha=0.25, linewidth=0.8)
        axes.plot(steps, _smooth(losses), color=_MEASURED, label="training")
        if measured:
            axes.plot(*zip(*measured, strict=True), "o-", color=_HELD_OUT, label="held out")
        for name, value in (references or {}).items():
            axes.axhline(value, color=_REFERENCE, linestyle="--", label=f"{name} {value:.2f}")
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per byte)")
        axes.legend(frameon=False)


def plot_memory(
    record: Record,
    path: str | Path,
    *,
    predicted_peak: int | None = None,
    title: str = "Memory of one iteration",
) -> None:
    """Draw the live bytes of the pool after each action of an iteration.

    Args:
        record: the record of the iteration. `live_bytes[i]` is the value after `actions[i]`.
        path: the picture to write. Its extension selects the format.
        predicted_peak: peak bytes that the plan predicts, drawn as a line.
        title: title of the figure.

    Raises:
        ValueError: the record has no actions.
        ImportError: matplotlib is missing.
    """
    if not record.actions:
        raise ValueError("plot_memory: the record has no actions; run one whole iteration first")
    live = [held / MIB for held in record.live_bytes]
    peak = max(live)
    foreseen = None if predicted_peak is None else predicted_peak / MIB
    with _figure(path, width=10.0) as axes:
        axes.stairs(live, range(len(live) + 1), baseline=None, color=_MEASURED)
        axes.stairs(live, range(len(live) + 1), fill=True, color=_MEASURED, alpha=0.2)
        axes.axhline(peak, color=_HELD_OUT, linewidth=0.8, label=f"peak {peak:.2f} MiB")
        if foreseen is not None:
            label = f"predicted peak {foreseen:.2f} MiB"
            axes.axhline(foreseen, color=_REFERENCE, linestyle="--", label=label)
        axes.set_ylim(0, 1.25 * max(peak, foreseen or 0.0))  # space for the legend
        axes.set_xlim(0, len(live))
        tick_actions(axes, record.actions)
        axes.set_ylabel("unsharded parameters and\nreduce buffers (MiB)")
        axes.set_title(title)
        axes.legend(frameon=False, loc="upper left", ncols=2)


def plot_resident_memory(metrics: Sequence[Row], path: str | Path) -> None:
    """Draw the memory of a process over its training.

    Args:
        metrics: rows with `seconds` and `memory_bytes`.
        path: the picture to write. Its extension selects the format.

    Raises:
        ValueError: no row has both.
        ImportError: matplotlib is missing.
    """
    points = [
        (row["seconds"], row["memory_bytes"] / MIB) for row in metrics if "seconds" in row and "memory_bytes" in row
    ]
    if not points:
        raise ValueError("plot_resident_memory: no row has both `seconds` and `memory_bytes`")
    with _figure(path) as axes:
        axes.plot(*zip(*points, strict=True), color=_MEASURED)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("seconds of training")
        axes.set_ylabel("memory of one process (MiB)")


def tick_actions(axes: Any, actions: Sequence[Action]) -> None:
    """Label an axis with the names of actions; with some of them if there are many."""
    shown = range(0, len(actions), max(1, len(actions) // 40))
    axes.set_xticks([i + 0.5 for i in shown], [str(actions[i]) for i in shown], rotation=90, fontsize=6)
    axes.set_xlabel("actions in order of issue")


@contextmanager
def _figure(path: str | Path, *, width: float = 7.0) -> Iterator[Any]:
    """A `figure` with one plot; returns its axes."""
    with figure(path, width=width) as (axes,):
        yield axes


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


def _smooth(values: Sequence[float], weight: float = 0.95) -> list[float]:
    """A moving average without a bias toward zero at the beginning."""
    smooth, total, share = [], 0.0, 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        share = weight * share + (1 - weight)
        smooth.append(total / share)
    return smooth
