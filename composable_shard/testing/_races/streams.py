"""Streams and events with vector clocks: they record the order of work, without times.

Each stream numbers its operators. Its clock contains, for each stream, how many operators of that stream are ordered
before the next operator of this one. An event has a copy of the clock of its stream. All operators run immediately, on
the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ...errors import ShardConfigStateError

Clock = dict["Stream", int]


def join(clock: Clock, other: Clock) -> None:
    """Merge `other` into `clock`: work that is ordered before `other` is then ordered before `clock`."""
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count


class Stream:
    """Replaces `torch.Stream`, `torch.cuda.Stream` and `torch.cpu.Stream`: a queue of operators.

    Args:
        device, priority: accepted like torch's, without effect.
        name: for reports; by default ``stream`` with a number.

    Attributes:
        name: the name.
        clock: for each stream, the number of its operators that are ordered before the next one of this stream.
        device: the CPU.
    """

    device = torch.device("cpu")

    def __init__(self, device: object = None, priority: int = 0, *, name: str = "", **_of_torch: object) -> None:
        self._of = streams()
        self.name = name or self._of.next_name()
        self.clock: Clock = {}
        self._of.note(self)
        self._before: list[Stream] = []  # the streams to restore on exit

    @property
    def count(self) -> int:
        """The number of operators so far."""
        return self.clock.get(self, 0)

    def advance(self) -> int:
        """Add an operator. Returns its number."""
        join(self.clock, self._of.host.clock)  # later operators of all streams run after the host's waits
        number = self.clock[self] = self.clock.get(self, 0) + 1
        return number

    def wait_event(self, event: Event) -> None:
        """Order all later work of this stream after the event."""
        self._of.rules.wait(self, event)
        join(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        """Order all later work of this stream after the work of `other` so far."""
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event after the work of this stream so far."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait for this stream. Later work of all streams is then ordered after its work so far."""
        self._of.rules.wait_on_host()
        join(self._of.host.clock, self.clock)

    def query(self) -> bool:
        """Whether all work is done: always True. It orders nothing."""
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
    """Replaces `torch.Event`, `torch.cuda.Event` and `torch.cpu.Event`: a position in the order of a stream.

    Attributes:
        clock: the clock of the stream when the event was recorded.
        capture: number of the capture in which it was recorded, 0 if outside of captures; None if it was not recorded.
    """

    def __init__(self, *_of_torch: object, **_also: object) -> None:
        self.clock: Clock = {}
        self.capture: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record the event after the work of the stream so far."""
        stream = stream or streams().current()
        self.clock, self.capture = dict(stream.clock), streams().rules.number_of(stream)

    def wait(self, stream: Stream | None = None) -> None:
        """Order all later work of the stream after the event."""
        (stream or streams().current()).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        streams().rules.wait_on_host(self)
        join(streams().host.clock, self.clock)

    def query(self) -> bool:
        """Whether the event was reached: always True. It orders nothing."""
        streams().rules.wait_on_host(self)
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds until another event: always 0, because there are no times."""
        return 0.0


class Entered(Protocol):
    """The current stream while autograd runs."""

    def current(self) -> Stream | None:
        """The stream of the node that autograd runs now; None if it runs none."""

    def use(self, stream: Stream) -> bool:
        """Change the stream of the running node. False if autograd runs none."""


class Rules:
    """Is told what streams and the host wait for. This class has no rules: see `captures.Captures`."""

    def number_of(self, stream: Stream) -> int:
        """Return the number of the capture of a stream; 0 if it is not captured."""
        return 0

    def wait(self, stream: Stream, event: Event) -> None:
        """Report that a stream waits for an event."""

    def wait_on_host(self, event: Event | None = None) -> None:
        """Report that the host waits for an event, or for a stream."""

    def read(self, operator: str) -> None:
        """Report that the host reads a value of the current stream."""

    def launch(self, stream: Stream, operator: str) -> None:
        """Report an operator."""


class Streams:
    """The streams of a program, and the current stream of each thread.

    Attributes:
        rules: rules for captures of CUDA graphs.
        host: operators that run on the host. Its clock includes all work that the host has waited for.
        compute: the default stream.
    """

    def __init__(self) -> None:
        self.rules = Rules()
        self._threads = threading.local()
        self._numbers: dict[str, int] = {}
        self._kind = ""
        self._nodes: Entered | None = None
        _entered.append(self)
        self._all: list[Stream] = []
        self.host = Stream(name="host")
        self.compute = Stream(name="compute")

    def note(self, stream: Stream) -> None:
        """Add a new stream."""
        self._all.append(stream)

    def synchronize(self, _device: object = None) -> None:
        """Let the host wait for all streams."""
        for stream in self._all:
            stream.synchronize()

    def name_next(self, kind: str) -> None:
        """Use `kind` for the name of the next stream that is created without a name."""
        self._kind = kind

    def next_name(self, kind: str = "") -> str:
        """A name for a new stream: ``stream``, ``stream 2``, ..."""
        if not kind:
            kind, self._kind = self._kind or "stream", ""
        number = self._numbers[kind] = self._numbers.get(kind, 0) + 1
        return kind if number == 1 else f"{kind} {number}"

    def watch(self, rules: Rules) -> None:
        """Follow these rules for captures from now on."""
        self.rules = rules

    def ask_first(self, nodes: Entered) -> None:
        """Ask `nodes` first for the current stream. It returns a stream while a backward runs."""
        self._nodes = nodes

    def outside(self) -> Stream:
        """The current stream of this thread outside of backward."""
        stream: Stream = getattr(self._threads, "current", self.compute)
        return stream

    def current(self, _device: object = None) -> Stream:
        """The current stream of this thread."""
        stream = None if self._nodes is None else self._nodes.current()
        return stream or self.outside()

    def use(self, stream: Any) -> None:
        """Make a stream the current one."""
        if self._nodes is None or not self._nodes.use(stream):
            self._threads.current = stream

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Make the stream current within this context; None changes nothing."""
        if stream is None:
            yield
            return
        with stream:
            yield

    def leave(self) -> None:
        """End this program: `streams()` no longer returns it."""
        _entered.remove(self)


_entered: list[Streams] = []


def streams() -> Streams:
    """The streams of the program that is being checked.

    Raises:
        ShardConfigStateError: no block of `races` is active.
    """
    if not _entered:
        raise ShardConfigStateError(
            "a stream or an event of testing.races was used after the end of its block; create new ones in the block"
        )
    return _entered[-1]
