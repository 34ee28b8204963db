"""The memory pool for unsharded parameters and communication buffers. Slots are leased, released and reused.

In the first step, a released slot goes to a free list by size. The next lease of that size takes it, whatever its dtype
or purpose. Meanwhile the pool records which requests are live at the same time. Between two steps it then makes an
*arena*: one allocation in which each request has a fixed slot. Requests that were never live at the same time may
overlap. For example, the weights of one layer, the gather of the next and the gradients of a third can share memory,
even if their sizes differ. A name has the same address in forward and backward if that needs no extra memory (`pack`).

The pool records all types of steps together (with and without gradients, recomputed, accumulated). Requests share
memory only if no step had both live at the same time. A lease falls back to the free lists if it has no slot in the
arena, or if its slot is taken. The pool counts such fallbacks, and the next arena includes them.
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
        live_bytes: leased bytes, and bytes of weights outside of the pool that were registered with `claim`.
        peak_bytes: peak of `live_bytes`.
        arena: the slots that have a fixed place.
        lent_bytes: the part of `live_bytes` that stays leased only because user code on this rank keeps views.
        backward: whether a backward is running. Backward has its own requests, which may have other slots.
        places: the unique object for each `Place`.
        fallbacks: by name, the number of leases for which the arena had no free slot.
    """

    def __init__(self, device: torch.device, lane: Lane) -> None:
        self.memory = DeviceMemory(device, lane)
        self.addresses = Addresses()
        self.live_bytes = self.peak_bytes = self._beside_bytes = self._allocations = 0
        self.fallbacks: dict[str, int] = {}
        self.backward = False
        self.lent_bytes = 0
        self._requests: weakref.WeakValueDictionary[RequestKey, Request] = weakref.WeakValueDictionary()
        self._known: dict[Request, None] = {}  # all requests that were leased, in the order of their first leases
        self._live: set[Request] = set()
        self.arena = Arena(self.memory, self.addresses)
        self._lacks = True
        self._free: dict[int, list[Slot]] = {}
        self._counted_out: deque[tuple[Slot | None, Callable[[], bool]]] = deque()
        self.places = Places()
        self._own: dict[tuple[str, int, bool], Slot] = {}

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

    def use_mem_pool(self, wanted: bool) -> None:
        """Set whether later allocations use a `torch.cuda.MemPool`.

        Raises:
            ShardConfigValueError: the device has no `MemPool`.
        """
        self._lacks |= self.memory.use_mem_pool(wanted)

    def keep_idle(self, wanted: bool | None) -> None:
        """Set whether the arena keeps its memory while nothing in it is leased. None for the default of the device.

        The default is True on a CPU and False on accelerators. An accelerator's caching allocator returns memory
        immediately. On a CPU, freed memory goes to the system, and comes back with a page fault per page.
        """
        self._lacks |= self.arena.keep_idle(self.memory.device.type == "cpu" if wanted is None else wanted)

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

    def lease(self, nbytes: int, name: str = "", owner: Any = None) -> Slot:
        """`lease_for` with a request that is looked up or created by name and size."""
        return self.lease_for(self.request(name, nbytes), None if owner is None else weakref.ref(owner))

    def lease_for(self, request: Request, owner: weakref.ref[Any] | None = None) -> Slot:
        """Lease a slot of the requested size, with undefined content.

        Args:
            request: the request. If it is already leased, another request is used, with ``'`` appended to the name.
            owner: a weak reference to the bucket whose weights the slot will contain; None for other purposes.
        """
        if self._counted_out:
            self.reclaim()
        live = self._live
        while request in live:
            request = self.request(request.name + "'", request.nbytes, request.backward, request.refills)
        slot = request.slot
        if slot is None or slot.request is not None or (slot.rivals and _is_taken(slot)):
            slot = self._own_slot(request) if request.refills else self._unplanned(request)
        elif self.arena.dry and slot.region.is_dry:
            self.arena.fill(slot.region)
        if request.met is None or not live <= request.met:
            self._note_met(request)
        live.add(request)
        slot.request, slot.owner = request, owner
        self.live_bytes += request.nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        return slot

    def _unplanned(self, request: Request) -> Slot:
        """A slot from the free lists, or a new slot."""
        if self.arena.is_planned:
            self.fallbacks[request.name] = self.fallbacks.get(request.name, 0) + 1
            self._lacks = True
        if request.slot is None and not self.arena.keeps_idle:
            return self.arena.add(request)
        free = self._free.get(request.nbytes)
        return free.pop() if free else self._make(request.nbytes)

    def loses_memory(self, request: Request) -> bool:
        """Whether the slot of a request loses its memory at release, even if tensors use it."""
        return request.refills

    def _own_slot(self, request: Request) -> Slot:
        """The slot of the request's name, shared by forward and backward. A new slot if it is leased."""
        key = request.name, request.nbytes, request.refills
        slot = self._own.get(key)
        if slot is None or slot.request is not None:
            slot = self._own[key] = self._make(request.nbytes, resizes=True)
        elif not slot.has_memory:
            slot.resize(request.nbytes, self.memory.queued())
            self._beside_bytes += slot.nbytes
            self.addresses.add(slot)
        return slot

    def _note_met(self, request: Request) -> None:
        if not request.refills:
            self._known[request] = None
        request.meet(self._live)

    def release(self, slot: Slot, after: torch.Event | None = None, *, queued: bool = False) -> None:
        """Release a slot. The next lease may write to it after the event `after`.

        Args:
            slot: a leased slot.
            after: event after the last work on the slot.
            queued: whether that work is queued and has not been waited for. Freeing memory must wait for the last work
                on it, so memory that is freed between leases is then kept until `give_back` or the next lease.
        """
        request = slot.request
        assert request is not None
        self._live.remove(request)
        if debug.debugging:
            after = self._poisoned(slot, after)
        slot.request = slot.owner = None
        slot.free_after = () if after is None else (after,)
        self.live_bytes -= slot.nbytes
        if request.slot is not slot and not slot.resizes:
            self._free.setdefault(slot.nbytes, []).append(slot)
        if queued:
            self.arena.note_busy(1)
        elif slot.resizes or (slot.region is not None and slot.region.is_large):
            self._return((slot,))

    def give_back(self, slots: Sequence[Slot], _after: torch.Event | None = None) -> None:
        """Free the memory of slots that were released with ``queued=True``, once their work has been waited for.

        Slots that have been leased again keep their memory.
        """
        self.arena.note_busy(-len(slots))
        self._return(slots)

    def _return(self, slots: Iterable[Slot]) -> None:
        """Free the memory of those slots that are not leased and have memory only while they are leased."""
        for slot in slots:
            if slot.request is not None:
                continue
            if slot.region is not None:
                if slot.region.is_large and not slot.region.is_dry:
                    self.arena.drain(slot.region)
            elif slot.resizes and slot.has_memory:
                self.memory.give_back(slot.drained())
                self.addresses.remove(slot)
                self._beside_bytes -= slot.nbytes
                slot.resize(0)

    def suspend(self, slot: Slot, after: torch.Event | None, lent: bool) -> None:
        """Remove the owner of a slot that stays leased, so that handles no longer find its weights.

        Args:
            slot: the leased slot.
            after: event that the next writer must wait for.
            lent: whether the slot stays leased only because user code keeps views of it.
        """
        slot.suspend(after, lent)
        self.lent_bytes += slot.nbytes if lent else 0

    def resume(self, slot: Slot, owner: weakref.ref[Any] | None = None) -> None:
        """Set the owner of a suspended slot again, as after a new lease."""
        self.lent_bytes -= slot.nbytes if slot.lent else 0
        slot.resume(owner)

    def release_unused(self, slot: Slot, is_used: Callable[[], bool]) -> None:
        """Release a slot when no tensor refers to its memory any more. Each lease checks this (`reclaim`).

        Args:
            slot: the leased slot. It counts as lent, because the time of its release may differ between ranks.
            is_used: returns whether any tensor refers to the memory.
        """
        self.suspend(slot, None, lent=True)
        self._counted_out.append((slot, is_used))

    def abandon(self, end: Callable[[], object]) -> None:
        """End work whose result will not be used, before the next lease (`reclaim`).

        This may be called at any time, even by the garbage collector in the middle of another method.

        Args:
            end: waits for the work and releases its memory. Its exceptions are ignored.
        """
        self._counted_out.append((None, partial(_ended, end)))

    def reclaim(self) -> None:
        """Release the slots of `release_unused` that are no longer used, and end abandoned work."""
        counted = self._counted_out
        for _ in range(len(counted)):
            slot, is_used = each = counted.popleft()
            if is_used():
                counted.append(each)
            elif slot is not None:
                self.resume(slot)
                self.release(slot, *self.memory.queued())

    def release_all(self, slots: Sequence[Slot], after: torch.Event | None) -> None:
        """`release` each of these slots."""
        for slot in slots:
            self.release(slot, after)

    def give_up(self, slots: Sequence[Slot]) -> None:
        """Release these slots after a failure, if they are still leased, and wait for their pending events first."""
        for slot in slots:
            if slot.request is not None:
                slot.wait_until_free()
                self.release(slot, *self.memory.queued())

    def _poisoned(self, slot: Slot, after: torch.Event | None) -> torch.Event | None:
        if after is not None:
            after.wait()
        debug.poison(slot.typed(torch.uint8, written=True))
        return next(iter(self.memory.queued()), None)

    @property
    def wants_arena(self) -> bool:
        """Whether a new arena would include new information, and can be made now because nothing is in use."""
        if self._lacks and self._counted_out:
            self.reclaim()
        in_use = self.live_bytes or self.arena.busy
        return self._lacks and bool(self._known) and not in_use

    def make_arena(self) -> None:
        """Replace all slots by those of a new arena. Requires that no slot is in use."""
        self.empty()
        self.memory.leave_segments()
        self.arena.make(list(self._known))
        self._lacks = False

    def rest(self, between: bool = False) -> None:
        """Free the regions of the arena in which nothing is leased. Call this when no lease is about to follow.

        Args:
            between: whether this is between a forward and its backward. The next arena has a separate region for the
                requests that are leased now.
        """
        if self.arena.keeps_idle:
            return
        if self._counted_out:
            self.reclaim()
        self._lacks |= between and self.arena.note_resting(self._live)
        self.arena.rest()

    def span_of(self, request: Request) -> tuple[int, int] | None:
        """Offset and size in bytes of a request's slot in the arena; None if it has no slot."""
        slot = request.slot
        return None if slot is None else (slot.region.offset + slot.offset, slot.nbytes)

    def claim(self, outside: Sequence[Outside]) -> None:
        """Register weights in memory outside of the slots. Its bytes count as live, but not as held."""
        self.addresses.claim(outside)
        self.live_bytes += sum(each.nbytes for each in outside)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def unclaim(self, outside: Sequence[Outside]) -> None:
        """Unregister weights outside of the slots."""
        self.addresses.unclaim(outside)
        self.live_bytes -= sum(each.nbytes for each in outside)

    def empty(self) -> None:
        """Free the memory of all free slots, and of the arena unless some of it is leased."""
        self.reclaim()
        freed = [slot for slots in self._free.values() for slot in slots]
        self._free.clear()
        self._forget_own()
        if self.arena.is_free():
            self._lacks |= self.arena.is_planned
            freed += self.arena.slots
            for request in self._known:
                request.give_slot(None)
        self.memory.give_back([event for slot in freed for event in slot.free_after])
        if self.arena.is_free():
            self.arena.clear()
        remaining = set(self.addresses).difference(freed)
        self.addresses.replace(remaining)
        self._beside_bytes = sum([slot.nbytes for slot in remaining.difference(self.arena.slots)])

    def _forget_own(self) -> None:
        """Forget the slots of individual names, except slots of `refills` requests, which existing views refer to."""
        self._own = {key: slot for key, slot in self._own.items() if key[2]}

    def forget(self) -> None:
        """Free all memory that is not leased, and forget which requests have met, because sizes are about to change."""
        self.empty()
        for request in self._known.keys() - self._live:
            request.forget()
        self._known = {request: None for request in self._known if request in self._live}
        self.arena.forget()
        for request in self._live:
            request.forget_met(self._live)
        self._lacks = True

    def _make(self, nbytes: int, resizes: bool = False) -> Slot:
        memory = self._allocate(nbytes)
        with plainly():
            slot = Slot(memory, self.memory.queued(), resizes)
        self.addresses.add(slot)
        return slot

    def _allocate(self, nbytes: int) -> torch.Tensor:
        memory = self.memory.allocate(nbytes)
        self._beside_bytes += nbytes
        self._allocations += 1
        return memory

    def __repr__(self) -> str:
        slots = f"{len(self._live)} slots leased, {self.live_bytes} of {self.held_bytes} bytes"
        if not self.arena_bytes:
            return f"BufferPool({slots})"
        share = self.arena_bytes / self.peak_bytes
        return f"BufferPool({slots}, arena {self.arena_bytes} bytes, {share:.2f} of the bound)"


def _ended(end: Callable[[], object]) -> bool:
    """End abandoned work. Returns False: its memory is no longer used."""
    with suppress(Exception):
        end()
    return False


def _is_taken(slot: Slot) -> bool:
    """Whether an overlapping slot is leased. If none is, the slot's next writer also waits for their events."""
    if slot.awaited and not slot.free_after:
        slot.awaited.clear()  # released without an event, so it is unknown whether a writer has waited for them
    for rival in slot.rivals:
        if rival.request is not None:
            return True
        if rival.free_after:
            slot.wait_for(rival)
    return False
