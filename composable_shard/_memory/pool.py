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
from bisect import bisect_right, insort
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from .. import _debug
from .._comm.lanes import Lane
from .._errors import ShardConfigValueError
from .._plan.arena import pack
from .._plan.layout import slot_bytes
from .._torch.core import plainly, to_keep
from .slots import Events, Outside, Places, Request, Slot


class BufferPool:
    """The slots of one engine.

    Attributes:
        live_bytes: bytes leased now, and bytes of weights outside of the pool that it was told of (`claim`).
        peak_bytes: the highest `live_bytes` so far.
        held_bytes: bytes of the arena and of all other slots, leased or free.
        arena_bytes: bytes of the arena; 0 while there is none.
        allocations: how often memory was allocated; steady once the order of a step has settled.
        first, end: addresses of the first byte of all memory known here, and of the first behind it: no weights lie
            before or beyond.
        lent_bytes: those of `live_bytes` that stay leased only because users of this rank keep views of them.
        backward: whether a backward runs: it has requests of its own, which may have other slots than forward's.
        places: the one object for each `Place`.
        counted: whether a tool counts memory, and must see what is leased.
        owns: whether each name has a slot of its own, allocated when it is leased and freed when it is released: so
            tools that count memory find who uses how much. To be changed only right after `forget`.
        fallbacks: by name, the number of leases for which the arena had no free slot.
    """

    def __init__(self, device: torch.device, lane: Lane) -> None:
        self.device = device
        self.live_bytes = self.peak_bytes = self.held_bytes = self.allocations = self.arena_bytes = 0
        self.fallbacks: dict[str, int] = {}
        self.backward = False
        self.lent_bytes = 0
        self._lane = lane
        self._mem_pool: torch.cuda.MemPool | None = None
        self._requests: weakref.WeakValueDictionary[tuple[str, int, bool], Request] = weakref.WeakValueDictionary()
        self._known: dict[Request, None] = {}  # all that were leased, in the order of their first leases
        self._live: set[Request] = set()
        self._arena: list[Slot] = []
        self._lacks = True
        self._free: dict[int, list[Slot]] = {}
        self._slots: list[Slot] = []
        self._begins: list[int] = []
        self._outside: list[Outside] = []
        self.places = Places()
        self.counted = self.owns = False
        self._own: dict[tuple[str, int], Slot] = {}
        self.first = self.end = 0

    @property
    def issued_bytes(self) -> int:
        """`live_bytes` without `lent_bytes`: the same on all ranks, so decisions about collectives may depend on it."""
        return self.live_bytes - self.lent_bytes

    def use_mem_pool(self, wanted: bool) -> None:
        """Set whether memory allocated from now on comes from a `torch.cuda.MemPool`.

        Raises:
            ShardConfigValueError: the device has none.
        """
        if wanted and self.device.type != "cuda":
            raise ShardConfigValueError(
                f"PoolPolicy(mem_pool=True): there is a MemPool on CUDA only, and this model is on {self.device.type}; "
                "leave it out"
            )
        if wanted != (self._mem_pool is not None):
            self._mem_pool = torch.cuda.MemPool() if wanted else None
            self._lacks = True

    def count(self, wanted: bool) -> None:
        """Set `counted`."""
        self.counted = wanted

    def own(self, wanted: bool) -> None:
        """Set `owns`; only right after `forget`."""
        self.owns = wanted

    def enter_backward(self, runs: bool) -> None:
        """A backward begins, or is over."""
        self.backward = runs

    def request(self, name: str, nbytes: int, backward: bool = False) -> Request:
        """The request for `nbytes` bytes under a name, all of whose leases get one slot of the arena."""
        key = name, slot_bytes(nbytes), backward
        found = self._requests.get(key)
        if found is None:
            found = self._requests[key] = Request(*key)
        return found

    def requests(self, name: str, nbytes: int) -> tuple[Request, Request]:
        """The requests to lease in forward and in backward, to be indexed by `self.backward`."""
        return self.request(name, nbytes), self.request(name, nbytes, backward=True)

    def lease(self, nbytes: int, name: str = "", owner: Any = None) -> Slot:
        """`lease_for` a request that is looked up, or made, by its name and size."""
        return self.lease_for(self.request(name, nbytes), None if owner is None else weakref.ref(owner))

    def lease_for(self, request: Request, owner: weakref.ref[Any] | None = None) -> Slot:
        """A slot of as many bytes as requested, with undefined content, until it is released.

        Args:
            request: for which it is leased; if that is leased already, a request of its name with a ``'`` behind it.
            owner: a weak reference to the bucket whose weights will lie in the slot; None for other purposes.
        """
        live = self._live
        while request in live:
            request = self.request(request.name + "'", request.nbytes, request.backward)
        slot = request.slot
        if slot is None or slot.request is not None or (slot.rivals and _is_taken(slot)):
            slot = self._own_slot(request) if self.owns else self._unplanned(request)
        if request.met is None or not live <= request.met:
            self._note_met(request)
        if self.counted:
            slot.show()
        live.add(request)
        slot.request = request
        slot.owner = owner
        self.live_bytes += request.nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        return slot

    def _unplanned(self, request: Request) -> Slot:
        """A slot from the free lists, or a new one."""
        if self._arena:
            self.fallbacks[request.name] = self.fallbacks.get(request.name, 0) + 1
            self._lacks = True
        free = self._free.get(request.nbytes)
        return free.pop() if free else self._make(request.nbytes)

    def _own_slot(self, request: Request) -> Slot:
        """The slot of the request's name, the same in forward and backward, or a new one."""
        slot = self._own.get((request.name, request.nbytes))
        if slot is None or slot.request is not None:
            slot = self._own[request.name, request.nbytes] = self._make(request.nbytes)
            return slot
        slot.resize(request.nbytes)
        slot.free_after = self._fresh()
        self.held_bytes += slot.nbytes
        insort(self._slots, slot)
        self._slots_changed()
        return slot

    def _note_met(self, request: Request) -> None:
        self._known[request] = None
        request.met = self._live.union(request.met or ())
        for other in self._live:
            assert other.met is not None
            other.met.add(request)

    def release(self, slot: Slot, after: torch.Event | None = None) -> None:
        """Give a slot back; the next lease may write to it once the event `after` has happened."""
        request = slot.request
        assert request is not None
        self._live.remove(request)
        if _debug.debugging:
            after = self._poisoned(slot, after)
        slot.free_after = () if after is None else (after,)
        self.live_bytes -= slot.nbytes
        if slot.resizes:
            for event in slot.free_after:
                event.wait()  # work in flight may still use memory that the allocator will hand out again
            self._slots.remove(slot)
            self._slots_changed()
            self.held_bytes -= slot.nbytes
            slot.resize(0)
        elif request.slot is not slot:
            self._free.setdefault(slot.nbytes, []).append(slot)
        slot.request = slot.owner = None

    def suspend(self, slot: Slot, after: torch.Event | None, lent: bool) -> None:
        """Take the weights' owner from a slot that stays leased, as handles must no longer find weights there.

        Args:
            slot: that stays leased.
            after: what its next writer must wait for.
            lent: whether it stays leased only because users keep views of it, and not by choice.
        """
        slot.owner, slot.lent = None, lent
        slot.free_after = () if after is None else (after,)
        self.lent_bytes += slot.nbytes if lent else 0

    def resume(self, slot: Slot, owner: weakref.ref[Any] | None = None) -> None:
        """Give a suspended slot an owner again, as if it were leased anew."""
        self.lent_bytes -= slot.nbytes if slot.lent else 0
        slot.owner, slot.lent = owner, False

    def release_all(self, slots: Sequence[Slot], after: torch.Event | None) -> None:
        """`release` each of these."""
        for slot in slots:
            self.release(slot, after)

    def give_up(self, slots: Sequence[Slot]) -> None:
        """After a failure, release those of these slots that are still leased."""
        for slot in slots:
            if slot.request is not None:
                self.release(slot, self._lane.mark())

    def _poisoned(self, slot: Slot, after: torch.Event | None) -> torch.Event | None:
        if after is not None:
            after.wait()
        _debug.poison(slot.typed(torch.uint8, written=True))
        return self._lane.mark()

    @property
    def wants_arena(self) -> bool:
        """Whether a new arena would know more than the present one, and can be made now, since nothing is leased."""
        return self._lacks and bool(self._known) and not self.live_bytes and not self.owns

    def make_arena(self) -> None:
        """Replace all slots by those of a new arena. Nobody may hold any of them."""
        self.empty()
        known = list(self._known)
        place = {request: at for at, request in enumerate(known)}
        meets = [sorted([place[other] for other in request.met or () if other in place]) for request in known]
        offsets = pack([request.nbytes for request in known], meets, [request.name for request in known])
        nbytes = max(at + request.nbytes for at, request in zip(offsets, known, strict=True))
        fresh = self._fresh()
        memory = self._allocate(nbytes)
        with plainly():
            places = dict.fromkeys((at, request.nbytes) for at, request in zip(offsets, known, strict=True))
            made = {(at, size): Slot(memory[at : at + size], fresh) for at, size in places}
        self._arena = sorted(made.values())
        _find_rivals(self._arena)
        for request, at in zip(known, offsets, strict=True):
            request.slot = made[at, request.nbytes]
        self._slots = list(self._arena)
        self._slots_changed()
        self.arena_bytes = nbytes
        self._lacks = False

    def place_of(self, request: Request) -> tuple[int, int] | None:
        """Offset and size in bytes of a request's slot in the arena; None if it has none."""
        slot = request.slot
        return None if slot is None else (slot.begin - self._arena[0].begin, slot.nbytes)

    def find(self, address: int) -> Slot | Outside | None:
        """The slot, or memory outside of slots, whose weights lie at `address`; None if no weights lie there."""
        at = bisect_right(self._begins, address)
        if at:
            slot = self._slots[at - 1]
            if address < slot.reach:
                if address < slot.end and slot.owner is not None:
                    return slot
                for rival in slot.rivals:  # any other slot with this address overlaps the one that begins last
                    if rival.begin <= address < rival.end and rival.owner is not None:
                        return rival
        return self._find_outside(address) if self._outside else None

    def _find_outside(self, address: int) -> Outside | None:
        for outside in self._outside:
            if outside.begin <= address < outside.end:
                return outside
        return None

    def claim(self, outside: Sequence[Outside]) -> None:
        """Let `find` know of weights outside of the slots; their bytes count as live, but not as held."""
        self._outside += outside
        self._slots_changed()
        self.live_bytes += sum(each.nbytes for each in outside)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def unclaim(self, outside: Sequence[Outside]) -> None:
        """Forget weights outside of the slots."""
        gone = {id(each) for each in outside}
        self._outside = [each for each in self._outside if id(each) not in gone]
        for each in outside:
            each.owner = None
        self._slots_changed()
        self.live_bytes -= sum(each.nbytes for each in outside)

    def empty(self) -> None:
        """Give the memory of all free slots back to the allocator, and the arena unless some of it is leased."""
        freed = [slot for slots in self._free.values() for slot in slots]
        self._free.clear()
        self._own.clear()
        if all(slot.request is None for slot in self._arena):
            freed += self._arena
            self._lacks |= bool(self._arena)
            self._arena, self.arena_bytes = [], 0
            for request in self._known:
                request.slot = None
        for event in [event for slot in freed for event in slot.free_after]:
            event.wait()  # work in flight may still use memory that the allocator will hand out again
        self._slots = sorted(set(self._slots).difference(freed))
        self._slots_changed()
        beside = set(self._slots).difference(self._arena)
        self.held_bytes = self.arena_bytes + sum(slot.nbytes for slot in beside)

    def forget(self) -> None:
        """Free all memory that is not leased, and forget which requests have met: sizes are about to change."""
        self.empty()
        for request in self._known.keys() - self._live:
            request.met = request.slot = None
        self._known = {request: None for request in self._known if request in self._live}
        for request in self._live:
            request.met = self._live - {request}
        self._lacks = True

    def _slots_changed(self) -> None:
        """Update the tables that `find` searches."""
        self._begins = [slot.begin for slot in self._slots]
        places: list[Slot | Outside] = [*self._slots, *self._outside]
        self.first = min([it.begin for it in places], default=0)
        self.end = max([it.end for it in places], default=0)

    def _make(self, nbytes: int) -> Slot:
        memory = self._allocate(nbytes)
        with plainly():
            slot = Slot(memory, self._fresh(), resizes=self.owns)
        insort(self._slots, slot)
        self._slots_changed()
        return slot

    def _allocate(self, nbytes: int) -> torch.Tensor:
        # `to_keep` leaves inference mode: a tensor made in it could never be used for training.
        pool = nullcontext() if self._mem_pool is None else torch.cuda.use_mem_pool(self._mem_pool, self.device)
        with to_keep(), pool:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.held_bytes += nbytes
        self.allocations += 1
        return memory

    def _fresh(self) -> Events:
        """The events that the first writer of new memory waits for.

        The allocator may hand out memory that earlier work, queued on the current stream, still reads.
        """
        event = self._lane.mark()
        return () if event is None else (event,)

    def __repr__(self) -> str:
        slots = f"{len(self._live)} slots leased, {self.live_bytes} of {self.held_bytes} bytes"
        if not self.arena_bytes:
            return f"BufferPool({slots})"
        beside = self.arena_bytes / self.peak_bytes
        return f"BufferPool({slots}, arena {self.arena_bytes} bytes, {beside:.2f} of the bound)"


def _is_taken(slot: Slot) -> bool:
    """Whether an overlapping slot is leased; if none is, the slot's next writer will also wait for their events."""
    for rival in slot.rivals:
        if rival.request is not None:
            return True
        if rival.free_after:
            slot.free_after = tuple(dict.fromkeys([*slot.free_after, *rival.free_after]))
    return False


def _find_rivals(slots: Sequence[Slot]) -> None:
    """Set the `rivals` and `reach` of slots that are sorted by their begin."""
    rivals: dict[Slot, list[Slot]] = {slot: [] for slot in slots}
    for at, slot in enumerate(slots):
        for later in slots[at + 1 :]:
            if later.begin >= slot.end:
                break
            rivals[slot].append(later)
            rivals[later].append(slot)
    for slot, found in rivals.items():
        slot.rivals = tuple(found)
        slot.reach = max([slot.end, *[rival.end for rival in found]])
