"""The library with a wait taken out: each place where one stream waits for another, and a scenario that shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from composable_shard._comm.collectives import _All
from composable_shard._comm.lanes import Job, StreamLane, Waiting
from composable_shard._engine.actions import Actions
from composable_shard._group import reduction
from composable_shard._group.bucket import Gatherer
from composable_shard._group.exchange import _Gathers
from composable_shard._group.extension import ExtensionBucket
from composable_shard._group.group import ParamGroup
from composable_shard._group.reduction import ReduceBucket
from composable_shard._group.resident import Resident
from composable_shard._memory.device import DeviceMemory
from composable_shard._memory.pool import BufferPool
from composable_shard._memory.regions import Arena
from composable_shard._memory.slots import Slot
from composable_shard.testing._races.streams import Event, Stream, join, streams

Plant = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Mutant:
    """A wait that is taken out.

    Attributes:
        site: the function of the library that has it.
        wait: in words.
        plant: takes it out, within a context.
        scenario: that shows it.
    """

    site: str
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


def _no_wait(real: Any, *args: Any, **kwargs: Any) -> None:
    """Likewise, in `instead`."""


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
    with mock.patch.object(Stream, "wait_event", _nothing), mock.patch.object(Event, "wait", _join_current):
        real(memory, after)


def _join_current(event: Event) -> None:
    join(streams().current().clock, event.clock)


def back_to_allocated(real: Any, memory: DeviceMemory, after: Any) -> None:
    with mock.patch.object(Event, "wait", _nothing):
        real(memory, after)


def forget_optimizer(actions: Actions, at: Any = None) -> None:
    actions.changed = None


MUTANTS = {
    # _comm
    "lanes-wait-for-nothing": Mutant(
        "StreamLane._wait_for", "lanes wait for the events they are given", instead(StreamLane, "_wait_for", _no_wait)
    ),
    "gathers-are-not-awaited": Mutant("StreamLane._ended", "compute waits for gathers", job_without_end("gathers")),
    "reductions-are-not-awaited": Mutant("Job.finish", "compute waits for reductions", job_without_end("reductions")),
    "lanes-ignore-collectives": Mutant(
        "Waiting.wait", "lanes wait for their collectives", instead(Waiting, "wait", _no_wait)
    ),
    "host-ignores-reductions": Mutant(
        "Job.finish", "the host waits for what it reads", instead(Job, "finish", not_on_host), "offload"
    ),
    "own-gathers-copied-early": Mutant(
        "_All.wait",
        "what a user's communication gives is copied when it is there",
        instead(_All, "wait", lambda real, each: each._rest() if each._rest else None),
        "own-communication",
    ),
    # _group
    "gathers-ignore-slots": Mutant(
        "GatherBucket.start",
        "gathers wait for what their slot was used for",
        instead(Gatherer, "start", gather_whatever_was),
    ),
    "gathers-ignore-landings": Mutant(
        "Gatherer.start_into",
        "gathers wait for what their landing buffer was used for",
        unfenced(Gatherer, "start_into"),
        "deep-packed",
    ),
    "weights-given-up-without-event": Mutant(
        "ParamGroup.reshard", "weights are given up behind their last reader", within(ParamGroup, "reshard", NO_MARK)
    ),
    "weights-shrunk-without-event": Mutant(
        "ParamGroup.shrink",
        "weights of which few ranks keep pieces are given up behind their last reader",
        within(ParamGroup, "shrink", NO_MARK),
        "few-ranks",
    ),
    "failed-gathers-go-on": Mutant(
        "ParamGroup._give_up_gathers",
        "gathers beside one that has failed are waited for",
        within(ParamGroup, "_give_up_gathers", (Job, "finish", _nothing)),
        "failing-extension",
    ),
    "packing-ignores-slots": Mutant(
        "ReduceBucket._pack",
        "gradients are packed behind what the slot was used for",
        instead(ReduceBucket, "_pack", pack_into_used),
        "two-streams",
    ),
    "reductions-ignore-packing": Mutant(
        "ReduceBucket.start", "reductions wait for packed gradients", within(ReduceBucket, "start", NO_MARK)
    ),
    "scratch-ignores-slots": Mutant(
        "ReduceBucket.start",
        "reductions wait for what their scratch memory was used for",
        unfenced(ReduceBucket, "start"),
        "two-streams-sums",
    ),
    "slots-freed-before-reductions": Mutant(
        "StreamLane._ended",
        "slots are free when their job has ended",
        instead(StreamLane, "_ended", release_job_early),
        "two-streams",
    ),
    "hooks-run-early": Mutant(
        "_on_stream.call", "all-reduce hooks wait for reductions", hook_at_once("before"), "all-reduce-hook"
    ),
    "hooks-are-not-awaited": Mutant(
        "_on_stream.call", "reductions wait for all-reduce hooks", hook_at_once("after"), "all-reduce-hook"
    ),
    "pieces-ignore-slots": Mutant(
        "Resident.keep",
        "few ranks' pieces are kept behind what the slot was used for",
        within(Resident, "keep", NO_WAIT),
        "branches-few-ranks",
    ),
    "pieces-sent-early": Mutant(
        "Resident.start",
        "gathers wait for few ranks' pieces",
        within(Resident, "keep", NO_MARK),
        "few-ranks-elsewhere",
    ),
    "pieces-given-up-without-event": Mutant(
        "Resident.release",
        "few ranks' pieces are given up behind their last reader",
        within(Resident, "release", NO_MARK),
        "few-ranks-by-hand",
    ),
    "extensions-ignore-optimizer": Mutant(
        "ExtensionBucket.start",
        "extensions read shards behind the optimizer",
        within(ExtensionBucket, "start", NO_WAIT),
        "extensions",
    ),
    "extensions-sent-early": Mutant(
        "ExtensionBucket.start",
        "gathers wait for extensions' inputs",
        within(ExtensionBucket, "start", NO_MARK),
        "extensions",
    ),
    "graphs-gather-early": Mutant(
        "_Gathers.start", "gathers of graphs wait for their shards", within(_Gathers, "start", NO_MARK), "graph"
    ),
    "graphs-drop-early": Mutant(
        "_Gathers._drop",
        "abandoned gathers are waited for before their memory is used again",
        within(_Gathers, "_drop", (Job, "finish", _nothing)),
        "graph",
    ),
    # _memory
    "rivals-carry-no-event": Mutant(
        "_is_taken",
        "a slot waits for what overlapping slots were used for",
        instead(Slot, "wait_for", _no_wait),
        "deep",
    ),
    "suspended-without-event": Mutant(
        "Slot.suspend",
        "reserved memory is written behind its last reader",
        instead(Slot, "suspend", lambda real, slot, after, lent: real(slot, None, lent)),
        "own-memory",
    ),
    "given-back-after-reading": Mutant(
        "BufferPool.release",
        "memory that a slot gives back waits for its last user",
        within(BufferPool, "release", (DeviceMemory, "give_back", _nothing)),
        "branches-counted",
    ),
    "poisoned-early": Mutant(
        "BufferPool._poisoned",
        "memory is poisoned behind its last reader",
        within(BufferPool, "_poisoned", NO_WAIT),
        "two-streams-debugging",
    ),
    "poisoned-without-event": Mutant(
        "BufferPool._poisoned",
        "memory is given up behind its poisoning",
        within(BufferPool, "_poisoned", NO_QUEUE),
        "debugging",
    ),
    "new-slots-without-event": Mutant(
        "BufferPool._make",
        "new slots are written behind what their memory was used for",
        within(BufferPool, "_make", NO_QUEUE),
    ),
    "own-slots-without-event": Mutant(
        "BufferPool._own_slot",
        "memory that comes back is written behind what it was used for",
        within(BufferPool, "_own_slot", NO_QUEUE),
        "counted-memory",
    ),
    "new-arenas-without-event": Mutant(
        "Arena._add",
        "new arenas are written behind what their memory was used for",
        within(Arena, "_add", NO_QUEUE),
        "optimizer-event",
    ),
    "filled-without-event": Mutant(
        "Arena.fill",
        "filled regions are written behind what their memory was used for",
        within(Arena, "fill", NO_QUEUE),
        "idle-memory",
    ),
    "emptied-early": Mutant(
        "BufferPool.empty",
        "emptied pools' memory waits for its last user",
        within(BufferPool, "empty", (DeviceMemory, "give_back", _nothing)),
        "another-stream",
    ),
    "drained-early": Mutant(
        "Arena.drain",
        "drained regions' memory waits for its last user",
        within(Arena, "drain", (DeviceMemory, "give_back", _nothing)),
        "idle-memory-on-another-stream",
    ),
    "allocating-streams-do-not-wait": Mutant(
        "DeviceMemory.give_back",
        "streams on which memory was allocated wait for it",
        instead(DeviceMemory, "give_back", back_to_current),
        "idle-memory-on-another-stream",
    ),
    "left-early": Mutant(
        "DeviceMemory.leave",
        "memory of dropped models waits for lanes",
        instead(DeviceMemory, "leave", _no_wait),
        "dropped-in-backward",
    ),
    # _engine
    "gathers-ignore-optimizer": Mutant(
        "Actions.parameters_changed",
        "gathers wait for the optimizer",
        lambda: mock.patch.object(Actions, "parameters_changed", forget_optimizer),
    ),
}

# Waits that are never the only ones, as far as is known: nothing shows that they are missing.
COVERED = {
    "current-stream-does-not-wait": Mutant(
        "DeviceMemory.give_back",
        "the current stream waits for memory that goes back: it goes to the streams on which it was allocated, which "
        "wait by themselves",
        instead(DeviceMemory, "give_back", back_to_allocated),
        "another-stream",
    ),
    "unused-given-up-without-event": Mutant(
        "BufferPool.reclaim",
        "memory of graphs is given up behind its last reader: the next gather of a graph waits for the current stream, "
        "and one of an eager forward for its beginning",
        within(BufferPool, "reclaim", NO_QUEUE),
        "graph",
    ),
}

# Functions that pass events on, whose waits are another's, or that are not waits of a stream.
PASSED_ON = {
    "Job._advance": "Waiting.wait",
    "Launched._advance": "Waiting.wait",
    "StreamLane.mark": "records for others",
    "StreamLane.queued": "DeviceMemory.leave",
    "DeviceMemory.queued": "records for others",
    "GatherBucket.forget": "BufferPool.release",
    "BufferPool.give_up": "a failure: see the scenario FAILING_COMMUNICATION",
    "Slot.__init__": "holds events",
    "Slot.drained": "Arena.drain",
    "Slot.moved": "Arena.fill",
    "Slot.resize": "BufferPool._own_slot",
    "Slot.wait_for": "_is_taken",
    "Region.drain": "Arena.drain",
    "_Gathers._wait": "Job.finish",
    "Gather.finish": "Job.finish",
    "Reduction.finish": "Job.finish",
    "Reduction.abandon": "_Gathers._drop",
    "GroupGradients.finish_reduce": "Job.finish",
    "ParamGroup.finish_gather": "Job.finish",
    "Actions.__init__": "holds an event",
    "Actions.ahead": "Actions.parameters_changed",
    "Engine.end_backward_by_hand": "Job.finish",
    "GroupGradients.give_hooks_back": "no wait: hooks",
    "Review.begin": "no wait: a place in the record",
    "RankOrdered._share_sum": "gloo, whose handles the host waits for",
    "Roll.is_full": "the host, before a vote",
    "Stopwatch._read": "the host, to read a clock",
    "agree": "the host reads the result at once",
    "slowest": "the host reads the result at once",
}
