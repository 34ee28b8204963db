"""The predictions for each strategy as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composable_shard.planner import Advice


def strategies(advice: Advice, path: str | Path, most: int = 12) -> None:
    """Draw the predicted memory of each strategy by category, and its step time over bandwidth.

    Args:
        advice: the result of `composable_shard.planner.advise`.
        path: the picture to write. Its extension selects the format.
        most: number of strategies to draw, the recommended one first.

    Raises:
        ImportError: matplotlib is missing.
    """
    from composable_shard.planner import draw  # here, because it loads the planner

    draw(advice, path, most)
