"""The engine's lane on streams with simulated times. It corresponds to `StreamLane` on an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .._comm.lanes import Awaitable, Events, Job, Lane, Launched, Steps, WhenDone
from ._clocks import StreamClock

T = TypeVar("T")


class StreamedLane(Lane):
    """A lane that runs its jobs on its own stream."""

    streams = True

    def __init__(self, clock: StreamClock) -> None:
        self._clock = clock
        self._stream = clock.stream()
        self._second: StreamedLane | None = None

    def start(
        self, steps: Steps[T], after: Events = (), held: object = None, when_done: WhenDone | None = None
    ) -> Job[T]:
        return self._queued(after, lambda: Job(steps, held, True, when_done))

    def launch(
        self,
        collective: Callable[..., Awaitable],
        args: tuple[Any, ...],
        after: Events,
        result: T,
        when_done: WhenDone | None = None,
    ) -> Job[T]:
        def begin() -> Job[T]:
            job = Launched(collective(*args), args, result, when_done)
            job._advance()
            return job

        return self._queued(after, begin)

    def _queued(self, after: Events, begin: Callable[[], Job[T]]) -> Job[T]:
        with torch.cpu.stream(self._stream):  # type: ignore[arg-type]
            for event in after:
                if event is not None:
                    event.wait()
            job = begin()
            job._event = self.record_current_stream()
        return job

    def record_current_stream(self) -> torch.Event | None:
        event = self._clock.event()
        event.record()
        return event  # type: ignore[return-value]

    def queued(self) -> Events:
        with torch.cpu.stream(self._stream):  # type: ignore[arg-type]
            return (self.record_current_stream(), *(() if self._second is None else self._second.queued()))

    def current(self) -> torch.Stream:
        return torch.cpu.current_stream()  # type: ignore[return-value]

    def second(self) -> Lane:
        if self._second is None:
            self._second = StreamedLane(self._clock)
        return self._second
