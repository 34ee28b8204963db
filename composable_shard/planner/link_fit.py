"""Fit the latency and the bandwidth of a link to the times of messages of several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ShardConfigValueError
from .machine import Link


@dataclass(frozen=True)
class LinkFit:
    """A link that was fitted to measured times.

    Attributes:
        link: the link.
        error: largest relative error of the formula.
    """

    link: Link
    error: float


def sent(nbytes: int, ranks: int) -> float:
    """Bytes that a rank sends in a collective of `nbytes`, summed over ranks."""
    return (ranks - 1) / ranks * nbytes


def fit_link(amounts: Sequence[float], seconds: Sequence[float]) -> LinkFit:
    """Fit the link whose ``latency + amount / bandwidth`` is closest to the measured times.

    Minimizes the squares of relative errors, so that small messages count as much as large ones. A negative latency is
    replaced by 0.

    Args:
        amounts: bytes that a rank sends, above 0. For collectives, use `sent`.
        seconds: the measured time of each amount, above 0.

    Raises:
        ShardConfigValueError: there are fewer than two sizes, the lengths differ, or a value is not above 0.
    """
    moved, times = np.asarray(amounts, dtype=float), np.asarray(seconds, dtype=float)
    if len(set(amounts)) < 2 or moved.shape != times.shape:
        raise ShardConfigValueError(f"fit_link: expected times of at least two sizes, got {len(set(amounts))} sizes")
    if not (np.isfinite(times).all() and times.min() > 0 and moved.min() > 0):
        raise ShardConfigValueError("fit_link: expected bytes and seconds above 0")
    latency, per_byte = np.linalg.lstsq(np.stack([1 / times, moved / times], axis=1), np.ones(len(times)))[0]
    if latency < 0 or per_byte <= 0:  # the latency is too small to be measured: fit only the bandwidth
        ratios = moved / times
        latency, per_byte = 0.0, ratios.sum() / (ratios**2).sum()
    error = np.abs((latency + moved * per_byte) / times - 1).max()
    return LinkFit(Link(bandwidth=float(1 / per_byte), latency=float(latency)), float(error))
