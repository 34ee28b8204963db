"""Mutants of the library: for each wait between streams, a way to remove it and a scenario that shows the race."""

from __future__ import annotations

from unittest import mock

from _race_plants import (
    NO_EVENT,
    NO_EVENTS,
    NO_SYNC,
    NO_WAIT,
    Mutant,
    _no_wait,
    _nothing,
    back_to_allocated,
    back_to_current,
    behind_at_once,
    forget_optimizer,
    free_at_once,
    free_behind_first,
    gather_whatever_was,
    hook_at_once,
    instead,
    job_without_end,
    not_awaited,
    pack_into_used,
    take_back_with_old_events,
    unfenced,
    within,
)
from composable_shard._comm.collectives import All
from composable_shard._comm.lanes import Job, StreamLane, Waiting
from composable_shard._engine.actions import Actions
from composable_shard._group import gradients
from composable_shard._group.bucket import Gatherer
from composable_shard._group.exchange import _Gathers
from composable_shard._group.extension_bucket import ExtensionBucket
from composable_shard._group.group import ParamGroup
from composable_shard._group.reduction import ReduceBucket
from composable_shard._group.refresh import NodeCopies, NodeCopy
from composable_shard._group.resident import Resident
from composable_shard._memory.device import DeviceMemory
from composable_shard._memory.pool import BufferPool
from composable_shard._memory.regions import Arena
from composable_shard._memory.slots import Slot
from composable_shard._memory.state_on_host import StateOnHost

