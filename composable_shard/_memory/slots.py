"""Slots: memory with a fixed address that the pool leases; requests for slots, and the places of tensors in them."""

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
    """Where a tensor lies within a slot, and as what. A pool has one object for each (`BufferPool.places`).

    So places compare and hash by identity, which makes a place a cheap key.

    Attributes:
        dtype: of the tensor.
        offset: bytes from the start of the slot.
        shape, stride: of the tensor.
    """

    __slots__ = ("dtype", "offset", "shape", "stride")

    def __init__(self, dtype: torch.dtype, offset: int, shape: torch.Size, stride: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.offset = offset
        self.shape = shape
        self.stride = stride


class Places(dict[PlaceKey, Place]):
    """The place of each key, made when it is first looked up."""

    def __missing__(self, key: PlaceKey) -> Place:
        place = self[key] = Place(*key)
        return place


class _SlotViews(dict[Place, torch.Tensor]):
    """The view of a slot for each place, made when it is first looked up."""

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
    """A purpose for which memory is leased in every step; a pool has one object for each (`BufferPool.request`).

    Attributes:
        name: the purpose, with a parameter's name.
        nbytes: size of the slot in bytes, a multiple of 512.
        backward: whether it is backward's request, of a purpose for which forward has one as well.
        refills: whether views of its slot are to show what is gathered next, wherever that lies: the slot is the name's
            own, and has memory only while it is leased.
        slot: its slot in the arena; None if it has none.
        met: all requests that were ever leased at the same time; None until it is leased for the first time.
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
        """It is leased at the same time as these: note that on both sides."""
        self.met = live.union(self.met or ())
        for other in live:
            assert other.met is not None
            other.met.add(self)

    def give_slot(self, slot: Slot | None) -> None:
        """An arena was made, in which it has this slot; None: the arena is gone."""
        self.slot = slot

    def forget(self) -> None:
        """Forget what it has met, and its slot: sizes are about to change."""
        self.met = self.slot = None

    def forget_met(self, live: set[Request]) -> None:
        """Likewise, while it is leased: it keeps its slot, and has met the others that are leased now."""
        self.met = live - {self}


_NO_BYTES = torch.empty(0, dtype=torch.uint8)


class Slot:
    """A piece of memory with a fixed address.

    Attributes:
        views: views of its memory, by place.
        request: the request for which it is leased now; None while it is free.
        owner: a weak reference to the bucket whose weights lie in it, or are being gathered into it; else None.
        lent: whether it stays leased only because users keep views of it.
        free_after: the events behind the last work on it, for which the next writer waits.
        begin, end, nbytes: addresses of its first byte and of the first behind it, and its size in bytes.
        rivals: other slots of an arena that overlap it.
        awaited: by rival, its events for which a writer of this slot waits, or did.
        region: the part of the arena in which it lies; None if in none.
        reach: the highest end of this slot and its rivals.
        resizes: whether its memory goes back when it is released, or when what was queued on it is waited for; it gets
            other memory then.
    """

    __slots__ = (
        "__weakref__",
        "_bytes",
        "_typed",
        "awaited",
        "begin",
        "end",
        "free_after",
        "lent",
        "nbytes",
        "owner",
        "reach",
        "region",
        "request",
        "resizes",
        "rivals",
        "views",
    )

    def __init__(self, memory: torch.Tensor, free_after: Events, resizes: bool = False) -> None:
        self._bytes = (memory.data, memory.data)
        self._typed: dict[tuple[torch.dtype, bool], torch.Tensor] = {}
        self.views = _SlotViews(self)
        self.nbytes = memory.numel()
        self.begin = address_of(memory)
        self.end = self.reach = self.begin + self.nbytes
        self.request: Request | None = None
        self.owner: weakref.ref[Any] | None = None
        self.lent = False
        self.free_after = free_after
        self.rivals: tuple[Slot, ...] = ()
        self.awaited: dict[Slot, Events] = {}
        self.region: Any = None
        self.resizes = resizes

    @property
    def has_memory(self) -> bool:
        """Whether it has memory, which one that `resizes` has not always."""
        return self.end > self.begin

    @property
    def offset(self) -> int:
        """Bytes from the start of its allocation."""
        return int(self._bytes[0].storage_offset())

    def lie_in(self, region: Any) -> None:
        """It lies in this `Region` of the arena."""
        self.region = region

    def drained(self) -> Events:
        """Its memory goes back: returns the events behind the last work on it."""
        after, self.free_after = self.free_after, ()
        return after

    def moved(self, free_after: Events) -> None:
        """Its allocation was made anew, perhaps elsewhere."""
        self.free_after = free_after
        self.begin = address_of(self._bytes[0])
        self.end = self.begin + self.nbytes

    def leave(self) -> None:
        """Its arena is gone: let go of the memory, now and not when a cycle of slots and views is found."""
        self.region, self.rivals = None, ()
        self.awaited.clear()
        self.views.clear()
        self._typed.clear()
        self._bytes = (_NO_BYTES, _NO_BYTES)

    def set_rivals(self, rivals: Sequence[Slot]) -> None:
        """These slots of the arena overlap it."""
        self.rivals = tuple(rivals)
        self.awaited.clear()
        self.reach = max([self.end, *[rival.end for rival in rivals]])

    def suspend(self, after: torch.Event | None, lent: bool) -> None:
        """Its weights are given up, though it stays leased; the next writer waits for `after`."""
        self.owner, self.lent = None, lent
        self.free_after = () if after is None else (after,)

    def resume(self, owner: weakref.ref[Any] | None) -> None:
        """Weights of `owner` lie in it again."""
        self.owner, self.lent = owner, False

    def wait_until_free(self) -> None:
        """The current stream waits until the memory may be written to."""
        for event in self.free_after:
            event.wait()

    def wait_for(self, rival: Slot) -> None:
        """The next writer waits for what the memory of an overlapping slot was used for, too.

        What an earlier writer of this slot has waited for is left out: it came before the events of this slot.
        """
        events, before = rival.free_after, self.awaited.get(rival, ())
        if events is not before:
            self.awaited[rival] = events
            self.free_after = tuple(dict.fromkeys([*self.free_after, *(each for each in events if each not in before)]))

    def resize(self, nbytes: int, free_after: Events = ()) -> None:
        """Allocate or (with 0) free its memory; all views of the slot then see the new memory."""
        self.free_after = free_after
        self._bytes[0].untyped_storage().resize_(nbytes)
        self.begin = address_of(self._bytes[0])
        self.end = self.reach = self.begin + nbytes

    def show(self) -> None:
        """Run an operator on the memory, so that dispatch modes that count memory see it."""
        with to_keep():
            self._bytes[0].detach()

    def __lt__(self, other: Slot) -> bool:
        return self.begin < other.begin

    def typed(self, dtype: torch.dtype, written: bool = False) -> torch.Tensor:
        """The whole slot as a 1D tensor of `dtype`.

        Gathers and reductions write only through tensors made with ``written=True``: aliases with a version counter of
        their own. So autograd does not take a write for an edit of weights that it has saved. It would be wrong to: the
        saved weights were given up, or are read through handles, or have moved with their group to another slot.
        """
        view = self._typed.get((dtype, written))
        if view is None:
            with plainly():
                view = self._typed[dtype, written] = self._bytes[written].view(dtype)
        return view


class Outside:
    """Memory of weights that is not the pool's but a parameter's (`fsdp_pre_all_gather`); fixed until it is emptied.

    Attributes:
        begin, end, nbytes: addresses of its first byte and of the first behind it, and its size in bytes.
        owner: a weak reference to the bucket whose weights lie in it; None once they are given up.
        index: of the parameter in its bucket.
    """

    __slots__ = ("begin", "end", "index", "nbytes", "owner")

    def __init__(self, memory: torch.UntypedStorage, owner: Any, index: int) -> None:
        self.index = index
        self.begin = memory.data_ptr()
        self.nbytes = memory.nbytes()
        self.end = self.begin + self.nbytes
        self.owner: weakref.ref[Any] | None = weakref.ref(owner)

    def give_up(self) -> None:
        """Its weights are given up."""
        self.owner = None
