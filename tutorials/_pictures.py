"""Create the tutorials' pictures with matplotlib (the extra `plot`)."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if importlib.util.find_spec("matplotlib") is None:  # fail before the script runs, not at the end
    raise SystemExit("this tutorial requires matplotlib: pip install matplotlib")

BLUE, PALE, SAND, RED = "#30638e", "#9cc3e0", "#e3a15f", "#d1495b"
GREEN, GREY = "#66a182", "#d5dde4"


@contextmanager
def picture(path: Path, width: float, height: float, *, rows: int = 1, columns: int = 1, **how: Any) -> Iterator[Any]:
    """Yield the axes of a new picture (an array if there are several), and save it at the end of the block.

    `width` and `height` are in inches. `how` is passed to matplotlib's `Figure.subplots`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, **how)
    for each in figure.axes:
        each.spines[["top", "right"]].set_visible(False)
    yield axes
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
