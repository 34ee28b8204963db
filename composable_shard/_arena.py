"""Lifetimes of buffers, and the most bytes that live at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer of `nbytes` bytes that is live from step `opened` up to, and without, step `closed`."""

    name: str
    nbytes: int
    opened: int
    closed: int


def peak_bytes(lifetimes: Iterable[Lifetime]) -> int:
    """The lower bound of any arrangement: the largest sum of bytes that are live at one step."""
    changes: dict[int, int] = {}
    for life in lifetimes:
        changes[life.opened] = changes.get(life.opened, 0) + life.nbytes
        changes[life.closed] = changes.get(life.closed, 0) - life.nbytes
    live = peak = 0
    for step in sorted(changes):
        live += changes[step]
        peak = max(peak, live)
    return peak