MUTANTS = {
    # _comm
    "lanes-wait-for-nothing": Mutant(
        "StreamLane._wait_for",
        "lanes wait for the events that are passed to them",
        instead(StreamLane, "_wait_for", _no_wait),
    ),
    "gathers-are-not-awaited": Mutant("StreamLane._ended", "compute waits for gathers", job_without_end("gathers")),
    "reductions-are-not-awaited": Mutant("Job.finish", "compute waits for reductions", job_without_end("reductions")),
    "lanes-ignore-collectives": Mutant(
        "Waiting.wait",
        "lanes wait for their collectives if these run on another stream",
        instead(Waiting, "wait", _no_wait),
        "network-of-its-own",
    ),
    "host-ignores-reductions": Mutant(
        "Job.wait_on_host",
        "the host waits for tensors before it reads them",
        instead(Job, "wait_on_host", _no_wait),
        "offload",
    ),
    "failed-jobs-go-on": Mutant(
        "StreamLane._give_up",
        "memory of a job that fails is returned after the work that the job had queued",
        instead(StreamLane, "_give_up", _no_wait),
        "failing-communication",
    ),
    "own-gathers-copied-early": Mutant(
        "All.wait",
        "the output of custom communication is copied after it has arrived",
        instead(All, "wait", lambda real, each: each._rest() if each._rest else None),
        "own-communication",
    ),
    # _group
    "gathers-ignore-slots": Mutant(
        "GatherBucket.start",
        "gathers wait for earlier uses of their slot",
        instead(Gatherer, "start", gather_whatever_was),
    ),
    "gathers-ignore-landings": Mutant(
        "Gatherer.start_into",
        "gathers wait for earlier uses of their landing buffer",
        unfenced(Gatherer, "start_into"),
        "few-ranks",
    ),
    "weights-given-up-without-event": Mutant(
        "ParamGroup.reshard", "weights are freed after their last reader", within(ParamGroup, "reshard", NO_EVENT)
    ),
    "weights-shrunk-without-event": Mutant(
        "ParamGroup.shrink",
        "weights of which few ranks keep pieces are freed after their last reader",
        within(ParamGroup, "shrink", NO_EVENT),
        "few-ranks",
    ),
    "failed-gathers-go-on": Mutant(
        "ParamGroup._give_up_gathers",
        "if a gather fails, the others in flight are waited for",
        within(ParamGroup, "_give_up_gathers", (Job, "finish", _nothing)),
        "failing-extension",
    ),
    "packing-ignores-slots": Mutant(
        "ReduceBucket._pack",
        "gradients are packed after earlier uses of the slot",
        instead(ReduceBucket, "_pack", pack_into_used),
        "two-streams",
    ),
    "reductions-ignore-packing": Mutant(
        "ReduceBucket._queued", "reductions wait for packed gradients", within(ReduceBucket, "_queued", NO_EVENT)
    ),
    "scratch-ignores-slots": Mutant(
        "ReduceBucket._queued",
        "reductions wait for earlier uses of their scratch memory",
        unfenced(ReduceBucket, "start"),
        "two-streams-sums",
    ),
    "all-reduces-start-early": Mutant(
        "ReduceBucket._start_apart",
        "all-reduces over replicas wait for the reduce-scatter",
        instead(StreamLane, "second", behind_at_once),
        "replicas",
    ),
    "slots-freed-before-scatters": Mutant(
        "ReduceBucket.start",
        "slots are free after their reduce-scatter has ended",
        instead(Job, "occupy", free_at_once),
        "replicas-two-streams",
    ),
    "slots-freed-behind-first-scatter": Mutant(
        "ReduceBucket.start",
        "slots are free after the last reduce-scatter of their group has ended",
        instead(gradients, "free_queued", free_behind_first),
        "two-dtypes",
    ),
    "hooks-run-early": Mutant(
        "_on_stream.call", "all-reduce hooks wait for reductions", hook_at_once("before"), "all-reduce-hook"
    ),
    "hooks-are-not-awaited": Mutant(
        "_on_stream.call", "reductions wait for all-reduce hooks", hook_at_once("after"), "all-reduce-hook"
    ),
    "pieces-ignore-slots": Mutant(
        "Resident.keep",
        "few ranks' pieces are copied to their slot after earlier uses of the slot",
        within(Resident, "keep", NO_WAIT),
        "branches-few-ranks",
    ),
    "pieces-sent-early": Mutant(
        "Resident.start",
        "gathers wait for few ranks' pieces",
        within(Resident, "keep", NO_EVENT),
        "few-ranks-elsewhere",
    ),
    "pieces-given-up-without-event": Mutant(
        "Resident.release",
        "few ranks' pieces are freed after their last reader",
        within(Resident, "release", NO_EVENT),
        "few-ranks-by-hand",
    ),
    "extensions-ignore-optimizer": Mutant(
        "ExtensionBucket.start",
        "extensions read shards after the optimizer step",
        within(ExtensionBucket, "start", NO_WAIT),
        "extensions",
    ),
    "extensions-sent-early": Mutant(
        "ExtensionBucket.gather",
        "gathers wait for the tensors that extensions create",
        within(ExtensionBucket, "gather", NO_EVENT),
        "extensions",
    ),
    "refreshes-ignore-optimizer": Mutant(
        "ParamGroup.start_refresh",
        "refreshes of compute copies wait for the optimizer",
        instead(NodeCopies, "refresh", lambda real, copies, shards, after: real(copies, shards, None)),
        "outer-sharding",
    ),
    "gathers-ignore-refreshes": Mutant(
        "NodeCopy.arrive",
        "gathers wait for the refresh of the copies that they read",
        instead(NodeCopy, "arrive", lambda real, copy: (real(copy), ())[1]),
        "outer-sharding",
    ),
    "graphs-refresh-early": Mutant(
        "NodeCopies.refresh_for_graph",
        "refreshes of graphs wait for the optimizer",
        within(NodeCopies, "refresh_for_graph", NO_EVENT),
        "outer-sharding-graph",
    ),
    "graphs-gather-early": Mutant(
        "_Gathers.start", "gathers of graphs wait for their shards", within(_Gathers, "start", NO_EVENT), "graph"
    ),
    "graphs-drop-early": Mutant(
        "_Gathers._drop",
        "abandoned gathers are waited for before their memory is reused",
        within(_Gathers, "_drop", (Job, "finish", _nothing)),
        "graph",
    ),
    # _memory
    "rivals-carry-no-event": Mutant(
        "_follow_rivals",
        "a slot waits for earlier uses of overlapping slots",
        instead(Slot, "add_events_of", _no_wait),
        "deep",
    ),
    "kept-views-written-early": Mutant(
        "BufferPool.take_back",
        "memory of which user code keeps views is written after their last reader",
        instead(BufferPool, "take_back", take_back_with_old_events),
        "kept-view",
    ),
    "given-back-after-reading": Mutant(
        "BufferPool._free_memory",
        "the memory of a slot is returned after its last use",
        within(BufferPool, "_free_memory", (DeviceMemory, "wait_before_free", _nothing)),
        "branches-counted",
    ),
    "poisoned-early": Mutant(
        "BufferPool._poisoned",
        "memory is poisoned after its last reader",
        within(BufferPool, "_poisoned", NO_WAIT),
        "two-streams-debugging",
    ),
    "poisoned-without-event": Mutant(
        "BufferPool._poisoned",
        "memory is freed after it was poisoned",
        within(BufferPool, "_poisoned", NO_EVENTS),
        "debugging",
    ),
    "new-slots-without-event": Mutant(
        "BufferPool._make",
        "new slots are written after earlier uses of their memory",
        within(BufferPool, "_make", NO_EVENTS),
    ),
    "own-slots-without-event": Mutant(
        "BufferPool._own_slot",
        "memory that a slot gets again is written after earlier uses of it",
        within(BufferPool, "_own_slot", NO_EVENTS),
        "counted-memory",
    ),
    "new-arenas-without-event": Mutant(
        "Arena._add",
        "new arenas are written after earlier uses of their memory",
        within(Arena, "_add", NO_EVENTS),
        "optimizer-event",
    ),
    "filled-without-event": Mutant(
        "Arena.allocate",
        "filled regions are written after earlier uses of their memory",
        within(Arena, "allocate", NO_EVENTS),
        "idle-memory",
    ),
    "emptied-early": Mutant(
        "BufferPool.free_all",
        "the memory of emptied pools is returned after its last use",
        within(BufferPool, "free_all", (DeviceMemory, "wait_before_free", _nothing)),
        "another-stream",
    ),
    "drained-early": Mutant(
        "Arena.free",
        "the memory of drained regions is returned after its last use",
        within(Arena, "free", (DeviceMemory, "wait_before_free", _nothing)),
        "idle-memory-on-another-stream",
    ),
    "allocating-streams-do-not-wait": Mutant(
        "DeviceMemory.wait_before_free",
        "streams wait for other uses of memory that is returned to them",
        instead(DeviceMemory, "wait_before_free", back_to_current),
        "idle-memory-on-another-stream",
    ),
    "left-early": Mutant(
        "DeviceMemory.leave",
        "the memory of deleted models is freed after the work of the lanes",
        instead(DeviceMemory, "leave", _no_wait),
        "dropped-in-backward",
    ),
    "copied-to-host-at-once": Mutant(
        "StateOnHost.step",
        "gradients are copied to the host after they are reduced",
        within(StateOnHost, "step", NO_EVENT),
        "steps-on-host",
    ),
    "host-steps-at-once": Mutant(
        "StateOnHost._step_part",
        "the host runs the optimizer step after the gradients have been copied to it",
        within(StateOnHost, "_step_part", NO_SYNC),
        "steps-on-host",
    ),
    "stepped-on-host-and-not-back": Mutant(
        "StateOnHost.step",
        "gathers wait for shards to be copied back from the host",
        instead(StateOnHost, "_step_part", not_awaited),
        "steps-on-host",
    ),
    # _engine
    "gathers-ignore-optimizer": Mutant(
        "Actions.parameters_changed",
        "gathers wait for the optimizer",
        lambda: mock.patch.object(Actions, "parameters_changed", forget_optimizer),
    ),
}

