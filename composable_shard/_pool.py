"""The memory of unsharded parameters and communication: slots that are leased, released and used again.

A slot that is released goes to a free list of its size and the next lease of that size takes it, whatever the dtype or
the purpose: weights of one layer, the gather of the next and the gradients of a third share memory in turn.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ._debug import debugging, poison
from ._streams import Lane

SLOT_ALIGNMENT_BYTES = 512


class Place(NamedTuple):
    """Where a tensor lies within a slot."""

    dtype: torch.dtype
    offset: int  # elements of `dtype` from the start of the slot
    shape: torch.Size
    stride: tuple[int, ...]


class Slot:
    """A piece of memory with a fixed address.

    Attributes:
        owner: who reads weights from it now, weakly; None while it is free or only carries communication.
        free_after: the event behind the last use; whoever writes next waits for it.
    """

    __slots__ = ("_bytes", "_typed", "_views", "begin", "end", "free_after", "nbytes", "owner")

    def __init__(self, nbytes: int, device: torch.device, free_after: torch.Event | None) -> None:
        # A tensor made in inference mode could never be used for training.
        with torch.inference_mode(False), torch.no_grad():
            read = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._bytes = (read, read.data)
        self._typed: dict[tuple[torch.dtype, bool], torch.Tensor] = {}
        self._views: dict[Place, torch.Tensor] = {}
        self.nbytes = nbytes
        self.begin = read.data_ptr()
        self.end = self.begin + nbytes
        self.owner: weakref.ref[Any] | None = None
        self.free_after = free_after

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
            dtype, offset, shape, stride = place
            with torch.inference_mode(False), torch.no_grad():
                found = self._views[place] = self.typed(dtype).as_strided(shape, stride, offset)
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
        held_bytes: bytes of all slots, leased or free.
        allocations: how many slots were ever made; steady once the order of a step has settled.
    """

    def __init__(self, device: torch.device, lane: Lane) -> None:
        self.device = device
        self.live_bytes = self.peak_bytes = self.held_bytes = self.allocations = 0
        self._lane = lane
        self._free: dict[int, list[Slot]] = {}
        self._slots: list[Slot] = []
        self._begins: list[int] = []
        self._outside: list[Outside] = []

    def lease(self, nbytes: int, owner: Any = None, prefer: Slot | None = None) -> Slot:
        """A slot of at least `nbytes` bytes, with undefined content, until it is released.

        Args:
            nbytes: bytes needed; a multiple of 512 is leased.
            owner: who reads weights from it, if anybody does.
            prefer: take this one if it is free.
        """
        if nbytes % SLOT_ALIGNMENT_BYTES or not nbytes:
            nbytes = (nbytes // SLOT_ALIGNMENT_BYTES + 1) * SLOT_ALIGNMENT_BYTES
        free = self._free.get(nbytes)
        if not free:
            slot = self._make(nbytes)
        elif prefer is not None and prefer in free:
            slot = prefer
            free.remove(slot)
        else:
            slot = free.pop()
        slot.owner = None if owner is None else weakref.ref(owner)
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
        return slot

    def release(self, slot: Slot, after: torch.Event | None = None) -> None:
        """Give a slot back; the next lease may write to it once the event `after` has happened."""
        slot.owner = None
        slot.free_after = self._poisoned(slot, after) if debugging() else after
        self.live_bytes -= slot.nbytes
        self._free.setdefault(slot.nbytes, []).append(slot)

    def _poisoned(self, slot: Slot, after: torch.Event | None) -> torch.Event | None:
        if after is not None:
            after.wait()
        poison(slot.typed(torch.uint8, written=True))
        return self._lane.mark()

    def find(self, address: int) -> Slot | Outside | None:
        """What holds the weights that lie at `address`, or None if no weights lie there."""
        at = bisect_right(self._begins, address)
        if at:
            slot = self._slots[at - 1]
            if address < slot.end and slot.owner is not None:
                return slot
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
        """Give the memory of all free slots back to the allocator."""
        for slots in self._free.values():
            for slot in slots:  # work in flight may still use what the allocator would hand out
                if slot.free_after is not None:
                    slot.free_after.wait()
        freed = {id(slot) for slots in self._free.values() for slot in slots}
        self._free.clear()
        self._slots = [slot for slot in self._slots if id(slot) not in freed]
        self._begins = [slot.begin for slot in self._slots]
        self.held_bytes = sum(slot.nbytes for slot in self._slots)

    def _make(self, nbytes: int) -> Slot:
        # What the allocator hands out may still be read by work that the current stream was given before.
        slot = Slot(nbytes, self.device, self._lane.mark())
        insort(self._slots, slot)
        self._begins = [each.begin for each in self._slots]
        self.held_bytes += nbytes
        self.allocations += 1
        return slot

    def __repr__(self) -> str:
        leased = len(self._slots) - sum(map(len, self._free.values()))
        return f"BufferPool({leased} of {len(self._slots)} slots leased, {self.live_bytes} of {self.held_bytes} bytes)"
