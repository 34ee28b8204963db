"""Rules for the capture of a CUDA graph, checked on the simulated streams of `races`.

A capture begins on one stream. A stream becomes part of it by waiting for an event that was recorded in it. CUDA then
refuses some calls, and leaves some work out of the graph without an error:

    a captured stream waits for an event from outside
    the default stream becomes part of a capture
    the host waits, or reads a value of a captured stream
    work of a captured stream is not waited for when the capture ends
    an event of a capture is used after its end
    an operator runs on a stream that is not part of the capture, so replays do not repeat it

Operators run in a capture, too: only the order of their waits is checked here. There are no replays, and
`make_graphed_step` runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .streams import Event, Rules, Stream, Streams


class Captures(Rules):
    """The captures of a program that `races` checks.

    Args:
        streams: its streams.
        where: returns the line of the program that runs now, for faults.
        is_of_host: whether a tensor is in host memory.

    Attributes:
        faults: violations of the rules, in words.
    """

    def __init__(self, streams: Streams, where: Callable[[], str], is_of_host: Callable[[torch.Tensor], bool]) -> None:
        self._streams, self._where, self._is_of_host = streams, where, is_of_host
        self.faults: list[str] = []
        self._count = self._active = 0  # the number of captures, and the running one
        self._members: dict[Stream, int] = {}  # its streams, with the number of their operators when they joined it
        streams.watch(self)

    def number(self) -> int:
        """Return the number of the capture on the current stream; 0 if there is none."""
        return self.number_of(self._streams.current())

    def number_of(self, stream: Stream) -> int:
        """Return the number of the capture of a stream; 0 if it is not captured."""
        return self._active if stream in self._members else 0

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Capture what the context queues on a stream, and on streams that wait for it. The stream is current."""
        self._streams.synchronize()
        self._count += 1
        self._active, self._members = self._count, {stream: stream.count}
        try:
            with stream, self._reads_of_tolist():
                yield
            self._check_joined(stream)
        finally:
            self._active, self._members = 0, {}
            self._streams.synchronize()

    def _check_joined(self, origin: Stream) -> None:
        for stream, before in self._members.items():
            if stream.count > before and origin.clock.get(stream, 0) < stream.count:
                self._fault(f"{stream} has work at the end of the capture that {origin} does not wait for")

    @contextmanager
    def _reads_of_tolist(self) -> Iterator[None]:
        """Notice calls of `Tensor.tolist`, which reads values without an operator."""
        real: Any = torch.Tensor.tolist

        def tolist(tensor: torch.Tensor) -> Any:
            if not self._is_of_host(tensor):
                self.read("Tensor.tolist")
            return real(tensor)

        torch.Tensor.tolist = tolist  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.Tensor.tolist = real  # type: ignore[method-assign]

    def _fault(self, text: str) -> None:
        self.faults.append(f"{text} ({self._where()})")

    # ---- what streams and events report

    def wait(self, stream: Stream, event: Event) -> None:
        """Report that a stream waits for an event."""
        if event.capture is None or event.capture == self.number_of(stream):
            return
        if event.capture and event.capture != self._active:
            self._fault(f"{stream} waits for an event of a capture that has ended")
        elif not event.capture:
            self._fault(f"{stream} is captured, and waits for an event from outside")
        elif stream is self._streams.compute:
            self._fault(f"the default stream, {stream}, becomes part of a capture")
        else:
            self._members[stream] = stream.count

    def wait_on_host(self, event: Event | None = None) -> None:
        """Report that the host waits for an event, or for a stream."""
        if self._active or (event is not None and event.capture):
            self._fault("the host waits for a capture, or during one")

    def read(self, operator: str) -> None:
        """Report that the host reads a value."""
        if self.number():
            self._fault(f"the host reads a captured value by {operator}")

    def launch(self, stream: Stream, operator: str) -> None:
        """Report an operator."""
        if self._active and stream not in self._members and stream is not self._streams.host:
            self._fault(f"{operator} runs on {stream}, which is not captured, during a capture")
