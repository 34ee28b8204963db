"""The library with a wait taken out: each place where one stream waits for another, and a scenario that shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from composable_shard._comm.collectives import RankOrdered, _All
from composable_shard._comm.lanes import Job, StreamLane, Waiting
from composable_shard._engine.actions import Actions
from composable_shard._engine.engine import Engine
from composable_shard._group import reduction
from composable_shard._group.bucket import GatherBucket, Gatherer
from composable_shard._group.extension import ExtensionBucket
from composable_shard._group.group import ParamGroup
from composable_shard._group.reduction import ReduceBucket
from composable_shard._group.resident import Resident
from composable_shard._memory import pool, regions
from composable_shard._memory.device import DeviceMemory
from composable_shard._memory.pool import BufferPool
from composable_shard._memory.slots import Slot
from composable_shard.testing._races.streams import Event, Stream

Plant = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Mutant:
    """A wait that is taken out.

    Attributes:
        wait: in words.
        plant: takes it out, within a context.
        scenario: that shows it.
    """

    wait: str
    plant: Plant
    scenario: str = "default"


def within(owner: Any, name: str, *also: tuple[Any, str, Any]) -> Plant:
    """While a function runs, others are replaced; `also` has their owners, names and replacements."""
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for each in also:
                stack.enter_context(mock.patch.object(*each))
            return real(*args, **kwargs)

    return lambda: mock.patch.object(owner, name, call)


def instead(owner: Any, name: str, replacement: Callable[..., Any]) -> Plant:
    """A function is replaced by one that is given the real one first."""
    real = getattr(owner, name)
    return lambda: mock.patch.object(owner, name, lambda *args, **kwargs: replacement(real, *args, **kwargs))


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a wait."""


def unfenced(owner: Any, name: str) -> Plant:
    """Slots look free at once to whoever leases one in this function."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        real, lease = getattr(owner, name), BufferPool.lease_for

        def leased(self: BufferPool, *args: Any) -> Slot:
            slot = lease(self, *args)
            slot.free_after = ()
            return slot

        def call(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(BufferPool, "lease_for", leased):
                return real(*args, **kwargs)

        with mock.patch.object(owner, name, call):
            yield

    return plant


NO_WAIT = (Event, "wait", _nothing)
NO_MARK = (StreamLane, "mark", lambda lane: None)
NO_QUEUE = (DeviceMemory, "queued", lambda memory: ())


def pack_into_used(real: Any, bucket: ReduceBucket, gradients: Any, out: Any, slots: Any) -> None:
    if slots:
        slots[0].free_after = ()
    real(bucket, gradients, out, slots)


def gather_whatever_was(real: Any, gatherer: Gatherer, slot: Slot, shards: Any, after: Any, read: Any = ()) -> Any:
    return real(gatherer, slot, shards, tuple(after)[:1], read)


def start_at_once(real: Any, bucket: ReduceBucket, *args: Any) -> Any:
    with mock.patch.object(*NO_MARK):
        return real(bucket, *args)


def release_job_early(real: Any, lane: StreamLane, job: Job[Any]) -> Any:
    ended = real(lane, job)
    if job._when_done is not None:
        when_done = job._when_done
        job._when_done = lambda event: when_done(None)
    return ended


def hook_at_once(wait: str) -> Plant:
    """The user's stream for all-reduce hooks, of which one wait is taken out."""

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
    """Nobody waits for jobs of a lane (`gathers` or `reductions`)."""
    real = StreamLane._ended

    def ended(lane: StreamLane, job: Job[Any]) -> Any:
        job = real(lane, job)
        if lane._stream.name == only:
            job._event.clock = {}
        return job

    return lambda: mock.patch.object(StreamLane, "_ended", ended)


def not_on_host(real: Any, job: Job[Any], on_host: bool = False) -> Any:
    return real(job)


def back_to_current(real: Any, memory: DeviceMemory, after: Any) -> None:
    """Only the current stream waits, and not those on which the memory was allocated."""
    with mock.patch.object(Stream, "wait_event", lambda *_: None), mock.patch.object(Event, "wait", _join_current):
        real(memory, after)


def _join_current(event: Event) -> None:
    from composable_shard.testing._races.streams import join, streams

    join(streams().current().clock, event.clock)


def back_to_allocated(real: Any, memory: DeviceMemory, after: Any) -> None:
    with mock.patch.object(Event, "wait", _nothing):
        real(memory, after)


def forget_optimizer(actions: Actions, at: Any = None) -> None:
    actions.changed = None


def make_slot(real: Any, memory: Any, free_after: Any, resizes: bool = False) -> Any:
    return real(memory, (), resizes)


