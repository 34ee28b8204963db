"""The times of a step: spans of compute, of collectives and of waits, by group.

`Actions` and the engine notify a `Stopwatch` when compute of a group begins and ends. `Recorder` runs other work
through it. With a `serial` stopwatch, each collective is waited for where it is issued, so that it is timed separately.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .._plan.record import Span
from .._plan.schedule import Kind

T = TypeVar("T")


_clock: Callable[[], float] = time.perf_counter


def use_clock(now: Callable[[], float]) -> Callable[[], float]:
    """Read times, in seconds, from another clock; returns the old clock."""
    global _clock
    before, _clock = _clock, now
    return before


class Stopwatch:
    """Times the actions of one engine.

    Args:
        device: the groups' device. A serial stopwatch synchronizes an accelerator at each reading.
        serial: see the attribute.

    Attributes:
        serial: whether each collective is waited for where it is issued.
    """

    def __init__(self, device: torch.device, serial: bool = False) -> None:
        self.serial = serial
        self._device = device
        self._running: list[tuple[Kind, str, float, int]] = []  # with the index in `_spans`
        self._spans: list[Span | None] = []  # in the order in which they began; None for spans that have not ended
        self._origin = self._read()

    def _read(self) -> float:
        if self.serial and self._device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self._device)
        return _clock()

    def begin(self, kind: Kind, fqn: str) -> None:
        """Begin a group's forward or backward compute. A backward also ends the previous backward."""
        if kind is Kind.BACKWARD:
            self.end(kind)
        self._running.append((kind, fqn, self._read(), self._new_index()))

    def runs(self, kind: Kind) -> bool:
        """Whether the compute that began last and has not ended is of this kind."""
        return bool(self._running) and self._running[-1][0] is kind

    def end(self, kind: Kind) -> None:
        """End the compute that began last, if it is of this kind."""
        if self.runs(kind):
            _, fqn, begin, index = self._running.pop()
            self._ended(kind, fqn, begin, index)

    def timed(self, kind: Kind, fqn: str, work: Callable[..., T], *args: Any) -> T:
        """Call `work` and record its span."""
        begin, index = self._read(), self._new_index()
        result = work(*args)
        self._ended(kind, fqn, begin, index)
        return result

    def _new_index(self) -> int:
        self._spans.append(None)
        return len(self._spans) - 1

    def _ended(self, kind: Kind, fqn: str, begin: float, index: int) -> None:
        self._spans[index] = Span(kind, fqn, begin - self._origin, self._read() - self._origin)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans so far, in the order in which they began."""
        return tuple(filter(None, self._spans))

    def clear(self) -> None:
        """Discard the spans so far, because the next iteration begins."""
        self._spans, self._origin = [], self._read()
        self._running.clear()
