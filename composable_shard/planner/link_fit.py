"""The latency and the bandwidth of a link, from the times of messages of several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .._errors import ShardConfigValueError
from .machine import Link


@dataclass(frozen=True)
class LinkFit:
    """A link that explains measured times.

    Attributes:
        link: the link.
        error: by which part of a measured time the formula is off, at most.
    """

    link: Link
    error: float


def sent(nbytes: int, ranks: int) -> float:
    """Bytes that a rank sends in a collective of `nbytes`, all ranks' parts together."""
    return (ranks - 1) / ranks * nbytes


def fit_link(amounts: Sequence[float], seconds: Sequence[float]) -> LinkFit:
    """The link of which ``latency + amount / bandwidth`` comes nearest to measured times.

    Least squares of relative errors, so that small messages count as much as large ones. A latency that would be
    negative is 0.

    Args:
        amounts: bytes that a rank sends, above 0; for collectives those of `sent`.
        seconds: measured for each, above 0.

    Raises:
        ShardConfigValueError: there are less than two sizes, or times are not above 0.
    """
    moved, times = np.asarray(amounts, dtype=float), np.asarray(seconds, dtype=float)
    if len(set(amounts)) < 2 or moved.shape != times.shape:
        raise ShardConfigValueError(f"fit_link: expected times of two sizes at least, got {len(set(amounts))} sizes")
    if not (np.isfinite(times).all() and times.min() > 0 and moved.min() > 0):
        raise ShardConfigValueError("fit_link: expected bytes and seconds above 0")
    latency, per_byte = np.linalg.lstsq(np.stack([1 / times, moved / times], axis=1), np.ones(len(times)))[0]
    if latency < 0 or per_byte <= 0:  # no latency to be seen beside the bytes
        ratios = moved / times
        latency, per_byte = 0.0, ratios.sum() / (ratios**2).sum()
    error = np.abs((latency + moved * per_byte) / times - 1).max()
    return LinkFit(Link(bandwidth=float(1 / per_byte), latency=float(latency)), float(error))