MUTANTS = {
    # _comm/lanes.py
    "lanes-wait-for-nothing": Mutant("lanes wait for the events they are given", instead(StreamLane, "_wait_for", _nothing)),
    "gathers-are-not-awaited": Mutant("compute waits for gathers", job_without_end("gathers")),
    "reductions-are-not-awaited": Mutant("compute waits for reductions", job_without_end("reductions")),
    "lanes-ignore-collectives": Mutant("lanes wait for their collectives", instead(Waiting, "wait", _nothing)),
    "host-ignores-reductions": Mutant("the host waits for what it reads", instead(Job, "finish", not_on_host), "offload"),
    # _comm/collectives.py
    "own-gathers-copied-early": Mutant(
        "what a user's communication gives is copied when it is there",
        instead(_All, "wait", lambda real, each: each._rest() if each._rest else None),
        "own-communication",
    ),
    # _group/bucket.py
    "gathers-ignore-slots": Mutant(
        "gathers wait for what their slot was used for", instead(Gatherer, "start", gather_whatever_was)
    ),
    "gathers-ignore-landings": Mutant(
        "gathers wait for what their landing buffer was used for", unfenced(Gatherer, "start_into"), "packed"
    ),
    "weights-given-up-without-event": Mutant(
        "weights are given up behind their last reader",
        instead(GatherBucket, "release", lambda real, bucket, after, *more: real(bucket, None, *more)),
    ),
    "failed-gathers-go-on": Mutant(
        "gathers beside one that has failed are waited for", within(ParamGroup, "_give_up_gathers", (Job, "finish", _nothing)), "failing-extension"
    ),
    # _group/reduction.py
    "packing-ignores-slots": Mutant("gradients are packed behind what the slot was used for", instead(ReduceBucket, "_pack", pack_into_used)),
    "reductions-ignore-packing": Mutant("reductions wait for packed gradients", instead(ReduceBucket, "start", start_at_once)),
    "scratch-ignores-slots": Mutant(
        "reductions wait for what their scratch memory was used for", unfenced(ReduceBucket, "start"), "sums-of-ranks"
    ),
    "slots-freed-before-reductions": Mutant("slots are free when their job has ended", instead(StreamLane, "_ended", release_job_early)),
    "hooks-run-early": Mutant("all-reduce hooks wait for reductions", hook_at_once("before"), "all-reduce-hook"),
    "hooks-are-not-awaited": Mutant("reductions wait for all-reduce hooks", hook_at_once("after"), "all-reduce-hook"),
    # _group/resident.py
    "pieces-ignore-slots": Mutant(
        "few ranks' pieces are kept behind what the slot was used for", within(Resident, "keep", NO_WAIT), "few-ranks"
    ),
    "pieces-sent-early": Mutant("gathers wait for few ranks' pieces", within(Resident, "keep", NO_MARK), "few-ranks"),
    "shrunk-without-event": Mutant(
        "weights of which few ranks keep pieces are given up behind their last reader",
        within(ParamGroup, "shrink", NO_MARK), "few-ranks"
    ),
    "pieces-given-up-without-event": Mutant(
        "few ranks' pieces are given up behind their last reader", within(Resident, "release", NO_MARK), "few-ranks"
    ),
    # _group/extension.py
    "extensions-ignore-optimizer": Mutant(
        "extensions read shards behind the optimizer", within(ExtensionBucket, "start", NO_WAIT), "extensions"
    ),
    "extensions-sent-early": Mutant("gathers wait for extensions' inputs", within(ExtensionBucket, "start", NO_MARK), "extensions"),
    # _memory
    "rivals-carry-no-event": Mutant(
        "a slot waits for what overlapping slots were used for", instead(Slot, "wait_for", _nothing)
    ),
    "suspended-without-event": Mutant(
        "reserved memory is written behind its last reader",
        instead(Slot, "suspend", lambda real, slot, after, lent: real(slot, None, lent)),
        "own-memory",
    ),
    "unused-given-up-without-event": Mutant(
        "memory of graphs is given up behind its last reader", within(BufferPool, "reclaim", NO_QUEUE)
    ),
    "given-up-without-event": Mutant("memory is given up after a failure behind its last user", within(BufferPool, "give_up", NO_QUEUE), "failing-communication"),
    "poisoned-early": Mutant("memory is poisoned behind its last reader", within(BufferPool, "_poisoned", NO_WAIT), "debugging"),
    "poisoned-without-event": Mutant("memory is given up behind its poisoning", within(BufferPool, "_poisoned", NO_QUEUE), "debugging"),
    "new-slots-without-event": Mutant("new slots are written behind what their memory was used for", within(BufferPool, "_make", NO_QUEUE)),
    "own-slots-without-event": Mutant(
        "memory that comes back is written behind what it was used for", within(BufferPool, "_own_slot", NO_QUEUE), "counted-memory"
    ),
    "own-slots-return-early": Mutant(
        "memory that a slot gives back waits for its last user",
        within(BufferPool, "release", (DeviceMemory, "give_back", _nothing)),
        "branches-counted",
    ),
    "new-arenas-without-event": Mutant(
        "new arenas are written behind what their memory was used for", within(regions.Arena, "_add", NO_QUEUE)
    ),
    "filled-without-event": Mutant(
        "filled regions are written behind what their memory was used for", within(regions.Arena, "fill", NO_QUEUE), "idle-memory"
    ),
    "emptied-early": Mutant("emptied pools' memory waits for its last user", within(BufferPool, "empty", (DeviceMemory, "give_back", _nothing))),
    "drained-early": Mutant(
        "drained regions' memory waits for its last user", within(regions.Arena, "drain", (DeviceMemory, "give_back", _nothing)), "idle-memory"
    ),
    "allocating-streams-do-not-wait": Mutant(
        "streams on which memory was allocated wait for it", instead(DeviceMemory, "give_back", back_to_current), "another-stream"
    ),
    "current-stream-does-not-wait": Mutant(
        "the current stream waits for memory that goes back", instead(DeviceMemory, "give_back", back_to_allocated), "another-stream"
    ),
    "left-early": Mutant("memory of dropped models waits for lanes", instead(DeviceMemory, "leave", _nothing), "dropped-in-backward"),
    # _engine
    "gathers-ignore-optimizer": Mutant("gathers wait for the optimizer", lambda: mock.patch.object(Actions, "parameters_changed", forget_optimizer)),
}
