"""The clocks of a fabric: by which collectives begin and end, and by which one waits for them.

real      this machine's; waiting sleeps, compute takes what it takes
virtual   stands still but for compute that is declared and for waits: exact, and over in no time
streams   the same for each stream: what is waited for holds a stream up and never the host, as on an accelerator
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_SPIN_S = 0.5e-3  # what sleeping may overshoot


@dataclass
class Collective:
    """One collective, as the fabric saw it; times in seconds since the fabric was entered or last reset.

    Attributes:
        kind: `all_gather`, `reduce_scatter`, ...
        group: the process group's description, or its name.
        ranks: of the group.
        nbytes: of the whole: the gathered tensor, the one to be scattered, the one to be reduced.
        link: that serves the group.
        issue_s: when it was called.
        start_s: when the link got to it.
        finish_s: when its result was there.
        first_wait_s: when it was first waited for; None if it was not yet.
        exposed_s: how long the host waited for it; with streams, how long the stream of compute did.
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
    """This machine's clock, without what the simulation itself costs: it stands still while the fabric copies data.

    A sleep that ended late on a busy machine is taken off too, so that what comes later does not shift.

    Attributes:
        aside_s: seconds for which it stood still.
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
        """Return when it is so late; the time until then is exposed."""
        left = finish_s - self.now()
        if left > 0:
            of.exposed_s += left
            self._sleep_until(finish_s)

    def compute(self, seconds: float) -> None:
        """Let so much time pass."""
        self._sleep_until(self.now() + seconds)

    def level(self) -> None:
        """Bring all streams to one time; here is but one."""

    def _sleep_until(self, at_s: float) -> None:
        while (left := at_s - self.now()) > 0:
            if left > _SPIN_S:
                time.sleep(left - _SPIN_S)
        self.aside_s -= left


class VirtualClock:
    """A clock that only waits and declared compute advance."""

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
    """A stream of the CPU that keeps a time; it has the methods of `torch.cpu.Stream`.

    Attributes:
        time_s: when all that was queued on it will be done.
        cause: the collective that it waits for last, None if compute came after it.
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
        """What is queued from now on comes after that time."""
        if time_s > self.time_s:
            if cause is not None and self is self._clock.default:
                cause.exposed_s += time_s - self.time_s
            self.time_s, self.cause = time_s, cause


class Event:
    """An event of the CPU that keeps a time; it has the methods of `torch.cpu.Event`."""

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
    """A virtual clock for each stream. The host takes no time and waits for nothing."""

    aside_s = 0.0

    def __init__(self) -> None:
        self.default = Stream(self, 0.0)
        self._all = [self.default]

    def current(self) -> Stream:
        stream = torch.cpu.current_stream()
        return stream if isinstance(stream, Stream) else self.default

    def stream(self, priority: int = -1) -> Stream:
        """What stands in for `torch.cpu.Stream`."""
        self._all.append(Stream(self, 0.0))
        return self._all[-1]

    def event(self) -> Event:
        """What stands in for `torch.cpu.Event`."""
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
