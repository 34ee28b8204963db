"""Functions that remove a wait from the library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from composable_shard._comm.lanes import Job, StreamLane
from composable_shard._engine.actions import Actions
from composable_shard._group import reduction
from composable_shard._group.bucket import Gatherer
from composable_shard._group.reduction import ReduceBucket
from composable_shard._memory.device import DeviceMemory
from composable_shard._memory.pool import BufferPool
from composable_shard._memory.slots import Slot
from composable_shard.testing._races.streams import Event, Stream, join, streams

Plant = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Mutant:
    """The library without one of its waits.

    Attributes:
        site: the function of the library that waits.
        wait: description of the order that the wait ensures.
        plant: returns a context manager that removes the wait.
        scenario: name of the scenario in which a race is found.
    """

    site: str
    wait: str
    plant: Plant
    scenario: str = "default"


def within(owner: Any, name: str, *also: tuple[Any, str, Any]) -> Plant:
    """Replace functions while `owner.name` runs. `also` has the owner, name and replacement of each."""
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for each in also:
                stack.enter_context(mock.patch.object(*each))
            return real(*args, **kwargs)

    return lambda: mock.patch.object(owner, name, call)


def instead(owner: Any, name: str, replacement: Callable[..., Any]) -> Plant:
    """Replace a function by one that gets the original as its first argument."""
    real = getattr(owner, name)
    return lambda: mock.patch.object(owner, name, lambda *args, **kwargs: replacement(real, *args, **kwargs))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing; replaces a wait."""


def _no_wait(real: Any, *args: Any, **kwargs: Any) -> None:
    """Do nothing; replaces a wait in `instead`."""


def unfenced(owner: Any, name: str) -> Plant:
    """Make slots that this function leases free immediately, without their events."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        real, lease = getattr(owner, name), BufferPool.lease

        def leased(self: BufferPool, *args: Any) -> Slot:
            slot = lease(self, *args)
            slot.free_after = ()
            return slot

        def call(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(BufferPool, "lease", leased):
                return real(*args, **kwargs)

        with mock.patch.object(owner, name, call):
            yield

    return plant


NO_WAIT = (Event, "wait", _nothing)
NO_EVENT = (StreamLane, "record_current_stream", lambda lane: None)
NO_SYNC = (Stream, "synchronize", _nothing)
NO_EVENTS = (DeviceMemory, "current_events", lambda memory: ())


def pack_into_used(real: Any, bucket: ReduceBucket, gradients: Any, out: Any, slots: Any) -> None:
    if slots:
        slots[0].free_after = ()
    real(bucket, gradients, out, slots)


def gather_whatever_was(real: Any, gatherer: Gatherer, slot: Slot, shards: Any, after: Any, read: Any = ()) -> Any:
    return real(gatherer, slot, shards, tuple(after)[:1], read)


def free_behind_first(real: Any, pool: BufferPool, jobs: Iterable[tuple[ReduceBucket, Job[Any]]]) -> int:
    """Make the slots of several reductions free after the first reduction."""
    occupied = [each for _, job in jobs for each in job.occupied]
    for slot, _ in occupied:
        pool.release_queued(slot, occupied[0][1])
    return sum(slot.nbytes for slot, _ in occupied)


def free_at_once(real: Any, job: Job[Any], memory: Sequence[tuple[Slot, Any]]) -> None:
    """Make the slots of a queued reduction free immediately."""
    real(job, [(slot, None) for slot, _ in memory])


def hook_at_once(wait: str) -> Plant:
    """Remove one of the two waits of the user's stream for all-reduce hooks: the one before or after the hook."""

    def on_stream(real: Any, comms: Any) -> Any:
        hook = real(comms)
        if hook is None:
            return None

        def call(reduced: torch.Tensor) -> None:
            waits, count = Stream.wait_stream, iter(("before", "after"))
            with mock.patch.object(
                Stream, "wait_stream", lambda a, b: None if next(count, "") == wait else waits(a, b)
            ):
                hook(reduced)

        return call

    return instead(reduction, "_on_stream", on_stream)


def job_without_end(only: str) -> Plant:
    """Remove the waits for jobs of a lane (`gathers` or `reductions`)."""
    real = StreamLane._ended

    def ended(lane: StreamLane, job: Job[Any]) -> Any:
        job = real(lane, job)
        if lane._stream.name == only:
            job._event.clock = {}
        return job

    return lambda: mock.patch.object(StreamLane, "_ended", ended)


def not_awaited(real: Any, *args: Any) -> Job[Any]:
    """Finish the job that a function starts without a wait."""
    job: Job[Any] = real(*args)
    job._event.clock = {}
    return job


def behind_at_once(real: Any, lane: StreamLane) -> Any:
    """Remove the wait of the lane for follow-up work of a job."""

    class Early:
        def start(self, steps: Any, after: Any, held: Any, when_done: Any) -> Any:
            return real(lane).start(steps, (), held, when_done)

    return Early()


def take_back_with_old_events(real: Any, pool: BufferPool, slot: Slot, owner: Any = None) -> None:
    """Keep the events of the release, as if no code had read the slot since."""
    before = slot.free_after
    real(pool, slot, owner)
    slot.free_after = before


def back_to_current(real: Any, memory: DeviceMemory, after: Any) -> None:
    """Let only the current stream wait, and not the streams on which the memory was allocated."""
    with mock.patch.object(Stream, "wait_event", _nothing), mock.patch.object(Event, "wait", _join_current):
        real(memory, after)


def _join_current(event: Event) -> None:
    join(streams().current().clock, event.clock)


def back_to_allocated(real: Any, memory: DeviceMemory, after: Any) -> None:
    with mock.patch.object(Event, "wait", _nothing):
        real(memory, after)


def forget_optimizer(actions: Actions, at: Any = None) -> None:
    actions.changed = None
