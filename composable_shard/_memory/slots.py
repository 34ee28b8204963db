"""Slots: memory with a fixed address, what it is leased for, and where tensors lie in it. The pool hands them out."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .._torch.core import address_of, plainly, to_keep

Events = tuple[torch.Event, ...]
PlaceKey = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]


class Place:
    """Where a tensor lies within a slot. A pool has one object for each (`BufferPool.places`), told by its identity.

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
    """A place for each key, made when it is first asked for."""

    def __missing__(self, key: PlaceKey) -> Place:
        place = self[key] = Place(*key)
        return place


class _SlotViews(dict[Place, torch.Tensor]):
    """A view of a slot for each place, made when it is first asked for."""

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
    """What memory is leased for, the same in every step; a pool has one object for each (`BufferPool.request`).

    Attributes:
        name: what for.
        nbytes: of the slot, a multiple of 512.
        backward: whether it is backward's request for what forward has one for as well.
        slot: its place in the arena, if that knows it.
        met: the others that were leased at the same time, ever; None before it was leased for the first time.
    """

    __slots__ = ("__weakref__", "backward", "met", "name", "nbytes", "slot")

    def __init__(self, name: str, nbytes: int, backward: bool = False) -> None:
        self.name = name
        self.nbytes = nbytes
        self.backward = backward
        self.slot: Slot | None = None
        self.met: set[Request] | None = None


class Slot:
    """A piece of memory with a fixed address.

    Attributes:
        views: of it, by place.
        request: what it is leased for now; None while it is free.
        owner: who reads weights from it now, weakly; None while it is free or only carries communication.
        lent: whether it stays leased only because users keep views of it.
        free_after: the events behind the last uses; whoever writes next waits for them.
        rivals: other slots of an arena that lie, in part, in the same memory.
        reach: the end of the one of them, or of this slot, that ends last.
        resizes: whether it takes memory only while it is leased, each time elsewhere.
    """

    __slots__ = (
        "__weakref__",
        "_bytes",
        "_typed",
        "begin",
        "end",
        "free_after",
        "lent",
        "nbytes",
        "owner",
        "reach",
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
        self.resizes = resizes

    def resize(self, nbytes: int) -> None:
        """Give its memory back to the allocator, or take some; views of it stay good for what is there next."""
        self._bytes[0].untyped_storage().resize_(nbytes)
        self.begin = address_of(self._bytes[0])
        self.end = self.reach = self.begin + nbytes

    def show(self) -> None:
        """Let modes that count memory see it."""
        with to_keep():
            self._bytes[0].detach()

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
            with plainly():
                view = self._typed[dtype, written] = self._bytes[written].view(dtype)
        return view


class Outside:
    """Memory of weights that belongs to a parameter and not to the pool; its address holds until it is emptied.

    Attributes:
        begin, end, nbytes: where it lies.
        owner: who reads weights from it, weakly.
        index: of the parameter, among those of its owner.
    """

    __slots__ = ("begin", "end", "index", "nbytes", "owner")

    def __init__(self, memory: torch.UntypedStorage, owner: Any, index: int) -> None:
        self.index = index
        self.begin = memory.data_ptr()
        self.nbytes = memory.nbytes()
        self.end = self.begin + self.nbytes
        self.owner: weakref.ref[Any] | None = weakref.ref(owner)
