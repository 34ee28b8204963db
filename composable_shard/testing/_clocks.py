"""The clocks of a fabric. They give the times at which collectives start, finish and are waited for.

real      this machine's clock: a wait sleeps, and compute takes its real duration
virtual   advances only by waits and by declared compute: exact, and a run takes no time
streams   a virtual clock for each stream: a wait delays a stream and never the host, as on an accelerator
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_SPIN_S = 0.5e-3  # `time.sleep` may return this much late, so the last part of a wait polls the clock


@dataclass
class Collective:
    """A collective on a fabric. Times are seconds since the fabric was entered or last reset.

    Attributes:
        kind: `all_gather`, `reduce_scatter`, ...
        group: description of the process group, or its name.
        ranks: number of ranks of the group.
        nbytes: bytes of the full tensor: the output of a gather, the input of a scatter or reduction.
        link: name of the link that the group uses.
        issue_s: when it was called.
        start_s: when the link started it.
        finish_s: when its result was available.
        first_wait_s: when it was first waited for; None if nothing has waited for it yet.
        exposed_s: how long the host waited for it; with ``clock="streams"``, how long the compute stream waited.
    """

    kind: str
    group: str
    ranks: int
    nbytes: int
    link: str
    issue_s: float
    start_s: float
    finish_s: float
    first_wait_s: float | None = None
    exposed_s: float = 0.0


class RealClock:
    """This machine's clock, without the cost of the simulation: it is stopped while the fabric copies data.

    If a sleep ends late on a busy machine, the delay is subtracted too. So it does not shift later events.

    Attributes:
        aside_s: seconds for which the clock was stopped.
    """

    def __init__(self) -> None:
        self.aside_s = 0.0

    def now(self) -> float:
        return time.monotonic() - self.aside_s

    @contextmanager
    def stopped(self) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.aside_s += time.monotonic() - begin

    def wait(self, finish_s: float, of: Collective) -> None:
        """Sleep until `finish_s`, and add the time until then to the exposed time of the collective `of`."""
        left = finish_s - self.now()
        if left > 0:
            of.exposed_s += left
            self._sleep_until(finish_s)

    def compute(self, seconds: float) -> None:
        """Sleep for `seconds`."""
        self._sleep_until(self.now() + seconds)

    def level(self) -> None:
        """Set all streams to the same time; this clock has no streams."""

    def _sleep_until(self, at_s: float) -> None:
        while (left := at_s - self.now()) > 0:
            if left > _SPIN_S:
                time.sleep(left - _SPIN_S)
        self.aside_s -= left


class VirtualClock:
    """A clock that advances only by waits and by declared compute."""

    aside_s = 0.0

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    @contextmanager
    def stopped(self) -> Iterator[None]:
        yield

    def wait(self, finish_s: float, of: Collective) -> None:
        if finish_s > self._now:
            of.exposed_s += finish_s - self._now
            self._now = finish_s

    def compute(self, seconds: float) -> None:
        self._now += seconds

    def level(self) -> None:
        pass


class Stream:
    """A CPU stream with a simulated time. It has the methods of `torch.cpu.Stream`.

    Attributes:
        time_s: when all queued work will be done.
        cause: the collective that the last queued wait was for; None if compute was queued after it.
    """

    def __init__(self, clock: StreamClock, time_s: float) -> None:
        self._clock = clock
        self.time_s = time_s
        self.cause: Collective | None = None

    def wait_event(self, event: Event) -> None:
        self.reach(event.time_s, event.cause)

    def wait_stream(self, stream: Stream) -> None:
        self.reach(stream.time_s, stream.cause)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._clock)
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass

    def reach(self, time_s: float, cause: Collective | None) -> None:
        """Delay work that is queued from now on until `time_s`."""
        if time_s > self.time_s:
            if cause is not None and self is self._clock.default:
                cause.exposed_s += time_s - self.time_s
            self.time_s, self.cause = time_s, cause


class Event:
    """A CPU event with a simulated time. It has the methods of `torch.cpu.Event`."""

    def __init__(self, clock: StreamClock) -> None:
        self._clock = clock
        self.time_s = float("-inf")
        self.cause: Collective | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._clock.current()
        self.time_s, self.cause = stream.time_s, stream.cause

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._clock.current()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class StreamClock:
    """A virtual clock for each stream. The host takes no time and never waits."""

    aside_s = 0.0

    def __init__(self) -> None:
        self.default = Stream(self, 0.0)
        self._all = [self.default]

    def current(self) -> Stream:
        stream = torch.cpu.current_stream()
        return stream if isinstance(stream, Stream) else self.default

    def stream(self, priority: int = -1) -> Stream:
        """Create a stream; replaces `torch.cpu.Stream`."""
        self._all.append(Stream(self, 0.0))
        return self._all[-1]

    def event(self) -> Event:
        """Create an event; replaces `torch.cpu.Event`."""
        return Event(self)

    def now(self) -> float:
        return self.current().time_s

    @contextmanager
    def stopped(self) -> Iterator[None]:
        yield

    def wait(self, finish_s: float, of: Collective) -> None:
        self.current().reach(finish_s, of)

    def compute(self, seconds: float) -> None:
        stream = self.current()
        stream.time_s, stream.cause = stream.time_s + seconds, None

    def level(self) -> None:
        latest = max(stream.time_s for stream in self._all)
        for stream in self._all:
            stream.time_s, stream.cause = latest, None


Clock = RealClock | VirtualClock | StreamClock
