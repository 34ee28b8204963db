"""Streams and events that keep an order, and no time: they say what surely comes before what.

Each stream counts what it is given. Its clock says how many of each stream's come before whatever it is given next;
an event carries the clock of its stream at the place where it was recorded. All of it runs at once, on the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ..._errors import ShardConfigStateError

Clock = dict["Stream", int]


def join(clock: Clock, other: Clock) -> None:
    """What comes before `other` comes before `clock`, too."""
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count


class Stream:
    """What stands in for `torch.Stream` and its kin: a queue of operators, in their order.

    Args:
        device, priority: taken as torch's takes them; they change nothing.
        name: for reports; the streams of one program are numbered if it is empty.

    Attributes:
        name: as given.
        clock: how many of each stream come before what it is given next.
        device: the CPU.
    """

    device = torch.device("cpu")

    def __init__(self, device: object = None, priority: int = 0, *, name: str = "", **_of_torch: object) -> None:
        self._of = streams()
        self.name = name or self._of.next_name()
        self.clock: Clock = {}
        self._of.note(self)
        self._before: list[Stream] = []  # the streams that were current where it was entered

    @property
    def count(self) -> int:
        """How many it was given."""
        return self.clock.get(self, 0)

    def advance(self) -> int:
        """It is given something; returns its number."""
        join(self.clock, self._of.host.clock)  # what the host has waited for, all that is launched later waits for
        number = self.clock[self] = self.clock.get(self, 0) + 1
        return number

    def wait_event(self, event: Event) -> None:
        """What it is given from now on comes after the event."""
        join(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        """What it is given from now on comes after all that the other one was given so far."""
        join(self.clock, other.clock)

    def record_event(self, event: Event | None = None) -> Event:
        """An event behind all that it was given so far."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for it, so what is launched from now on, on any stream, comes after it."""
        join(self._of.host.clock, self.clock)

    def query(self) -> bool:
        """Whether all is done; a program that asks may not count on it."""
        return True

    def __enter__(self) -> Stream:
        self._before.append(self._of.current())
        self._of.use(self)
        return self

    def __exit__(self, *_of_the_error: object) -> None:
        self._of.use(self._before.pop())

    def __repr__(self) -> str:
        return f"<stream {self.name}>"


class Event:
    """What stands in for `torch.Event` and its kin: a place in the order of a stream."""

    def __init__(self, *_of_torch: object, **_also: object) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        """It is behind all that the stream was given so far."""
        self.clock = dict((stream or streams().current()).clock)

    def wait(self, stream: Stream | None = None) -> None:
        """What the stream is given from now on comes after it."""
        (stream or streams().current()).wait_event(self)

    def synchronize(self) -> None:
        """The host waits for it."""
        join(streams().host.clock, self.clock)

    def query(self) -> bool:
        """Whether it has happened; a program that asks may not count on it."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds until another event; nothing takes time here."""
        return 0.0


class Entered(Protocol):
    """Knows the stream of what autograd runs."""

    def current(self) -> Stream | None:
        """The stream of the node that autograd runs now; None if it runs none."""

    def use(self, stream: Stream) -> bool:
        """Change it; False if autograd runs none."""


class Streams:
    """The streams of a program, and which one is current: in each thread its own, as on an accelerator.

    Attributes:
        host: what the host does itself, in its order, and what it has waited for.
        compute: the default stream.
    """

    def __init__(self) -> None:
        self._threads = threading.local()
        self._numbers: dict[str, int] = {}
        self._kind = ""
        self._nodes: Entered | None = None
        _entered.append(self)
        self._all: list[Stream] = []
        self.host = Stream(name="host")
        self.compute = Stream(name="compute")

    def note(self, stream: Stream) -> None:
        """There is one more stream."""
        self._all.append(stream)

    def synchronize(self, _device: object = None) -> None:
        """The host waits for all streams."""
        for stream in self._all:
            stream.synchronize()

    def name_next(self, kind: str) -> None:
        """The next stream that is made without a name is of this kind."""
        self._kind = kind

    def next_name(self, kind: str = "") -> str:
        """A name for one more stream of a kind: ``stream``, ``stream 2``, ..."""
        if not kind:
            kind, self._kind = self._kind or "stream", ""
        number = self._numbers[kind] = self._numbers.get(kind, 0) + 1
        return kind if number == 1 else f"{kind} {number}"

    def ask_first(self, nodes: Entered) -> None:
        """Within a backward, this says which stream is current."""
        self._nodes = nodes

    def outside(self) -> Stream:
        """The current stream of this thread, apart from what autograd runs."""
        stream: Stream = getattr(self._threads, "current", self.compute)
        return stream

    def current(self, _device: object = None) -> Stream:
        """The stream of what is launched now."""
        stream = None if self._nodes is None else self._nodes.current()
        return stream or self.outside()

    def use(self, stream: Any) -> None:
        """Make a stream the current one."""
        if self._nodes is None or not self._nodes.use(stream):
            self._threads.current = stream

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Within, the stream is current; None changes nothing."""
        if stream is None:
            yield
            return
        with stream:
            yield

    def leave(self) -> None:
        """The program is over."""
        _entered.remove(self)


_entered: list[Streams] = []


def streams() -> Streams:
    """The streams of the program that runs.

    Raises:
        ShardConfigStateError: none is looked at.
    """
    if not _entered:
        raise ShardConfigStateError(
            "a stream or an event of testing.races was used after its end; make new ones, inside of the block"
        )
    return _entered[-1]