# Waits that other waits cover in all known cases. No scenario shows a race without them.
COVERED = {
    "suspended-without-event": Mutant(
        "Slot.retain",
        "reserved memory is written after its last reader; a later event, of `take_back`, comes after it, too",
        instead(Slot, "retain", lambda real, slot, after, for_views: real(slot, None, for_views)),
        "own-memory",
    ),
    "given-up-before-free": Mutant(
        "BufferPool.release_failed",
        "a cancelled lease keeps the events of earlier uses; slots of other sizes have these events too",
        within(BufferPool, "release_failed", (Slot, "wait_until_free", _nothing)),
        "failing-extension",
    ),
    "current-stream-does-not-wait": Mutant(
        "DeviceMemory.wait_before_free",
        "the current stream waits for memory that is returned; the memory is returned to the streams on which it was "
        "allocated, and they wait too",
        instead(DeviceMemory, "wait_before_free", back_to_allocated),
        "another-stream",
    ),
    "unused-given-up-without-event": Mutant(
        "BufferPool.collect",
        "memory of graphs is freed after its last reader; the next gather of a graph waits for the current stream, and "
        "a gather of an eager forward waits for the beginning of the forward",
        within(BufferPool, "collect", NO_EVENTS),
        "graph",
    ),
}

# Functions that only pass events on to another function (its name), or that do not wait on a stream (the reason).
PASSED_ON = {
    "NodeCopy.refresh": "shown by tests/group/test_refresh_races.py",
    "NodeCopy.settle": "shown by tests/group/test_refresh_races.py",
    "Actions.begin_refreshes": "ParamGroup.start_refresh",
    "Job._advance": "Waiting.wait",
    "Slot.take_back": "BufferPool.take_back",
    "Launched._advance": "Waiting.wait",
    "StreamLane.record_current_stream": "only records an event",
    "StreamLane.queued": "DeviceMemory.leave",
    "DeviceMemory.current_events": "only records events",
    "Slot.wait_until_free": "ReduceBucket._pack",
    "GatherBucket.await_memory": "BufferPool.release_failed",
    "BufferPool.release": "only stores events",
    "Job.__init__": "only stores events",
    "Launched.__init__": "only stores events",
    "Job.occupy": "only stores events",
    "free_queued": "ReduceBucket.start",
    "Slot.__init__": "only stores events",
    "_Gathering.finish": "_Gathers.finish",
    "ExtensionGathering.finish": "Waiting.wait",
    "ExtensionGathering.abandon": "Waiting.wait",
    "Slot.take_events": "Arena.free",
    "Slot.forget_events": "the device is idle when a capture begins or ends; see test_capture_rules.py",
    "BufferPool.drain": "Arena.free",
    "Engine.before_replay": "the event of a user before a replay; see test_graphed_step.py",
    "Slot.reallocated": "Arena.allocate",
    "Slot.resize": "BufferPool._own_slot",
    "Slot.add_events_of": "_follow_rivals",
    "Region.take_events": "Arena.free",
    "_Gathers._wait": "Job.finish",
    "Gather.finish": "Job.finish",
    "Reduction.finish": "Job.finish",
    "Reduction.abandon": "_Gathers._drop",
    "GroupGradients.finish_reduce": "Job.finish",
    "ParamGroup.finish_gather": "Job.finish",
    "Actions.__init__": "only stores an event",
    "Actions.issue_gather": "Actions.parameters_changed",
    "Engine.finish_backward": "Job.finish",
    "RankOrdered._share_sum": "gloo: the host waits for its handles",
    "Roll.is_full": "the host waits before a vote",
    "Stopwatch._read": "the host waits to read a clock",
    "_give_up": "Job.finish",
    "StateOnDisk._step_sections": "the host waits for the threads that read and write files",
    "StateOnHost.keep_all": "Job.finish",
    "agree": "the host reads the result immediately",
    "slowest": "the host reads the result immediately",
}
