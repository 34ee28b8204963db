"""Where named buffers lie in one arena, so that those that are ever live at once do not overlap.

Packing of intervals in two dimensions (time and address) with one address a name: colouring a graph whose nodes have
sizes, which is hard in general; first-fit in a few orders comes close (`pack`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def pack(sizes: Mapping[K, int], conflicts: Mapping[K, Set[K]]) -> tuple[dict[K, int], int]:
    """Offsets of buffers, and the bytes of the arena that holds them.

    Args:
        sizes: bytes of each buffer, in the order in which they were first needed.
        conflicts: for each, those that were live at the same time; symmetric.

    Returns:
        the best of first-fit in three orders: by size, by size times conflicts, as first needed. The first is best for
        chains of uneven layers, the last for uniform ones with large neighbours, the other for groups that stay.
    """
    first = list(sizes)
    orders = (
        sorted(first, key=lambda name: -sizes[name]),
        sorted(first, key=lambda name: -sizes[name] * len(conflicts.get(name, ()))),
        first,
    )
    return min((_first_fit(order, sizes, conflicts) for order in orders), key=lambda found: found[1])


def _first_fit(order: Sequence[K], sizes: Mapping[K, int], conflicts: Mapping[K, Set[K]]) -> tuple[dict[K, int], int]:
    offsets: dict[K, int] = {}
    end = 0
    for name in order:
        taken = sorted((offsets[other], sizes[other]) for other in conflicts.get(name, ()) if other in offsets)
        at = 0
        for begin, nbytes in taken:
            if at + sizes[name] <= begin:
                break
            at = max(at, begin + nbytes)
        offsets[name] = at
        end = max(end, at + sizes[name])
    return offsets, end
