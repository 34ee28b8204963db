"""Lanes: queues of asynchronous work. On an accelerator a lane is a stream. On a CPU there is no queue.

Work is written once for both, as a generator that yields each handle that it must wait for (`Awaitable`).
`Lane.start` queues the work and returns a `Job`. After `Job.finish`, the code that follows can use the result.

- On a stream, `start` queues all of the work, and `finish` makes the current stream wait for an event.
- On a CPU, `start` runs the work up to its first handle, and `finish` blocks and runs the rest.

Memory that the caller has leased for a job, such as a landing buffer, is usually released by `when_done`, which
`finish` calls. On a stream, a reduction may release its memory before: as soon as it is queued. Whoever uses the memory
next then waits for the event at the end of the reduction (`frees_queued` in `_group/setup.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

import torch

from .._torch.core import set_grad_enabled

T = TypeVar("T")


class Awaitable(Protocol):
    """The handle of a running collective."""

    def wait(self) -> Any: ...


class Lost:
    """Replaces a handle whose `wait` has failed or was interrupted. Waiting for it again would hang with gloo.

    Args:
        error: the error's text. The exception itself would keep its traceback alive, and with it tensors.
    """

    __slots__ = ("_error",)

    def __init__(self, error: str) -> None:
        self._error = error

    def wait(self) -> None:
        raise RuntimeError(f"this collective has already failed: {self._error}")


class Waiting:
    """The waits for collectives in this process, for the code that watches them (`_faults`).

    Attributes:
        since: when the newest wait of any thread began, by `time.monotonic` (seconds); 0 if it has ended.
    """

    __slots__ = ("_explain", "since")

    def __init__(self) -> None:
        self.since = 0.0
        self._explain: Callable[[Exception], Exception] = lambda error: error

    def explain_by(self, explain: Callable[[Exception], Exception]) -> None:
        """From now on, pass the error of a failed wait to `explain` and raise the exception that it returns."""
        self._explain = explain

    @contextmanager
    def for_ranks(self) -> Iterator[None]:
        """In this context, this process waits for other ranks by other means than a collective."""
        self.since = monotonic()
        try:
            yield
        finally:
            self.since = 0.0

    def wait(self, handle: Awaitable) -> None:
        """Wait for a collective."""
        self.since = monotonic()
        try:
            handle.wait()
        except Exception as error:
            if (why := self._explain(error)) is not error:
                raise why from error
            raise
        finally:
            self.since = 0.0


WAITING = Waiting()
_HIGH_PRIORITY = -1
Steps = Generator[Awaitable, None, T]
Events = Iterable[torch.Event | None]
WhenDone = Callable[[torch.Event | None], None]


class Job(Generic[T]):
    """Queued work.

    Args:
        steps: the work.
        held: tensors that the work reads or writes, kept alive until `finish`, which makes the current stream wait for
            the work. Only then may the allocator hand their memory to other work. `steps` does not keep them alive on a
            stream, where it ends as soon as the work is queued.
        drain: whether to run `steps` to its end immediately. A lane on a stream does so to queue all of the work.
        when_done: called once, in `finish`, with the event recorded after the work (None on a CPU).

    Attributes:
        occupied: the memory that a reduction on a stream uses, and for each part the event after which it is free. Only
            the caller uses this: `ReduceBucket.start` sets it, and `free_queued` releases the memory.
    """

    __slots__ = ("_event", "_handle", "_held", "_result", "_steps", "_when_done", "occupied")

    def __init__(self, steps: Steps[T], held: object, drain: bool, when_done: WhenDone | None = None) -> None:
        self._steps: Steps[T] | None = steps
        self.occupied: Sequence[tuple[Any, torch.Event | None]] = ()
        self._held = held
        self._when_done = when_done
        self._handle: Awaitable | None = None
        self._result: T | None = None
        self._event: torch.Event | None = None
        self._advance()
        while drain and self._handle is not None:
            self._advance()

    def _advance(self) -> None:
        """Wait for the current handle and run to the next one, or to the end."""
        if self._handle is not None:
            try:
                WAITING.wait(self._handle)
            except BaseException as error:
                self._handle = Lost(repr(error))
                raise
        assert self._steps is not None
        grad = torch.is_grad_enabled()
        if grad:  # `steps` copies without autograd. It cannot use `no_grad` itself, because that would leak at a yield
            set_grad_enabled(False)
        try:
            self._handle = next(self._steps)
        except StopIteration as stop:
            self._handle = self._steps = None
            self._result = stop.value
        finally:
            if grad:
                set_grad_enabled(True)

    def advance(self) -> None:
        """Wait for the collective in flight and issue the next one, if any; on a stream all are already issued."""
        if self._handle is not None:
            self._advance()

    def finish(self) -> T:
        """Wait for the end of the work and return its result; on a stream, the host does not wait."""
        try:
            while self._handle is not None:
                self._advance()
            if self._event is not None:
                self._event.wait()
        except BaseException as error:
            # After an interrupt such as Ctrl-C, the collective may still write to the memory that `when_done` would
            # release, so it is never released. After an error of the collective itself, it no longer runs.
            if not isinstance(error, Exception):
                self._when_done = None
            raise
        finally:
            self._held = None
            when_done, self._when_done = self._when_done, None
            if when_done is not None:
                when_done(self._event)
        return self._result  # type: ignore[return-value]

    def occupy(self, memory: Sequence[tuple[Any, torch.Event | None]]) -> None:
        """Set `occupied`."""
        self.occupied = memory

    def end_events(self) -> Events:
        """Return a tuple of the event recorded after the work; of None on a CPU."""
        return (self._event,)

    def forget_event(self) -> None:
        """Let `finish` wait for no event: a capture has begun or ended since, and the device was idle then."""
        self._event = None

    def wait_on_host(self) -> None:
        """After `finish`, make the host wait as well, before it reads a result that was copied to the host."""
        if self._event is not None:
            self._event.synchronize()


class Launched(Job[T]):
    """A job of one collective that is already launched, with no work after it. It takes less host time than a `Job`.

    Args:
        handle: the handle of the collective.
        held: tensors that the collective reads or writes.
        result: returned by `finish`.
        when_done: as for a `Job`.
    """

    __slots__ = ()

    def __init__(self, handle: Awaitable, held: object, result: T, when_done: WhenDone | None = None) -> None:
        self.occupied = ()
        self._handle = handle
        self._held = held
        self._event = None
        self._result = result
        self._when_done = when_done

    def _advance(self) -> None:
        assert self._handle is not None
        try:
            WAITING.wait(self._handle)
        except BaseException as error:
            self._handle = Lost(repr(error))
            raise
        self._handle = None


class Lane:
    """The lane of a CPU: the host waits for each job in `finish`, so there are no events.

    Attributes:
        streams: whether the lane is a stream, so that a stream and never the host waits for queued work.
    """

    streams = False

    def start(
        self, steps: Steps[T], after: Events = (), held: object = None, when_done: WhenDone | None = None
    ) -> Job[T]:
        """Queue `steps`, to begin after the events `after`; `held` and `when_done` are as for a `Job`.

        On a CPU there are no events, so `after` has no effect.
        """
        return Job(steps, held, False, when_done)

    def launch(
        self,
        collective: Callable[..., Awaitable],
        args: tuple[Any, ...],
        after: Events,
        result: T,
        when_done: WhenDone | None = None,
    ) -> Job[T]:
        """Queue one collective, to begin after the events `after`, and keep `args` alive; the job returns `result`."""
        return Launched(collective(*args), args, result, when_done)

    def record_current_stream(self) -> torch.Event | None:
        """Record an event on the current stream, after all work queued there so far; None on a CPU."""
        return None

    def queued(self) -> Events:
        """Record events after all work queued on this lane and on its `second` lane; none on a CPU."""
        return ()

    def current(self) -> torch.Stream | None:
        """Return the current stream; None on a CPU."""
        return None

    def second(self) -> Lane:
        """Return a second lane, for the rest of a job that began here. Later jobs of this lane do not wait for it.

        On a CPU, the lane itself.
        """
        return self


class StreamLane(Lane):
    """The lane of an accelerator: its own stream."""

    streams = True

    def __init__(self, device: torch.device) -> None:
        self._second: StreamLane | None = None
        # High priority: the copies and casts around a collective are small, and compute waits for them.
        self._stream = torch.Stream(device, priority=_HIGH_PRIORITY)

    def start(
        self, steps: Steps[T], after: Events = (), held: object = None, when_done: WhenDone | None = None
    ) -> Job[T]:
        self._wait_for(after)
        try:
            with self._stream:
                return self._ended(Job(steps, held, True, when_done))
        except BaseException:
            self._give_up()
            raise

    def launch(
        self,
        collective: Callable[..., Awaitable],
        args: tuple[Any, ...],
        after: Events,
        result: T,
        when_done: WhenDone | None = None,
    ) -> Job[T]:
        self._wait_for(after)
        try:
            with self._stream:
                job = Launched(collective(*args), args, result, when_done)
                job._advance()
                return self._ended(job)
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Make the current stream wait for the queued part of a failed job, whose memory the caller will release."""
        self.current().wait_stream(self._stream)

    def _wait_for(self, events: Events) -> None:
        for event in events:
            if event is not None:
                self._stream.wait_event(event)

    def _ended(self, job: Job[T]) -> Job[T]:
        job._event = torch.Event(self._stream.device)
        job._event.record(self._stream)
        return job

    def record_current_stream(self) -> torch.Event | None:
        event = torch.Event(self._stream.device)
        event.record(self.current())
        return event

    def queued(self) -> Events:
        event = torch.Event(self._stream.device)
        event.record(self._stream)
        return (event, *(() if self._second is None else self._second.queued()))

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._stream.device)

    def second(self) -> Lane:
        if self._second is None:
            self._second = StreamLane(self._stream.device)
        return self._second


_simulated: list[Callable[[], Lane]] = []


@contextmanager
def cpu_lanes(make: Callable[[], Lane]) -> Iterator[None]:
    """In this context, make the lanes of the CPU with `make`, to simulate an accelerator."""
    _simulated.append(make)
    try:
        yield
    finally:
        _simulated.pop()


def has_streams(device: torch.device) -> bool:
    """Whether the lanes of a device are streams."""
    return bool(_simulated) if device.type == "cpu" else device.type != "meta"


def lane_for(device: torch.device) -> Lane:
    """Make a new lane of a device."""
    if not has_streams(device):
        return Lane()
    return _simulated[-1]() if device.type == "cpu" else StreamLane(device)
