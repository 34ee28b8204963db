"""The memory pool for unsharded parameters and communication buffers.

Code leases memory under a name (`Request`). It gets a *slot*, which it releases after use.

Before the first step has ended, slots are separate allocations. Meanwhile the pool records which requests are leased at
the same time. Between two steps it then makes an *arena*, in which each request has a fixed slot. Requests that were
never leased at the same time may overlap. For example, the weights of one layer, the gather of the next and the
gradients of a third can share memory, even if their sizes differ. A name has the same address in forward and backward
unless that needs more memory (`_plan/arena.py: pack`).

The pool records all types of steps together (with and without gradients, recomputed, accumulated). A lease falls back
to a separate slot if its request has no slot in the arena, or if an overlapping slot is leased. The pool counts such
fallbacks, and the next arena includes them.

States of a slot
----------------

    state      request   owner       next state, by
    free       None      None        leased: `lease`
    leased     set       see below   free: `release`; queued: `release_queued`; retained: `retain`; lent: `lend`;
                                     after an error, free: `release_failed`
    queued     None      None        free: `finish_queued`, once the queued work was waited for; leased: `lease`
    retained   set       None        leased: `take_back`, by the bucket that has retained it
    lent       set       None        free: `collect`, when no tensor refers to the memory any more

The owner of a leased slot is the bucket whose weights are in it (`_group/bucket.py`); other purposes have none. Saved
tensors and addresses of weights are looked up only in slots with an owner, so never in resharded ones. A queued slot
has the same attributes as a free one: whoever has queued it must pass it to `finish_queued`, even if it was leased
again in the meantime. `BufferPool.unfinished` counts the slots for which this was not done yet.

Most slots keep their memory while they are free. Two kinds do not: slots that *resize* (`Request.refills`), and slots
in a region of their own (`Region.is_large`). Unless the arena keeps idle memory (`keep_idle`), the memory of other
regions is freed at certain points of a step if nothing in them is leased (`free_idle`).

Who records, who waits, who frees
---------------------------------

On a CPU there are no events: the host waits for a job before it releases the slots of the job. On an accelerator, the
host runs ahead of the streams, so a released slot may still be read or written. The rules:

1. Whoever releases a slot passes an event that was recorded after the last use of it. The event becomes
   `Slot.free_after`. Gathered weights are read by compute, so this event is recorded on the current stream, after the
   module or its backward has been queued there. (Autograd runs a node on the stream of its forward.) A user's module
   that reads weights on another stream must make the current stream wait for it, as with torch's FSDP2.
2. Whoever writes first to a leased slot makes the writing stream wait for `free_after`: a gather on the stream of
   gathers, the packing of gradients on the current stream, scratch memory on the stream of reductions.
3. Slots of the arena may overlap. `lease` adds the events of overlapping slots to `free_after`. It does not lease a
   slot while an overlapping one is leased.
4. New memory may still be in use by queued work of the current stream: the allocator reuses memory within a stream
   without waiting. The first writer is often another stream. So a new slot has an event of the current stream in
   `free_after`.
5. The allocator hands freed memory to the streams on which it was allocated, without an event. So all these streams
   wait for `free_after` before memory is freed.
6. If `frees_queued` (`_group/setup.py`), a reduction releases its slots as soon as it is queued (`release_queued`). A
   later writer waits for the event of the reduction, on its own stream. Freeing the memory would make the compute
   stream wait (rule 5), so slots that lose their memory at release keep it until the reduction was waited for
   (`finish_queued`). Only `free_idle` may free it earlier, and make compute wait. That costs little where it is called:
   at the end of a forward, when usually no reduction is in flight; at the end of backward, which waits for all
   reductions; and before a large region is allocated.
7. Whether a slot is lent, or retained for views that user code keeps, depends on the code and the garbage collector of
   this rank. No decision about a collective may depend on it (`issued_bytes`).
8. A gather reads shards, which an optimizer writes on another stream: see `Actions.parameters_changed`.

`tests/testing/_race_mutants.py` removes each of these waits and events, and a test must find the race. The names of the
mutants, by rule (rules 6 and 7 have no wait of their own):

    1  weights-given-up-without-event, pieces-given-up-without-event, slots-freed-before-scatters,
       kept-views-written-early
    2  gathers-ignore-slots, gathers-ignore-landings, packing-ignores-slots, scratch-ignores-slots
    3  rivals-carry-no-event
    4  new-slots-without-event, own-slots-without-event, new-arenas-without-event, filled-without-event
    5  given-back-after-reading, emptied-early, drained-early, allocating-streams-do-not-wait
    8  gathers-ignore-optimizer
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from .._comm.lanes import Lane
from .._plan.layout import slot_bytes
from .._torch import debug
from .._torch.core import plainly
from .addresses import Addresses
from .device import DeviceMemory
from .regions import Arena
from .slots import Outside, Places, Request, RequestKey, Slot


class BufferPool:
    """The slots of one engine.

    Attributes:
        memory: allocates memory on the device.
        addresses: the index of weights by address.
        live_bytes: leased bytes, and bytes of weights outside of the pool that were registered with `register`.
        peak_bytes: peak of `live_bytes`.
        arena: the slots that have a fixed place.
        lent_bytes: the part of `live_bytes` that may differ between ranks: slots that are lent, or retained for views
            that user code keeps.
        backward: whether a backward is running. The weights of a bucket have one request in forward and another one in
            backward, whose slots may differ.
        places: the unique object for each `Place`.
        fallbacks: by name, the number of leases for which the arena had no free slot.
        unfinished: number of slots of `release_queued` for which `finish_queued` was not called yet.
    """

    def __init__(self, device: torch.device, lane: Lane) -> None:
        self.memory = DeviceMemory(device, lane)
        self.addresses = Addresses()
        self.live_bytes = self.peak_bytes = self._beside_bytes = self._allocations = 0
        self.fallbacks: dict[str, int] = {}
        self.backward = False
        self.lent_bytes = self.unfinished = 0
        self._requests: weakref.WeakValueDictionary[RequestKey, Request] = weakref.WeakValueDictionary()
        self._known: dict[Request, None] = {}  # all requests that were leased, in the order of their first leases
        self._live: set[Request] = set()
        self.arena = Arena(self.memory, self.addresses)
        self._lacks = True  # whether a new arena would differ: leases were met that the current one does not serve
        self._free: dict[int, list[Slot]] = {}  # by size: free slots outside of the arena
        # What `collect` looks at: lent slots, each with a function that tells whether its memory is still used; and
        # work that `finish_later` was given, without a slot.
        self._lent: deque[tuple[Slot | None, Callable[[], bool]]] = deque()
        self.places = Places()
        self._own: dict[tuple[str, int, bool], Slot] = {}  # slots of requests that `refills`
        # During a capture: `keeps_idle` of the arena and the work of `finish_later` from outside.
        self._outside: tuple[bool, list[tuple[Slot | None, Callable[[], bool]]]] | None = None

    @property
    def arena_bytes(self) -> int:
        """Bytes of all regions of the arena; 0 if there is no arena."""
        return self.arena.nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all regions of the arena that have memory, and of all other slots, leased or free."""
        return self._beside_bytes + self.arena.held_bytes

    @property
    def allocations(self) -> int:
        """Number of allocations. It stays constant once the order of a step is stable.

        Allocating the memory of a region again does not count.
        """
        return self._allocations + self.arena.allocations

    @property
    def issued_bytes(self) -> int:
        """`live_bytes` without `lent_bytes`. Equal on all ranks, so decisions about collectives may depend on it."""
        return self.live_bytes - self.lent_bytes

    def keep_idle(self, wanted: bool | None) -> None:
        """Set whether the arena keeps its memory while nothing in it is leased. None for the default of the device.

        The default is True on a CPU and False on accelerators. An accelerator's caching allocator keeps freed
        memory for the next allocation. On a CPU, freed memory goes to the system, and comes back with a page fault per
        page.
        """
        self._lacks |= self.arena.keep_idle(self.memory.device.type == "cpu" if wanted is None else wanted)

    def cross(self, capture: int) -> None:
        """Enter a capture of a CUDA graph, given by its number, or leave captures (0). `drain` must follow.

        No stream waits across the border: the device is idle when a capture begins, and its work runs only in replays.
        In a capture, memory is freed as with ``keep_idle(False)``. At its end, no slot has memory of the graph.
        """
        for slot in {*self.addresses, *self.arena.slots}:
            slot.forget_events()
        abandoned = [each for each in self._lent if each[0] is None]  # each waits for an event from its own side
        self._lent = deque(each for each in self._lent if each[0] is not None)
        if self._outside is None:
            self._outside = self.arena.keeps_idle, abandoned
            self.arena.keep_idle(False)
        elif not capture:
            keeps_idle, abandoned = self._outside
            self._outside = None
            self.arena.keep_idle(keeps_idle)
            self._lent += abandoned
        self.memory.cross(capture)

    def drain(self) -> None:
        """Free all memory in which nothing is leased. All groups must have dropped their views of slots."""
        self.collect()
        apart = [slot for slots in self._free.values() for slot in slots]
        self._free.clear()
        self.memory.wait_before_free([event for slot in apart for event in slot.free_after])
        self.addresses.replace(set(self.addresses).difference(apart))
        self._beside_bytes -= sum([slot.nbytes for slot in apart])
        self.arena.free_idle()

    def request(self, name: str, nbytes: int, backward: bool = False, refills: bool = False) -> Request:
        """The request for `nbytes` bytes under a name. All of its leases get the same slot, if possible."""
        key = name, slot_bytes(nbytes), backward, refills
        request = self._requests.get(key)
        if request is None:
            request = self._requests[key] = Request(*key)
        return request

    def requests(self, name: str, nbytes: int, refills: bool = False) -> tuple[Request, Request]:
        """The requests of forward and of backward. Index them with `self.backward`."""
        return self.request(name, nbytes, False, refills), self.request(name, nbytes, True, refills)

    def lease(self, request: Request, owner: weakref.ref[Any] | None = None) -> Slot:
        """Lease a slot of the requested size, with undefined content.

        Args:
            request: the request. If it is already leased, another request is used, with ``'`` appended to the name.
            owner: a weak reference to the bucket whose weights the slot will contain; None for other purposes.
        """
        if self._lent:
            self.collect()
        live = self._live
        while request in live:
            request = self.request(request.name + "'", request.nbytes, request.backward, request.refills)
        slot = request.slot
        # In the arena, requests that were never leased together so far may share a slot, or have slots that overlap.
        # The slot cannot be used while another one of these requests is leased.
        if slot is None or slot.request is not None or (slot.rivals and not _follow_rivals(slot)):
            slot = self._own_slot(request) if request.refills else self._unplanned(request)
        elif self.arena.without_memory and not slot.region.has_memory:
            self.arena.allocate(slot.region)
        if request.met is None or not live <= request.met:
            self._note_met(request)
        live.add(request)
        slot.request, slot.owner = request, owner
        self.live_bytes += request.nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        return slot

    def _unplanned(self, request: Request) -> Slot:
        """A slot in a new region of the arena, a slot from the free lists, or a new slot outside of the arena."""
        if self.arena.is_planned:
            self.fallbacks[request.name] = self.fallbacks.get(request.name, 0) + 1
            self._lacks = True
        if request.slot is None and not self.arena.keeps_idle:
            return self.arena.add(request)  # in a region of its own, so that its memory can be freed at release
        free = self._free.get(request.nbytes)
        return free.pop() if free else self._make(request.nbytes)

    def loses_memory(self, request: Request) -> bool:
        """Whether the slot of a request resizes: all tensors that use its memory lose it at release.

        Such a slot cannot be lent. The memory of a large region is also freed at release. But a slot that other code
        uses is lent or retained, which delays its release.
        In `TrackedPool`, the subclass for tools that count memory (`_fsdp2/listening.py`), all slots resize while it
        counts.
        """
        return request.refills

    def _own_slot(self, request: Request) -> Slot:
        """The slot of the request's name, shared by forward and backward. A new slot if it is leased."""
        key = request.name, request.nbytes, request.refills
        slot = self._own.get(key)
        if slot is None or slot.request is not None:
            slot = self._own[key] = self._make(request.nbytes, resizes=True)
        elif not slot.has_memory:
            slot.resize(request.nbytes, self.memory.current_events())
            self._beside_bytes += slot.nbytes
            self.addresses.add(slot)
        return slot

    def _note_met(self, request: Request) -> None:
        if not request.refills:  # those have slots of their own, outside of the arena
            self._known[request] = None
        request.meet(self._live)

    def release(self, slot: Slot, after: torch.Event | None = None, *, keep_memory: bool = False) -> None:
        """Release a leased slot. The next lease may write to it after the event `after`, the last use of the slot.

        Args:
            slot: the slot.
            after: the event.
            keep_memory: if True, a slot that loses its memory at release keeps it until `finish_queued`.
        """
        request = slot.request
        assert request is not None
        self._live.remove(request)
        if debug.debugging:
            after = self._poisoned(slot, after)
        slot.request = slot.owner = None
        slot.free_after = () if after is None else (after,)
        self.live_bytes -= slot.nbytes
        if request.slot is not slot and not slot.resizes:  # a slot outside of the arena, for any request of its size
            self._free.setdefault(slot.nbytes, []).append(slot)
        if not keep_memory and (slot.resizes or (slot.region is not None and slot.region.is_large)):
            self._free_memory((slot,))

    def release_queued(self, slot: Slot, after: torch.Event | None) -> None:
        """Like `release`, but the slot keeps its memory: its last use is only queued, and not waited for (rule 6).

        Another request may lease the slot. `finish_queued` frees the memory if it is not leased then.
        """
        self.release(slot, after, keep_memory=True)
        self.unfinished += 1

    def finish_queued(self, slots: Sequence[Slot], _after: torch.Event | None = None) -> None:
        """Free the memory of slots of `release_queued`, once their work has been waited for.

        Slots that have been leased again keep their memory. `_after` is unused: a job passes it to `when_done`.
        """
        self.unfinished -= len(slots)
        self._free_memory(slots)

    def _free_memory(self, slots: Iterable[Slot]) -> None:
        """Free the memory of those slots that are not leased and have memory only while they are leased."""
        for slot in slots:
            if slot.request is not None:
                continue
            if slot.region is not None:
                if slot.region.is_large and slot.region.has_memory:
                    self.arena.free(slot.region)
            elif slot.resizes and slot.has_memory:
                self.memory.wait_before_free(slot.take_events())
                self.addresses.remove(slot)
                self._beside_bytes -= slot.nbytes
                slot.resize(0)

    def retain(self, slot: Slot, after: torch.Event | None, for_views: bool) -> None:
        """Keep a slot leased for its next use, but without an owner, so that handles do not find its weights.

        Args:
            slot: the leased slot.
            after: event that the next writer must wait for.
            for_views: whether it is kept only because user code has views of it, so that other ranks may not keep it.
        """
        slot.retain(after, for_views)
        self.lent_bytes += slot.nbytes if for_views else 0

    def take_back(self, slot: Slot, owner: weakref.ref[Any] | None = None) -> None:
        """Use a retained slot as after a new lease."""
        self.lent_bytes -= slot.nbytes if slot.for_views else 0
        slot.take_back(owner, self.memory.current_events())  # code may have read views of the slot since the release

    def lend(self, slot: Slot, is_used: Callable[[], bool]) -> None:
        """Let other code use a slot. `collect` releases it when no tensor refers to its memory any more.

        Args:
            slot: the leased slot. Its bytes are part of `lent_bytes`.
            is_used: returns whether any tensor refers to the memory.
        """
        self.retain(slot, None, for_views=True)
        self._lent.append((slot, is_used))

    def finish_later(self, end: Callable[[], object]) -> None:
        """Finish work whose result no code will use: not now, but at the next `collect`.

        The garbage collector may call this at any time, even in the middle of another method of the pool. So it only
        notes the work.

        Args:
            end: waits for the work and releases its memory. Its exceptions are ignored.
        """
        self._lent.append((None, partial(_end_quietly, end)))

    def collect(self) -> None:
        """Release lent slots that are no longer used, and end the work of `finish_later`. Each lease calls this."""
        lent = self._lent
        for _ in range(len(lent)):
            slot, is_used = each = lent.popleft()
            if is_used():
                lent.append(each)
            elif slot is not None:
                self.take_back(slot)
                self.release(slot, *self.memory.current_events())

    def release_all(self, slots: Sequence[Slot], after: torch.Event | None) -> None:
        """Release each of these slots after the same event."""
        for slot in slots:
            self.release(slot, after)

    def release_failed(self, slots: Sequence[Slot]) -> None:
        """Release those of these slots that are still leased; for cases in which no stream has waited for `free_after`.

        For example, the code that leased them has failed before. The current stream waits here, and the event of the
        release is recorded on it after that.
        """
        for slot in slots:
            if slot.request is not None:
                slot.wait_until_free()
                self.release(slot, *self.memory.current_events())

    def _poisoned(self, slot: Slot, after: torch.Event | None) -> torch.Event | None:
        if after is not None:
            after.wait()
        debug.poison(slot.typed(torch.uint8, written=True))
        return next(iter(self.memory.current_events()), None)

    @property
    def wants_arena(self) -> bool:
        """Whether a new arena would differ from the current one, and can be made now because nothing is leased.

        This also calls `collect`. A slot that stays retained for views that user code keeps prevents new arenas.
        """
        if self._lacks and self._lent:
            self.collect()
        in_use = self.live_bytes or self.unfinished
        return self._lacks and bool(self._known) and not in_use

    def make_arena(self) -> None:
        """Replace all slots by those of a new arena, except slots that resize. Requires that no slot is in use."""
        self.free_all()
        self.memory.return_segments()
        self.arena.make(list(self._known))
        self._lacks = False

    def free_idle(self, between: bool = False) -> None:
        """Free the regions of the arena in which nothing is leased. Call this when no lease is about to follow.

        Args:
            between: whether this is the end of a forward whose backward follows. The requests that are leased now are
                noted. The next arena gives them a region of their own, so that all other memory is freed while the loss
                is computed.
        """
        if self.arena.keeps_idle:
            return
        if self._lent:
            self.collect()
        self._lacks |= between and self.arena.note_leased_between(self._live)
        self.arena.free_idle()

    def span_of(self, request: Request) -> tuple[int, int] | None:
        """Offset from the beginning of the arena, and size, of a request's slot in bytes; None if it has no slot."""
        slot = request.slot
        return None if slot is None else (slot.region.offset + slot.offset, slot.nbytes)

    def register(self, outside: Sequence[Outside]) -> None:
        """Register weights in memory outside of the slots. Its bytes count as live, but not as held."""
        self.addresses.register(outside)
        self.live_bytes += sum(each.nbytes for each in outside)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def unregister(self, outside: Sequence[Outside]) -> None:
        """Unregister weights outside of the slots."""
        self.addresses.unregister(outside)
        self.live_bytes -= sum(each.nbytes for each in outside)

    def free_all(self) -> None:
        """Free the memory of all free slots, and of the arena unless some of it is leased."""
        self.collect()
        freed = [slot for slots in self._free.values() for slot in slots]
        self._free.clear()
        if self.arena.is_unused():
            self._lacks |= self.arena.is_planned
            freed += self.arena.slots
            for request in self._known:
                request.give_slot(None)
        self.memory.wait_before_free([event for slot in freed for event in slot.free_after])
        if self.arena.is_unused():
            self.arena.clear()
        remaining = set(self.addresses).difference(freed)
        self.addresses.replace(remaining)
        self._beside_bytes = sum([slot.nbytes for slot in remaining.difference(self.arena.slots)])

    def start_over(self) -> None:
        """Free the memory as `free_all` does, and forget which requests were leased together.

        Called when sizes will change. Leased requests keep their slots until they are released.
        """
        self.free_all()
        for request in self._known.keys() - self._live:
            request.forget()
        self._known = {request: None for request in self._known if request in self._live}
        self.arena.forget()
        for request in self._live:
            request.start_over(self._live)
        self._lacks = True

    def _make(self, nbytes: int, resizes: bool = False) -> Slot:
        memory = self.memory.allocate(nbytes)
        self._beside_bytes += nbytes
        self._allocations += 1
        with plainly():
            slot = Slot(memory, self.memory.current_events(), resizes)
        self.addresses.add(slot)
        return slot

    def __repr__(self) -> str:
        slots = f"{len(self._live)} slots leased, {self.live_bytes} of {self.held_bytes} bytes"
        if not self.arena_bytes:
            return f"BufferPool({slots})"
        share = self.arena_bytes / self.peak_bytes
        # No arena can be smaller than the peak of live bytes, so that is the bound.
        return f"BufferPool({slots}, arena {self.arena_bytes} bytes, {share:.2f} of the bound)"


def _end_quietly(end: Callable[[], object]) -> bool:
    """End abandoned work. Returns False: its memory is no longer used."""
    with suppress(Exception):
        end()
    return False


def _follow_rivals(slot: Slot) -> bool:
    """Make the next writer of a slot also wait for the overlapping slots. Returns False if one of these is leased."""
    if slot.awaited and not slot.free_after:
        # A slot without an event of its own gets all events of its rivals again. (`add_events_of` leaves out those that
        # came before the slot's own release, because the event of that release covers them.)
        slot.awaited.clear()
    for rival in slot.rivals:
        if rival.request is not None:
            return False
        if rival.free_after:
            slot.add_events_of(rival)
    return True
