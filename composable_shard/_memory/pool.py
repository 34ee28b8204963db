"""The memory of unsharded parameters and communication: slots that are leased, released and used again.

At first a released slot goes to a free list of its size, and the next lease of that size takes it, whatever the dtype
or the purpose. Meanwhile the pool learns which requests are live together. From that it makes an *arena* between two
steps: one allocation in which each request has a fixed slot. Requests that were never live together may overlap, so
weights of one layer, the gather of the next and the gradients of a third share memory in turn, also where their sizes
differ. A name has one address in forward and backward where that costs nothing (`pack`).

What was learned holds for all kinds of steps at once (with and without gradients, recomputed, accumulated): requests
share memory only if they were live together in none of them. A lease whose slot in the arena is taken, or that has
none, falls back to the free lists; it is counted, and the next arena has room for it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from .. import _debug
from .._comm.lanes import Lane
from .._plan.layout import slot_bytes
from .._torch.core import plainly
from .addresses import Addresses
from .device import DeviceMemory
from .regions import Arena
from .slots import Outside, Places, Request, RequestKey, Slot


class BufferPool:
    """The slots of one engine.

    Attributes:
        memory: allocates.
        addresses: which weights lie where.
        live_bytes: bytes leased now, and bytes of weights outside of the pool that it was told of (`claim`).
        peak_bytes: the highest `live_bytes` so far.
        arena: the slots that have a fixed place.
        lent_bytes: those of `live_bytes` that stay leased only because users of this rank keep views of them.
        backward: whether a backward runs: it has requests of its own, which may have other slots than forward's.
        places: the one object for each `Place`.
        counted: whether a tool counts memory, and must see what is leased.
        owns: whether each name has a slot of its own, allocated when it is leased and freed when it is released: so
            tools that count memory find who uses how much. To be changed only right after `forget`.
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
        self._known: dict[Request, None] = {}  # all that were leased, in the order of their first leases
        self._live: set[Request] = set()
        self.arena = Arena(self.memory, self.addresses)
        self._lacks = True
        self._free: dict[int, list[Slot]] = {}
        self._counted_out: deque[tuple[Slot | None, Callable[[], bool]]] = deque()
        self.places = Places()
        self.counted = self.owns = False
        self._own: dict[tuple[str, int, bool], Slot] = {}

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena with all of its regions; 0 while there is none."""
        return self.arena.nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the arena, as far as it has memory now, and of all other slots, leased or free."""
        return self._beside_bytes + self.arena.held_bytes

    @property
    def allocations(self) -> int:
        """How often memory was allocated: steady once the order of a step has settled.

        Regions that get memory again do not count.
        """
        return self._allocations + self.arena.allocations

    @property
    def issued_bytes(self) -> int:
        """`live_bytes` without `lent_bytes`: the same on all ranks, so decisions about collectives may depend on it."""
        return self.live_bytes - self.lent_bytes

    def use_mem_pool(self, wanted: bool) -> None:
        """Set whether memory allocated from now on comes from a `torch.cuda.MemPool`.

        Raises:
            ShardConfigValueError: the device has none.
        """
        self._lacks |= self.memory.use_mem_pool(wanted)

    def keep_idle(self, wanted: bool | None) -> None:
        """Set whether the arena keeps its memory also while nothing in it is leased; None for what suits the device.

        An accelerator's allocator gives memory out again at once. On a CPU it goes back to the system, and comes back
        page by page.
        """
        self._lacks |= self.arena.keep_idle(self.memory.device.type == "cpu" if wanted is None else wanted)

    def count(self, wanted: bool) -> None:
        """Set `counted`."""
        self.counted = wanted

    def own(self, wanted: bool) -> None:
        """Set `owns`; only right after `forget`."""
        self.owns = wanted

    def request(self, name: str, nbytes: int, backward: bool = False, refills: bool = False) -> Request:
        """The request for `nbytes` bytes under a name, all of whose leases get one slot: in the arena, or its own."""
        key = name, slot_bytes(nbytes), backward, refills
        request = self._requests.get(key)
        if request is None:
            request = self._requests[key] = Request(*key)
        return request

    def requests(self, name: str, nbytes: int, refills: bool = False) -> tuple[Request, Request]:
        """The requests to lease in forward and in backward, to be indexed by `self.backward`."""
        return self.request(name, nbytes, False, refills), self.request(name, nbytes, True, refills)

    def lease(self, nbytes: int, name: str = "", owner: Any = None) -> Slot:
        """`lease_for` a request that is looked up, or made, by its name and size."""
        return self.lease_for(self.request(name, nbytes), None if owner is None else weakref.ref(owner))

    def lease_for(self, request: Request, owner: weakref.ref[Any] | None = None) -> Slot:
        """A slot of as many bytes as requested, with undefined content, until it is released.

        Args:
            request: for which it is leased; if that is leased already, a request of its name with a ``'`` behind it.
            owner: a weak reference to the bucket whose weights will lie in the slot; None for other purposes.
        """
        if self._counted_out:
            self.reclaim()
        live = self._live
        while request in live:
            request = self.request(request.name + "'", request.nbytes, request.backward, request.refills)
        slot = request.slot
        if slot is None or slot.request is not None or (slot.rivals and _is_taken(slot)):
            slot = self._own_slot(request) if self.owns or request.refills else self._unplanned(request)
        elif self.arena.dry and slot.region.is_dry:
            self.arena.fill(slot.region)
        if request.met is None or not live <= request.met:
            self._note_met(request)
        if self.counted:
            slot.show()
        live.add(request)
        slot.request, slot.owner = request, owner
        self.live_bytes += request.nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        return slot

    def _unplanned(self, request: Request) -> Slot:
        """A slot from the free lists, or a new one."""
        if self.arena.is_planned:
            self.fallbacks[request.name] = self.fallbacks.get(request.name, 0) + 1
            self._lacks = True
        if request.slot is None and not self.arena.keeps_idle:
            return self.arena.add(request)
        free = self._free.get(request.nbytes)
        return free.pop() if free else self._make(request.nbytes)

    def _own_slot(self, request: Request) -> Slot:
        """The slot of the request's name, the same in forward and backward, or a new one."""
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
        """Give a slot back; the next lease may write to it once the event `after` has happened.

        Args:
            slot: leased until now.
            after: behind the last work on it.
            queued: whether that work is only queued, and not waited for. Whoever frees memory waits for the last work
                on it, so memory that would go back to the allocator stays until `give_back`, or the next lease.
        """
        request = slot.request
        assert request is not None
        self._live.remove(request)
        if _debug.debugging:
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
        """Work is waited for whose slots were released when it was queued: memory that is not leased anew goes back."""
        self.arena.note_busy(-len(slots))
        self._return(slots)

    def _return(self, slots: Iterable[Slot]) -> None:
        """Memory of these slots goes back to the allocator if it does not stay between leases, and is free."""
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
        """Take the weights' owner from a slot that stays leased, as handles must no longer find weights there.

        Args:
            slot: that stays leased.
            after: what its next writer must wait for.
            lent: whether it stays leased only because users keep views of it, and not by choice.
        """
        slot.suspend(after, lent)
        self.lent_bytes += slot.nbytes if lent else 0

    def resume(self, slot: Slot, owner: weakref.ref[Any] | None = None) -> None:
        """Give a suspended slot an owner again, as if it were leased anew."""
        self.lent_bytes -= slot.nbytes if slot.lent else 0
        slot.resume(owner)

    def release_unused(self, slot: Slot, is_used: Callable[[], bool]) -> None:
        """Release a slot as soon as nobody uses it any more; nobody tells, so each lease looks (`reclaim`).

        Args:
            slot: that stays leased until then. How long that is may differ between ranks, so it counts as lent.
            is_used: whether anybody refers to its memory.
        """
        self.suspend(slot, None, lent=True)
        self._counted_out.append((slot, is_used))

    def abandon(self, end: Callable[[], object]) -> None:
        """Nobody will take the result of some work: it is ended before memory is leased next (`reclaim`).

        To be called at any time, also by the garbage collector in the middle of another method.

        Args:
            end: waits for the work and gives its memory back; its errors have no place to go.
        """
        self._counted_out.append((None, partial(_ended, end)))

    def reclaim(self) -> None:
        """Release the slots of `release_unused` that nobody uses any more, and end abandoned work."""
        counted = self._counted_out
        for _ in range(len(counted)):
            slot, is_used = each = counted.popleft()
            if is_used():
                counted.append(each)
            elif slot is not None:
                self.resume(slot)
                self.release(slot, *self.memory.queued())

    def release_all(self, slots: Sequence[Slot], after: torch.Event | None) -> None:
        """`release` each of these."""
        for slot in slots:
            self.release(slot, after)

    def give_up(self, slots: Sequence[Slot]) -> None:
        """After a failure, release those of these slots that are still leased, behind all that was to be waited for."""
        for slot in slots:
            if slot.request is not None:
                slot.wait_until_free()
                self.release(slot, *self.memory.queued())

    def _poisoned(self, slot: Slot, after: torch.Event | None) -> torch.Event | None:
        if after is not None:
            after.wait()
        _debug.poison(slot.typed(torch.uint8, written=True))
        return next(iter(self.memory.queued()), None)

    @property
    def wants_arena(self) -> bool:
        """Whether a new arena would know more than the present one, and can be made now, since nothing is in use."""
        if self._lacks and self._counted_out:
            self.reclaim()
        in_use = self.live_bytes or self.arena.busy
        return self._lacks and bool(self._known) and not in_use and not self.owns

    def make_arena(self) -> None:
        """Replace all slots by those of a new arena. Nobody may hold any of them."""
        self.empty()
        self.memory.leave_segments()
        self.arena.make(list(self._known))
        self._lacks = False

    def rest(self, between: bool = False) -> None:
        """Nothing is about to be leased: memory of the arena in which nothing is leased goes back to the allocator.

        Args:
            between: whether a forward has ended and its backward comes: what is leased now belongs in a region of its
                own, which the next arena has.
        """
        if self.arena.keeps_idle or self.owns:
            return
        if self._counted_out:
            self.reclaim()
        self._lacks |= between and self.arena.note_resting(self._live)
        self.arena.rest()

    def span_of(self, request: Request) -> tuple[int, int] | None:
        """Offset and size in bytes of a request's slot in the arena; None if it has none."""
        slot = request.slot
        return None if slot is None else (slot.region.offset + slot.offset, slot.nbytes)

    def claim(self, outside: Sequence[Outside]) -> None:
        """Weights lie in memory outside of the slots: its bytes count as live, but not as held."""
        self.addresses.claim(outside)
        self.live_bytes += sum(each.nbytes for each in outside)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def unclaim(self, outside: Sequence[Outside]) -> None:
        """Forget weights outside of the slots."""
        self.addresses.unclaim(outside)
        self.live_bytes -= sum(each.nbytes for each in outside)

    def empty(self) -> None:
        """Give the memory of all free slots back to the allocator, and the arena unless some of it is leased."""
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
        """Forget the slots of requests' own, except those that are filled again while views of them stay."""
        self._own = {key: slot for key, slot in self._own.items() if key[2] and not self.owns}

    def forget(self) -> None:
        """Free all memory that is not leased, and forget which requests have met: sizes are about to change."""
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
        beside = self.arena_bytes / self.peak_bytes
        return f"BufferPool({slots}, arena {self.arena_bytes} bytes, {beside:.2f} of the bound)"


def _ended(end: Callable[[], object]) -> bool:
    """End abandoned work; returns that its memory is not used any more."""
    with suppress(Exception):
        end()
    return False


def _is_taken(slot: Slot) -> bool:
    """Whether an overlapping slot is leased; if none is, the slot's next writer will also wait for their events."""
    if slot.awaited and not slot.free_after:
        slot.awaited.clear()  # it was given up without an event: nothing tells that a writer has waited for them
    for rival in slot.rivals:
        if rival.request is not None:
            return True
        if rival.free_after:
            slot.wait_for(rival)
    return False
