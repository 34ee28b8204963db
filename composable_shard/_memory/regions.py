"""Regions: the parts of an arena, whose memory goes back to the allocator while nothing in them is leased.

An arena in one piece would stand whole at the moment at which a step needs most: where the loss is made, after the last
module was resharded. So what stays leased there lies in a region of its own, and so does each request that is much
larger than others: an embedding's weights and gradients, which a step needs once, and not at the same time. A region
has one allocation at a time; its slots, and all views of them, see the new one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from .slots import Events, Request, Slot


class Region:
    """A part of an arena.

    Args:
        memory: its memory, bytes.
        offset: of the region in the arena, in bytes.
        is_large: see the attribute.

    Attributes:
        offset: as given.
        is_large: whether it is for a request that is much larger than others: it has memory only while that is leased.
        nbytes: its size.
        slots: those that lie in it.
        is_dry: whether its memory is the allocator's now.
    """

    def __init__(self, memory: torch.Tensor, offset: int, is_large: bool = False) -> None:
        self._storage = memory.untyped_storage()
        self.offset, self.nbytes, self.is_large = offset, memory.numel(), is_large
        self.slots: Sequence[Slot] = ()
        self.is_dry = False

    def is_free(self) -> bool:
        """Whether none of its slots is leased."""
        return all(slot.request is None for slot in self.slots)

    def drain(self) -> Events:
        """Give its memory back; returns the events behind the last work on it, for which whoever gets it must wait."""
        after = [event for slot in self.slots for event in slot.free_after]
        for slot in self.slots:
            slot.free_after = ()
        self.is_dry = True
        return tuple(dict.fromkeys(after))

    @property
    def storage(self) -> torch.UntypedStorage:
        """The storage of its memory, and of all views of its slots."""
        return self._storage

    def fill(self, free_after: Events) -> None:
        """It has memory again, to be written to after these events."""
        self.is_dry = False
        for slot in self.slots:
            slot.moved(free_after)
        for slot in self.slots:
            slot.set_rivals(slot.rivals)


_LARGE_SHARE, _LARGE_RATIO = 1 / 3, 1.5  # of the arena, and of the median request, that a large request exceeds


def least_large(requests: Sequence[Request], nbytes: int) -> float:
    """The bytes that a request must exceed to be large, among `requests` and in an arena of `nbytes` in one piece."""
    median = sorted([request.nbytes for request in requests])[len(requests) // 2]
    return max(_LARGE_SHARE * nbytes, _LARGE_RATIO * median)


def parted(
    requests: Sequence[Request], resting: Collection[Request], least: float
) -> Iterator[tuple[bool, list[Request]]]:
    """The requests of each region of an arena.

    Args:
        requests: all.
        resting: those that stay leased between forward and backward.
        least: from `least_large`.

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
