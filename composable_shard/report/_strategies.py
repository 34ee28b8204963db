"""What each strategy would do, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composable_shard.planner import Advice


def strategies(advice: Advice, path: str | Path, most: int = 12) -> None:
    """Draw what each strategy would do: its memory by kind beside what a device has, and its time against bandwidth.

    Args:
        advice: what `composable_shard.advise` has given.
        path: the picture to write; its ending gives the kind.
        most: how many strategies, the recommended one first.

    Raises:
        ImportError: matplotlib is missing.
    """
    from composable_shard.planner import draw  # which loads the planner

    draw(advice, path, most)
