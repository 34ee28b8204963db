"""The memory of unsharded parameters and communication: slots that are leased, released and used again.

At first a slot that is released goes to a free list of its size, and the next lease of that size takes it, whatever
the dtype or the purpose. Meanwhile the pool learns which leases are live together, by their names. From that an *arena*
is made between two steps: one piece of memory in which each name has its place, so that weights of one layer, the
gather of the next and the gradients of a third share memory in turn, also where their sizes differ, and a name is at
one address in forward and backward. What was learned holds for all kinds of steps at once (with and without gradients,
recomputed, accumulated): names share memory if none of them had both live. A lease for which the arena has no free
place falls back to the free lists; it is counted, and the next arena knows of it.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right, insort
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ._debug import debugging, poison
from ._errors import ShardConfigValueError
from ._layout import SLOT_ALIGNMENT_BYTES, slot_bytes
from ._packing import pack
from ._streams import Lane

Events = tuple[torch.Event, ...]
Key = tuple[str, int]  # a lease's name and bytes
PlaceKey = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]


class Place:
    """Where a tensor lies within a slot. A pool has one object for each (`BufferPool.place`), told by its identity.

    Attributes:
        dtype: of the tensor.
        offset: elements of `dtype` from the start of the slot.
        shape, stride: of the tensor.
    """

    __slots__ = ("dtype", "offset", "shape", "stride")

    def __init__(self, dtype: torch.dtype, offset: int, shape: torch.Size, stride: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.offset = offset
        self.shape = shape
        self.stride = stride


class Slot:
    """A piece of memory with a fixed address.

    Attributes:
        key: of the lease that has it now; None while it is free.
        owner: who reads weights from it now, weakly; None while it is free or only carries communication.
        free_after: the events behind the last uses; whoever writes next waits for them.
        rivals: other slots of an arena that lie, in part, in the same memory.
        reach: the end of the one of them, or of this slot, that ends last.
    """

    __slots__ = (
        "_bytes",
        "_typed",
        "_views",
        "begin",
        "end",
        "free_after",
        "key",
        "nbytes",
        "owner",
        "reach",
        "rivals",
    )

    def __init__(self, memory: torch.Tensor, free_after: Events) -> None:
        self._bytes = (memory.data, memory.data)
        self._typed: dict[tuple[torch.dtype, bool], torch.Tensor] = {}
        self._views: dict[Place, torch.Tensor] = {}
        self.nbytes = memory.numel()
        self.begin = memory.data_ptr()
        self.end = self.reach = self.begin + self.nbytes
        self.key: Key | None = None
        self.owner: weakref.ref[Any] | None = None
        self.free_after = free_after
        self.rivals: tuple[Slot, ...] = ()

    def __lt__(self, other: Slot) -> bool:
        return self.begin < other.begin

    def typed(self, dtype: torch.dtype, written: bool = False) -> torch.Tensor:
        """The whole slot as a 1D tensor of `dtype`.

        All that is written goes through tensors that were made with ``written=True``: they are aliases with a version
        counter of their own. So a write leaves no trace in what autograd has saved of the weights: that has been given
        up, or is read through a handle, or has moved with its group to another slot.
        """
        view = self._typed.get((dtype, written))
        if view is None:
            with torch.inference_mode(False), torch.no_grad():
                view = self._typed[dtype, written] = self._bytes[written].view(dtype)
        return view

    def view(self, place: Place) -> torch.Tensor:
        """A view of the slot; made once."""
        found = self._views.get(place)
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                flat = self.typed(place.dtype)
                begin = flat.storage_offset() + place.offset
                found = self._views[place] = flat.as_strided(place.shape, place.stride, begin)
        return found


class Outside:
    """Memory of weights that belongs to a parameter and not to the pool; its address holds until it is emptied.

    Attributes:
        begin, end, nbytes: where it lies.
        owner: who reads weights from it, weakly.
    """

    __slots__ = ("begin", "end", "nbytes", "owner")

    def __init__(self, memory: torch.UntypedStorage, owner: Any) -> None:
        self.begin = memory.data_ptr()
        self.nbytes = memory.nbytes()
        self.end = self.begin + self.nbytes
        self.owner: weakref.ref[Any] | None = weakref.ref(owner)


class BufferPool:
    """The slots of one engine.

    Attributes:
        live_bytes: bytes leased now.
        peak_bytes: the most bytes leased at once so far.
        held_bytes: bytes of the arena and of all other slots, leased or free.
        arena_bytes: bytes of the arena; 0 while there is none.
        allocations: how often memory was asked for; steady once the order of a step has settled.
        fallbacks: by name, leases for which there was an arena but no free place in it.
    """

    def __init__(self, device: torch.device, lane: Lane) -> None:
        self.device = device
        self.live_bytes = self.peak_bytes = self.held_bytes = self.allocations = self.arena_bytes = 0
        self.fallbacks: dict[str, int] = {}
        self._lane = lane
        self._mem_pool: torch.cuda.MemPool | None = None
        self._live: dict[Key, Slot] = {}
        self._planned: dict[Key, Slot] = {}
        self._lacks = True
        self._met: dict[Key, set[Key]] = {}  # which leases were live at the same time, by their keys
        self._free: dict[int, list[Slot]] = {}
        self._slots: list[Slot] = []
        self._begins: list[int] = []
        self._outside: list[Outside] = []
        self._places: dict[PlaceKey, Place] = {}

    def use_mem_pool(self, wanted: bool) -> None:
        """Whether what is allocated from now on comes from a `torch.cuda.MemPool`.

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

    def place(self, key: PlaceKey) -> Place:
        """The place with this dtype, offset, shape and stride: the same object each time."""
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = Place(*key)
        return found

    def lease(self, nbytes: int, name: str = "", owner: Any = None) -> Slot:
        """A slot of at least `nbytes` bytes, with undefined content, until it is released.

        Args:
            nbytes: bytes needed; a multiple of 512 is leased.
            name: what for; leases of one name and size have one place in the arena.
            owner: who reads weights from it, if anybody does.
        """
        if nbytes % SLOT_ALIGNMENT_BYTES or not nbytes:
            nbytes = slot_bytes(nbytes)
        key = (name, nbytes)
        while key in self._live:  # another one of the same name
            key = (key[0] + "'", nbytes)
        slot = self._planned.get(key)
        if slot is None or slot.key is not None or (slot.rivals and _is_taken(slot)):
            slot = self._unplanned(key)
        met = self._met.get(key)
        if met is None or not self._live.keys() <= met:
            self._note_met(key)
        slot.key = key
        self._live[key] = slot
        slot.owner = None if owner is None else weakref.ref(owner)
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        return slot

    def _unplanned(self, key: Key) -> Slot:
        """A slot of the free lists, or a new one."""
        if self._planned:
            self.fallbacks[key[0]] = self.fallbacks.get(key[0], 0) + 1
            self._lacks = True
        free = self._free.get(key[1])
        return free.pop() if free else self._make(key[1])

    def _note_met(self, key: Key) -> None:
        met = self._met.setdefault(key, set())
        met.update(self._live)
        for other in self._live:
            self._met[other].add(key)

    def release(self, slot: Slot, after: torch.Event | None = None) -> None:
        """Give a slot back; the next lease may write to it once the event `after` has happened."""
        assert slot.key is not None
        del self._live[slot.key]
        if debugging():
            after = self._poisoned(slot, after)
        slot.free_after = () if after is None else (after,)
        self.live_bytes -= slot.nbytes
        if self._planned.get(slot.key) is not slot:
            self._free.setdefault(slot.nbytes, []).append(slot)
        slot.key = slot.owner = None

    def give_up(self, slots: Sequence[Slot]) -> None:
        """Release those of these slots that are leased still: what was to be done with them has failed."""
        for slot in slots:
            if slot.key is not None:
                self.release(slot, self._lane.mark())

    def _poisoned(self, slot: Slot, after: torch.Event | None) -> torch.Event | None:
        if after is not None:
            after.wait()
        poison(slot.typed(torch.uint8, written=True))
        return self._lane.mark()

    @property
    def wants_arena(self) -> bool:
        """Whether it has learned what the arena does not know, and nothing is leased, so that one can be made."""
        return self._lacks and bool(self._met) and not self.live_bytes

    def make_arena(self) -> None:
        """Put one arena in the place of all slots. Nobody may hold any of them."""
        self.empty()
        sizes = {key: key[1] for key in self._met}
        offsets, nbytes = pack(sizes, self._met)
        fresh = self._fresh()
        with torch.inference_mode(False), torch.no_grad():
            memory = self._allocate(nbytes)
            places = {(at, key[1]) for key, at in offsets.items()}
            made = {(at, nbytes): Slot(memory[at : at + nbytes], fresh) for at, nbytes in places}
        self._slots = sorted(made.values())
        self._begins = [slot.begin for slot in self._slots]
        _find_rivals(self._slots)
        self._planned = {key: made[at, key[1]] for key, at in offsets.items()}
        self.arena_bytes = nbytes
        self._lacks = False

    def find(self, address: int) -> Slot | Outside | None:
        """What holds the weights that lie at `address`, or None if no weights lie there."""
        at = bisect_right(self._begins, address)
        if at:
            slot = self._slots[at - 1]
            if address < slot.reach:
                if address < slot.end and slot.owner is not None:
                    return slot
                for rival in slot.rivals:  # whatever else holds the address reaches over the slot that begins last
                    if rival.begin <= address < rival.end and rival.owner is not None:
                        return rival
        return self._find_outside(address) if self._outside else None

    def _find_outside(self, address: int) -> Outside | None:
        for outside in self._outside:
            if outside.begin <= address < outside.end:
                return outside
        return None

    def claim(self, outside: Sequence[Outside]) -> None:
        """Let `find` know of weights outside of the slots; their bytes are live, though the pool does not hold them."""
        self._outside += outside
        self.live_bytes += sum(each.nbytes for each in outside)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def unclaim(self, outside: Sequence[Outside]) -> None:
        """Forget them."""
        gone = {id(each) for each in outside}
        self._outside = [each for each in self._outside if id(each) not in gone]
        self.live_bytes -= sum(each.nbytes for each in outside)

    def empty(self) -> None:
        """Give the memory of all free slots back to the allocator, and the arena unless some of it is leased."""
        arena = {id(slot) for slot in self._planned.values()}
        if any(id(slot) in arena for slot in self._live.values()):
            arena.clear()
        elif self._planned:
            self._planned.clear()
            self.arena_bytes = 0
            self._lacks = True
        freed = arena | {id(slot) for slots in self._free.values() for slot in slots}
        self._free.clear()
        for slot in self._slots:  # work in flight may still use what the allocator would hand out
            for event in slot.free_after if id(slot) in freed else ():
                event.wait()
        self._slots = [slot for slot in self._slots if id(slot) not in freed]
        self._begins = [slot.begin for slot in self._slots]
        arena = {id(slot) for slot in self._planned.values()}
        self.held_bytes = self.arena_bytes + sum(slot.nbytes for slot in self._slots if id(slot) not in arena)

    def forget(self) -> None:
        """Give all memory back that nobody uses, and forget which leases have met: sizes are about to change."""
        self.empty()
        self._met = {key: set(self._live) - {key} for key in self._live}
        self._lacks = True

    def _make(self, nbytes: int) -> Slot:
        # Made in inference mode, it could never be used for training.
        with torch.inference_mode(False), torch.no_grad():
            slot = Slot(self._allocate(nbytes), self._fresh())
        insort(self._slots, slot)
        self._begins = [each.begin for each in self._slots]
        return slot

    def _allocate(self, nbytes: int) -> torch.Tensor:
        with nullcontext() if self._mem_pool is None else torch.cuda.use_mem_pool(self._mem_pool, self.device):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.held_bytes += nbytes
        self.allocations += 1
        return memory

    def _fresh(self) -> Events:
        """What the allocator hands out may still be read by work that the current stream was given before."""
        event = self._lane.mark()
        return () if event is None else (event,)

    def __repr__(self) -> str:
        slots = f"{len(self._live)} slots leased, {self.live_bytes} of {self.held_bytes} bytes"
        if not self.arena_bytes:
            return f"BufferPool({slots})"
        beside = self.arena_bytes / self.peak_bytes
        return f"BufferPool({slots}, arena {self.arena_bytes} bytes, {beside:.2f} of the bound)"


def _is_taken(slot: Slot) -> bool:
    """Whether memory of a slot is leased to a rival; if not, note what its next writer waits for."""
    for rival in slot.rivals:
        if rival.key is not None:
            return True
        if rival.free_after:
            slot.free_after = tuple(dict.fromkeys([*slot.free_after, *rival.free_after]))
    return False


def _find_rivals(slots: Sequence[Slot]) -> None:
    """Tell each slot which others overlap it, of slots sorted by their begin."""
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
