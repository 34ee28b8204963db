"""The library with a wait taken out: each place where one stream waits for another, and a scenario that shows it."""

from __future__ import annotations

from unittest import mock

from _race_plants import (
    NO_MARK,
    NO_QUEUE,
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
    unfenced,
    within,
)
from composable_shard._comm.collectives import All
from composable_shard._comm.lanes import Job, StreamLane, Waiting
from composable_shard._engine.actions import Actions
from composable_shard._group import gradients
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
from composable_shard._memory.state_on_host import StateOnHost

MUTANTS = {
    # _comm
    "lanes-wait-for-nothing": Mutant(
        "StreamLane._wait_for", "lanes wait for the events they are given", instead(StreamLane, "_wait_for", _no_wait)
    ),
    "gathers-are-not-awaited": Mutant("StreamLane._ended", "compute waits for gathers", job_without_end("gathers")),
    "reductions-are-not-awaited": Mutant("Job.finish", "compute waits for reductions", job_without_end("reductions")),
    "lanes-ignore-collectives": Mutant(
        "Waiting.wait",
        "lanes wait for their collectives, where these have a stream of their own",
        instead(Waiting, "wait", _no_wait),
        "network-of-its-own",
    ),
    "host-ignores-reductions": Mutant(
        "Job.wait_on_host", "the host waits for what it reads", instead(Job, "wait_on_host", _no_wait), "offload"
    ),
    "failed-jobs-go-on": Mutant(
        "StreamLane._give_up",
        "memory of a job that fails goes back behind what it had queued",
        instead(StreamLane, "_give_up", _no_wait),
        "failing-communication",
    ),
    "own-gathers-copied-early": Mutant(
        "All.wait",
        "what a user's communication gives is copied when it is there",
        instead(All, "wait", lambda real, each: each._rest() if each._rest else None),
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
        "few-ranks",
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
        "ReduceBucket._queued", "reductions wait for packed gradients", within(ReduceBucket, "_queued", NO_MARK)
    ),
    "scratch-ignores-slots": Mutant(
        "ReduceBucket._queued",
        "reductions wait for what their scratch memory was used for",
        unfenced(ReduceBucket, "start"),
        "two-streams-sums",
    ),
    "all-reduces-start-early": Mutant(
        "ReduceBucket._start_apart",
        "all-reduces over replicas wait for the reduce-scatter",
        instead(StreamLane, "behind", behind_at_once),
        "replicas",
    ),
    "slots-freed-before-scatters": Mutant(
        "ReduceBucket.start",
        "slots are free when their reduce-scatter has ended",
        instead(Job, "occupy", free_at_once),
        "replicas-two-streams",
    ),
    "slots-freed-behind-first-scatter": Mutant(
        "ReduceBucket.start",
        "slots are free when the last reduce-scatter of their group has ended",
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
        "BufferPool._return",
        "memory that a slot gives back waits for its last user",
        within(BufferPool, "_return", (DeviceMemory, "give_back", _nothing)),
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
    "copied-to-host-at-once": Mutant(
        "StateOnHost.step",
        "gradients are copied to the host when they are reduced",
        within(StateOnHost, "step", NO_MARK),
        "steps-on-host",
    ),
    "host-steps-at-once": Mutant(
        "StateOnHost._step_part",
        "the host steps what has been copied to it",
        within(StateOnHost, "_step_part", NO_SYNC),
        "steps-on-host",
    ),
    "stepped-on-host-and-not-back": Mutant(
        "StateOnHost.step",
        "gathers wait for shards that come back from the host",
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

# Waits that are never the only ones, as far as is known: nothing shows that they are missing.
COVERED = {
    "given-up-before-free": Mutant(
        "Slot.wait_until_free",
        "a lease that is given up was free only behind earlier work: slots of other sizes keep those events themselves",
        instead(Slot, "wait_until_free", _no_wait),
        "failing-extension",
    ),
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
    "BufferPool.give_up": "StreamLane._give_up",
    "BufferPool.release": "holds events",
    "Job.__init__": "holds events",
    "Launched.__init__": "holds events",
    "Job.occupy": "holds events",
    "free_queued": "ReduceBucket.start",
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
    "ParamHooks.take_over": "no wait: hooks",
    "Review.begin": "no wait: a place in the record",
    "RankOrdered._share_sum": "gloo, whose handles the host waits for",
    "Roll.is_full": "the host, before a vote",
    "Stopwatch._read": "the host, to read a clock",
    "_give_up": "Job.finish",
    "StateOnDisk._step_sections": "files, whose threads the host waits for",
    "_Moves._give_back": "files, whose threads the host waits for",
    "StateOnHost.keep_all": "Job.finish",
    "agree": "the host reads the result at once",
    "slowest": "the host reads the result at once",
}
