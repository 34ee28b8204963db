"""The arena of a pool.

If the arena keeps its memory while it is idle (`Arena.keeps_idle`), it is a single region. Otherwise it has several
regions, and the memory of a region can be freed while none of its slots is leased: that of a large region is freed at
release, that of others at certain points of a step (`BufferPool.free_idle`).

A single allocation would stay fully allocated at the peak of a step, when the loss is computed after the last module
has been resharded. Requests that stay leased at that time therefore have their own region. So has each request that is
much larger than others, such as the weights and the gradients of an embedding, which a step needs only once and at
different times. A region has one allocation at a time. Its slots and all views of them use the current allocation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from .._plan.arena import pack
from .._torch.core import plainly
from .addresses import Addresses
from .device import DeviceMemory
from .slots import Events, Request, Slot

Spans = Sequence[tuple[int, int]]  # for each request, its offset in the region and its size, in bytes


class Region:
    """A part of an arena.

    Args:
        memory: the memory of the region, a 1D uint8 tensor.
        offset: offset of the region in the arena, in bytes.
        spans: the spans of its slots.
        free_after: events after which the memory may be written.
        is_large: see the attribute.

    Attributes:
        offset: offset in the arena, in bytes.
        is_large: whether the region is for requests of one name. It loses its memory at release, or in
            `finish_queued` if work is still queued on it. Requests that are much larger than others have such regions,
            and those that the arena does not know yet: before `Arena.make`, all. An arena with `keeps_idle` has none.
        nbytes: size in bytes.
        storage: the storage of the memory and of all views of its slots.
        slots: the slots in the region. `at` contains them by span.
        has_memory: False while the memory is freed.
    """

    def __init__(self, memory: torch.Tensor, offset: int, spans: Spans, free_after: Events, is_large: bool) -> None:
        self.offset, self.nbytes, self.is_large = offset, memory.numel(), is_large
        self.storage = memory.untyped_storage()
        with plainly():
            self.at = {
                (begin, size): Slot(memory[begin : begin + size], free_after, region=self) for begin, size in {*spans}
            }
        self.slots = sorted(self.at.values())
        self.has_memory = True
        _find_rivals(self.slots)

    def is_unused(self) -> bool:
        """Whether no slot of the region is leased."""
        return all(slot.request is None for slot in self.slots)

    def take_events(self) -> Events:
        """Prepare to free the memory. Returns the events after the last work on it."""
        self.has_memory = False
        return tuple(dict.fromkeys([event for slot in self.slots for event in slot.take_events()]))

    def reallocated(self, free_after: Events) -> None:
        """Set up the slots for newly allocated memory, which may be written after these events."""
        self.has_memory = True
        for slot in self.slots:
            slot.reallocated(free_after)
        for slot in self.slots:
            slot.set_rivals(slot.rivals)


class Arena:
    """The slots of a pool that have a fixed place.

    Before `make`, an arena with `keeps_idle=False` has one region per request.

    Args:
        memory: allocates the memory.
        addresses: the index of slots with memory, which the arena updates.

    Attributes:
        slots: all slots.
        is_planned: whether `make` has been called, after the first step.
        keeps_idle: whether regions keep their memory while nothing in them is leased. Never in a capture.
        least_large: size in bytes above which `make` gives a request a large region.
        nbytes: bytes of all regions.
        held_bytes: bytes of all regions that have memory.
        without_memory: number of regions without memory.
        allocations: number of regions that have been created.
    """

    def __init__(self, memory: DeviceMemory, addresses: Addresses) -> None:
        self._memory, self._addresses = memory, addresses
        self._regions: list[Region] = []
        self._resting: dict[Request, None] = {}  # requests that stay leased between forward and backward
        self.slots: list[Slot] = []
        self.is_planned, self.keeps_idle, self.least_large = False, True, float("inf")
        self.nbytes = self.held_bytes = self.without_memory = self.allocations = 0

    def is_unused(self) -> bool:
        """Whether no slot is leased."""
        return all(region.is_unused() for region in self._regions)

    def keep_idle(self, wanted: bool) -> bool:
        """Set `keeps_idle`. Returns whether the setting has changed."""
        before, self.keeps_idle = self.keeps_idle, wanted
        return before is not wanted

    def make(self, known: Sequence[Request]) -> None:
        """Create the slots of these requests. Requires that there are no slots."""
        spans = _packed(known)
        if self.keeps_idle:
            self._add(known, spans, False)
        else:
            self.least_large = _least_large(known, _end_of(spans))
            for is_large, part in _parted(known, self._resting, self.least_large):
                if part:
                    # A region allocates its memory. Free it right away, so that not all regions are allocated together.
                    self.free(self._add(part, _packed(part), is_large))
        self.is_planned = True

    def add(self, request: Request) -> Slot:
        """Create a slot in its own region for a request without a slot."""
        return self._add([request], [(0, request.nbytes)], True).slots[0]

    def _add(self, known: Sequence[Request], spans: Spans, is_large: bool) -> Region:
        memory = self._memory.allocate(_end_of(spans))
        region = Region(memory, self.nbytes, spans, self._memory.current_events(), is_large)
        for request, span in zip(known, spans, strict=True):
            request.give_slot(region.at[span])
        self._regions.append(region)
        self.slots += region.slots
        self._addresses.replace([*self._addresses, *region.slots])
        self.nbytes += region.nbytes
        self.held_bytes += region.nbytes
        self.allocations += 1
        return region

    def note_leased_between(self, live: set[Request]) -> bool:
        """Record that these requests stay leased between forward and backward. Returns whether any of them is new."""
        known = len(self._resting)
        self._resting |= dict.fromkeys(live)
        return len(self._resting) > known

    def free_idle(self) -> None:
        """Free the memory of all regions in which nothing is leased."""
        for region in self._regions:
            if region.has_memory:
                self.free(region)

    def free(self, region: Region) -> None:
        """Free the memory of a region, unless something in it is leased."""
        if not region.is_unused():
            return
        self._memory.wait_before_free(region.take_events())
        self._addresses.replace(set(self._addresses).difference(region.slots))
        region.storage.resize_(0)
        self.held_bytes -= region.nbytes
        self.without_memory += 1

    def allocate(self, region: Region) -> None:
        """Allocate the memory of a region again, because something in it is being leased."""
        if region.is_large and self.is_planned:
            # A step needs a large request and the rest of the arena at different times, for example an embedding before
            # the layers. If something in the rest is leased, its region keeps its memory.
            self.free_idle()
        self._memory.allocate_in(region.storage, region.nbytes)
        region.reallocated(self._memory.current_events())
        self._addresses.replace([*self._addresses, *region.slots])
        self.held_bytes += region.nbytes
        self.without_memory -= 1

    def clear(self) -> None:
        """Remove all slots. Requires that nothing is leased."""
        for slot in self.slots:
            slot.leave()
        self.slots, self._regions = [], []
        self.is_planned, self.least_large = False, float("inf")
        self.nbytes = self.held_bytes = self.without_memory = 0

    def forget(self) -> None:
        """Forget which requests stay leased between forward and backward, because sizes are about to change."""
        self._resting.clear()


# Large requests exceed this share of the arena that all requests would have, and this multiple of their median.
_LARGE_SHARE, _LARGE_RATIO = 1 / 3, 1.5


def _packed(known: Sequence[Request]) -> list[tuple[int, int]]:
    """The offset and size of each request in bytes, in an arena for these requests."""
    index = {request: i for i, request in enumerate(known)}
    meets = [sorted([index[other] for other in request.met or () if other in index]) for request in known]
    sizes = [request.nbytes for request in known]
    return list(zip(pack(sizes, meets, [request.name for request in known]), sizes, strict=True))


def _end_of(spans: Iterable[tuple[int, int]]) -> int:
    return max(offset + size for offset, size in spans)


def _find_rivals(slots: Sequence[Slot]) -> None:
    """Set the `rivals` and `reach` of slots that are sorted by `begin`."""
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
    """The size in bytes above which a request is large, among `requests` and in a single arena of `nbytes` bytes."""
    median = sorted([request.nbytes for request in requests])[len(requests) // 2]
    return max(_LARGE_SHARE * nbytes, _LARGE_RATIO * median)


def _parted(
    requests: Sequence[Request], resting: Collection[Request], least: float
) -> Iterator[tuple[bool, list[Request]]]:
    """The requests of each region of an arena.

    Args:
        requests: all requests.
        resting: the requests that stay leased between forward and backward.
        least: the result of `_least_large`.

    Yields:
        Whether the region is for a large request (in forward and in backward), and the requests of the region.
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
