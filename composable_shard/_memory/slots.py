"""Slots (pieces of memory that the pool leases), requests for slots, and places of tensors in slots."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .._torch.core import address_of, plainly, to_keep

Events = tuple[torch.Event, ...]
RequestKey = tuple[str, int, bool, bool]  # the arguments of `Request`
PlaceKey = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]


class Place:
    """The location, dtype and strides of a tensor in a slot.

    A pool has one object per distinct place (`BufferPool.places`). Places therefore compare and hash by identity, which
    is cheap.

    Attributes:
        dtype: dtype of the tensor.
        offset: offset in the slot in bytes.
        shape, stride: shape and stride of the tensor.
    """

    __slots__ = ("dtype", "offset", "shape", "stride")

    def __init__(self, dtype: torch.dtype, offset: int, shape: torch.Size, stride: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.offset = offset
        self.shape = shape
        self.stride = stride


class Places(dict[PlaceKey, Place]):
    """The place of each key. Places are created at the first lookup."""

    def __missing__(self, key: PlaceKey) -> Place:
        place = self[key] = Place(*key)
        return place


class _SlotViews(dict[Place, torch.Tensor]):
    """The view of a slot at each place. Views are created at the first lookup."""

    def __init__(self, slot: Slot) -> None:
        self._slot = weakref.ref(slot)

    def __missing__(self, place: Place) -> torch.Tensor:
        slot = self._slot()
        assert slot is not None
        with plainly():
            flat = slot.typed(place.dtype)
            begin = flat.storage_offset() + place.offset // place.dtype.itemsize
            view = self[place] = flat.as_strided(place.shape, place.stride, begin)
        return view


class Request:
    """A purpose for which memory is leased in every step, in forward or in backward.

    A pool has one object per purpose (`BufferPool.request`).

    Attributes:
        name: the purpose, including a parameter's name.
        nbytes: size of the slot in bytes, a multiple of 512.
        backward: whether this is the request of backward. Forward has its own request for the same purpose.
        refills: whether existing views of the slot must show the data of the next gather, as the views that layers with
            quantized weights keep (`_group/packed.py`). Such a request has a slot of its own. The slot has memory only
            while it is leased.
        slot: the slot in the arena, or None.
        met: all requests that were ever leased at the same time; None before the first lease.
    """

    __slots__ = ("__weakref__", "backward", "met", "name", "nbytes", "refills", "slot")

    def __init__(self, name: str, nbytes: int, backward: bool = False, refills: bool = False) -> None:
        self.name = name
        self.nbytes = nbytes
        self.backward = backward
        self.refills = refills
        self.slot: Slot | None = None
        self.met: set[Request] | None = None

    def meet(self, live: set[Request]) -> None:
        """Record in both directions that this request is leased at the same time as those in `live`."""
        self.met = live.union(self.met or ())
        for other in live:
            assert other.met is not None
            other.met.add(self)

    def give_slot(self, slot: Slot | None) -> None:
        """Set the slot in a new arena; None if there is no arena any more."""
        self.slot = slot

    def forget(self) -> None:
        """Forget the slot and the requests in `met`, because sizes are about to change."""
        self.met = self.slot = None

    def start_over(self, live: set[Request]) -> None:
        """Like `forget` for a leased request, which keeps its slot: it has only met the other leased requests."""
        self.met = live - {self}


_NO_BYTES = torch.empty(0, dtype=torch.uint8)


class Slot:
    """A piece of memory that the pool leases.

    It has the same address as long as it has memory. If its memory is freed, it may get another address.

    Attributes:
        views: views of the memory, by place.
        request: the request for which the slot is leased; None while it is free.
        owner: a weak reference to the bucket whose weights are in the slot, or are being gathered into it; else None.
        for_views: whether a retained slot stays leased only for views that other code keeps (`BufferPool.retain`).
        free_after: the events after the last work on the slot. The next writer waits for them.
        begin, end, nbytes: the half-open address range of the memory, and its size in bytes.
        rivals: other slots of the arena that overlap this slot.
        awaited: by rival, the events of the rival's last release that `add_events_of` has added to `free_after`.
        region: the region of the arena that contains the slot, or None.
        reach: the highest `end` of this slot and its rivals. An address above it is in none of them (`Addresses.find`).
        resizes: whether the slot loses its memory at release, or in `finish_queued` if work is still queued on it.
    """

    __slots__ = (
        "__weakref__",
        "_bytes",
        "_typed",
        "awaited",
        "begin",
        "end",
        "for_views",
        "free_after",
        "nbytes",
        "owner",
        "reach",
        "region",
        "request",
        "resizes",
        "rivals",
        "views",
    )

    def __init__(self, memory: torch.Tensor, free_after: Events, resizes: bool = False, region: Any = None) -> None:
        self._bytes = (memory.data, memory.data)  # to read and to write: each has its own version counter, see `typed`
        self._typed: dict[tuple[torch.dtype, bool], torch.Tensor] = {}
        self.views = _SlotViews(self)
        self.nbytes = memory.numel()
        self.begin = address_of(memory)
        self.end = self.reach = self.begin + self.nbytes
        self.request: Request | None = None
        self.owner: weakref.ref[Any] | None = None
        self.for_views = False
        self.free_after = free_after
        self.rivals: tuple[Slot, ...] = ()
        self.awaited: dict[Slot, Events] = {}
        self.region = region
        self.resizes = resizes

    @property
    def has_memory(self) -> bool:
        """Whether a slot that `resizes` has memory; for a slot of the arena, see `Region.has_memory`."""
        return self.end > self.begin

    @property
    def offset(self) -> int:
        """Offset in its allocation, in bytes."""
        return int(self._bytes[0].storage_offset())

    def take_events(self) -> Events:
        """Prepare to free the memory. Returns the events after the last work on it."""
        after, self.free_after = self.free_after, ()
        return after

    def reallocated(self, free_after: Events) -> None:
        """Update the addresses after the memory has been allocated again."""
        self.free_after = free_after
        self.begin = address_of(self._bytes[0])
        self.end = self.begin + self.nbytes

    def leave(self) -> None:
        """Drop the memory, because the arena no longer exists.

        Slots, regions and rivals refer to each other. Without this, the memory would wait for the garbage collector.
        """
        self.region, self.rivals = None, ()
        self.awaited.clear()
        self.views.clear()
        self._typed.clear()
        self._bytes = (_NO_BYTES, _NO_BYTES)

    def set_rivals(self, rivals: Sequence[Slot]) -> None:
        """Set the slots of the arena that overlap this slot."""
        self.rivals = tuple(rivals)
        self.awaited.clear()
        self.reach = max([self.end, *[rival.end for rival in rivals]])

    def retain(self, after: torch.Event | None, for_views: bool) -> None:
        """Remove the owner. The slot stays leased. The next writer waits for `after`."""
        self.owner, self.for_views = None, for_views
        self.free_after = () if after is None else (after,)

    def take_back(self, owner: weakref.ref[Any] | None, after: Events) -> None:
        """Set the owner of the weights again. The next writer also waits for the events `after`."""
        self.owner, self.for_views = owner, False
        self.free_after = (*self.free_after, *after)

    def forget_events(self) -> None:
        """Drop all events: a capture has begun or ended since they were recorded, and the device was idle then."""
        self.free_after = ()
        self.awaited.clear()

    def wait_until_free(self) -> None:
        """Make the current stream wait until the memory may be written."""
        for event in self.free_after:
            event.wait()

    def add_events_of(self, rival: Slot) -> None:
        """Add the events of an overlapping slot to `free_after`, so that the next writer waits for its last work, too.

        Events that were added before (`awaited`) are left out. A writer of this slot has waited for them since, and the
        event of its release, which is in `free_after`, comes after them.
        """
        events, before = rival.free_after, self.awaited.get(rival, ())
        if events is not before:
            self.awaited[rival] = events
            self.free_after = tuple(dict.fromkeys([*self.free_after, *(each for each in events if each not in before)]))

    def resize(self, nbytes: int, free_after: Events = ()) -> None:
        """Allocate the memory, or free it if `nbytes` is 0. All views of the slot then use the new memory."""
        self.free_after = free_after
        self._bytes[0].untyped_storage().resize_(nbytes)
        self.begin = address_of(self._bytes[0])
        self.end = self.reach = self.begin + nbytes

    def show(self) -> None:
        """Run an operator on the memory, so that dispatch modes of memory trackers see it."""
        with to_keep():
            self._bytes[0].detach()

    def __lt__(self, other: Slot) -> bool:
        return self.begin < other.begin

    def typed(self, dtype: torch.dtype, written: bool = False) -> torch.Tensor:
        """The slot as a 1D tensor of `dtype`.

        Gathers and reductions write only through tensors with ``written=True``, which have their own version counter.
        Views for reading share that of the other tensor. So a gather into the slot does not make autograd take a view
        that it has saved for modified.
        """
        view = self._typed.get((dtype, written))
        if view is None:
            with plainly():
                view = self._typed[dtype, written] = self._bytes[written].view(dtype)
        return view


class Outside:
    """Memory of weights that belongs to a parameter instead of the pool (`fsdp_pre_all_gather`).

    Its address is fixed until it is freed.

    Attributes:
        begin, end, nbytes: the half-open address range of the memory, and its size in bytes.
        owner: a weak reference to the bucket of the weights; None after they have been resharded.
        index: index of the parameter in its bucket.
    """

    __slots__ = ("begin", "end", "index", "nbytes", "owner")

    def __init__(self, memory: torch.UntypedStorage, owner: Any, index: int) -> None:
        self.index = index
        self.begin = memory.data_ptr()
        self.nbytes = memory.nbytes()
        self.end = self.begin + self.nbytes
        self.owner: weakref.ref[Any] | None = weakref.ref(owner)

    def give_up(self) -> None:
        """Remove the owner, because the weights have been resharded."""
        self.owner = None
