"""The arena of a pool, and its regions: parts whose memory goes back to the allocator while nothing in them is leased.

An arena in one piece would stand whole at the moment at which a step needs most: where the loss is made, after the last
module was resharded. So what stays leased there lies in a region of its own, and so does each request that is much
larger than others: an embedding's weights and gradients, which a step needs once, and not at the same time. A region
has one allocation at a time; its slots, and all views of them, see the new one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from .._plan.arena import pack
from .._torch.core import plainly
from .addresses import Addresses
from .device import DeviceMemory
from .slots import Events, Request, Slot

Spans = Sequence[tuple[int, int]]  # for each request, its offset in a region and its size, in bytes


class Region:
    """A part of an arena.

    Args:
        memory: its memory, bytes.
        offset: of the region in the arena, in bytes.
        spans: of its slots.
        free_after: events behind which its memory may be written to.
        is_large: see the attribute.

    Attributes:
        offset: as given.
        is_large: whether it is for a request that is much larger than others: its memory goes back when that is
            released, or when what was queued on it is waited for.
        nbytes: its size.
        storage: of its memory, and of all views of its slots.
        slots: those that lie in it; `at` has them by their spans.
        is_dry: whether its memory is the allocator's now.
    """

    def __init__(self, memory: torch.Tensor, offset: int, spans: Spans, free_after: Events, is_large: bool) -> None:
        self.offset, self.nbytes, self.is_large = offset, memory.numel(), is_large
        self.storage = memory.untyped_storage()
        with plainly():
            self.at = {(begin, size): Slot(memory[begin : begin + size], free_after) for begin, size in {*spans}}
        self.slots = sorted(self.at.values())
        self.is_dry = False
        _find_rivals(self.slots)
        for slot in self.slots:
            slot.lie_in(self)

    def is_free(self) -> bool:
        """Whether none of its slots is leased."""
        return all(slot.request is None for slot in self.slots)

    def drain(self) -> Events:
        """Its memory is about to go back: returns the events behind the last work on it."""
        self.is_dry = True
        return tuple(dict.fromkeys([event for slot in self.slots for event in slot.drained()]))

    def fill(self, free_after: Events) -> None:
        """It has memory again, to be written to after these events."""
        self.is_dry = False
        for slot in self.slots:
            slot.moved(free_after)
        for slot in self.slots:
            slot.set_rivals(slot.rivals)


class Arena:
    """The slots of a pool that have a fixed place.

    Until a pool has seen a step, an arena that does not keep idle memory has a region for each request.

    Args:
        memory: where its memory comes from.
        addresses: is told which slots have memory.

    Attributes:
        slots: all of them.
        is_planned: whether the pool has seen a step: `make` was called.
        keeps_idle: whether it keeps its memory also while nothing in it is leased.
        least_large: the bytes beyond which a request has memory only while it is leased.
        nbytes: bytes of all regions.
        held_bytes: bytes of those that have memory now.
        dry: how many have none.
        allocations: how many regions were made.
        busy: how many slots, in regions or not, work is queued on that was not waited for yet.
    """

    def __init__(self, memory: DeviceMemory, addresses: Addresses) -> None:
        self._memory, self._addresses = memory, addresses
        self._regions: list[Region] = []
        self._resting: dict[Request, None] = {}  # what stays leased between forward and backward
        self.slots: list[Slot] = []
        self.is_planned, self.keeps_idle, self.least_large = False, True, float("inf")
        self.nbytes = self.held_bytes = self.dry = self.allocations = self.busy = 0

    def note_busy(self, slots: int) -> None:
        """Work was queued on so many slots more, or (if negative) was waited for."""
        self.busy += slots

    def is_free(self) -> bool:
        """Whether no slot is leased."""
        return all(region.is_free() for region in self._regions)

    def keep_idle(self, wanted: bool) -> bool:
        """Set `keeps_idle`; returns whether that is new."""
        before, self.keeps_idle = self.keeps_idle, wanted
        return before is not wanted

    def make(self, known: Sequence[Request]) -> None:
        """Give these requests slots; there are none."""
        spans = _packed(known)
        if self.keeps_idle:
            self._add(known, spans, False)
        else:
            self.least_large = _least_large(known, _end_of(spans))
            for is_large, part in _parted(known, self._resting, self.least_large):
                if part:  # one after the other, so that they never stand all at once
                    self.drain(self._add(part, _packed(part), is_large))
        self.is_planned = True

    def add(self, request: Request) -> Slot:
        """A slot, in a region of its own, for a request that has none."""
        return self._add([request], [(0, request.nbytes)], True).slots[0]

    def _add(self, known: Sequence[Request], spans: Spans, is_large: bool) -> Region:
        memory = self._memory.allocate(_end_of(spans))
        region = Region(memory, self.nbytes, spans, self._memory.queued(), is_large)
        for request, span in zip(known, spans, strict=True):
            request.give_slot(region.at[span])
        self._regions.append(region)
        self.slots += region.slots
        self._addresses.replace([*self._addresses, *region.slots])
        self.nbytes += region.nbytes
        self.held_bytes += region.nbytes
        self.allocations += 1
        return region

    def note_resting(self, live: set[Request]) -> bool:
        """These requests stay leased between forward and backward; returns whether that is new of any."""
        known = len(self._resting)
        self._resting |= dict.fromkeys(live)
        return len(self._resting) > known

    def rest(self) -> None:
        """Regions in which nothing is leased give their memory back."""
        for region in self._regions:
            if not region.is_dry:
                self.drain(region)

    def drain(self, region: Region) -> None:
        """A region gives its memory back, unless something in it is leased."""
        if not region.is_free():
            return
        self._memory.give_back(region.drain())
        self._addresses.replace(set(self._addresses).difference(region.slots))
        region.storage.resize_(0)
        self.held_bytes -= region.nbytes
        self.dry += 1

    def fill(self, region: Region) -> None:
        """A region has no memory, and something in it is leased now."""
        if region.is_large and self.is_planned:
            self.rest()
        self._memory.fill(region.storage, region.nbytes)
        region.fill(self._memory.queued())
        self._addresses.replace([*self._addresses, *region.slots])
        self.held_bytes += region.nbytes
        self.dry -= 1

    def clear(self) -> None:
        """Nothing is leased, and there are to be no slots."""
        for slot in self.slots:
            slot.leave()
        self.slots, self._regions = [], []
        self.is_planned, self.least_large = False, float("inf")
        self.nbytes = self.held_bytes = self.dry = 0

    def forget(self) -> None:
        """Sizes are about to change: what stays leased is not known any more."""
        self._resting.clear()


_LARGE_SHARE, _LARGE_RATIO = 1 / 3, 1.5  # of the arena, and of the median request, that a large request exceeds


def _packed(known: Sequence[Request]) -> list[tuple[int, int]]:
    """The offset in an arena and the size in bytes of each of these requests."""
    index = {request: i for i, request in enumerate(known)}
    meets = [sorted([index[other] for other in request.met or () if other in index]) for request in known]
    sizes = [request.nbytes for request in known]
    return list(zip(pack(sizes, meets, [request.name for request in known]), sizes, strict=True))


def _end_of(spans: Iterable[tuple[int, int]]) -> int:
    return max(offset + size for offset, size in spans)


def _find_rivals(slots: Sequence[Slot]) -> None:
    """Set the `rivals` and `reach` of slots that are sorted by their begin."""
    rivals: dict[Slot, list[Slot]] = {slot: [] for slot in slots}
    for index, slot in enumerate(slots):
        for later in slots[index + 1 :]:
            if later.begin >= slot.end:
                break
            rivals[slot].append(later)
            rivals[later].append(slot)
    for slot, overlapping in rivals.items():
        slot.set_rivals(overlapping)


def _least_large(requests: Sequence[Request], nbytes: int) -> float:
    """The bytes that a request must exceed to be large, among `requests` and in an arena of `nbytes` in one piece."""
    median = sorted([request.nbytes for request in requests])[len(requests) // 2]
    return max(_LARGE_SHARE * nbytes, _LARGE_RATIO * median)


def _parted(
    requests: Sequence[Request], resting: Collection[Request], least: float
) -> Iterator[tuple[bool, list[Request]]]:
    """The requests of each region of an arena.

    Args:
        requests: all.
        resting: those that stay leased between forward and backward.
        least: from `_least_large`.

    Yields:
        whether the region is for a large request, in forward and in backward; and its requests.
    """
    large: dict[str, list[Request]] = {}
    for request in requests:
        if request.nbytes > least:
            large.setdefault(request.name, []).append(request)
    for each in large.values():
        yield True, each
    small = [request for request in requests if request.nbytes <= least]
    yield False, [request for request in small if request in resting]
    yield False, [request for request in small if request not in resting]
