"""Lookup of weights by address. Autograd passes tensors to save, and only the address identifies their weights."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Sequence

from .slots import Outside, Slot


class Addresses:
    """All memory that may contain weights: the slots of a pool, and memory of parameters outside of the pool.

    Attributes:
        first, end: the half-open address range that contains all of this memory.
    """

    def __init__(self) -> None:
        self.first = self.end = 0
        self._slots: list[Slot] = []  # sorted by `begin`
        self._begins: list[int] = []
        self._outside: list[Outside] = []

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def add(self, slot: Slot) -> None:
        """Add a slot that has memory."""
        insort(self._slots, slot)
        self._changed()

    def remove(self, slot: Slot) -> None:
        """Remove a slot. Call this before its address changes."""
        self._slots.remove(slot)
        self._changed()

    def replace(self, slots: Iterable[Slot]) -> None:
        """Replace all slots."""
        self._slots = sorted(slots)
        self._changed()

    def register(self, outside: Sequence[Outside]) -> None:
        """Add memory outside of the slots that contains weights."""
        self._outside += outside
        self._changed()

    def unregister(self, outside: Collection[Outside]) -> None:
        """Remove memory outside of the slots, which no longer contains weights."""
        self._outside = [each for each in self._outside if each not in outside]
        for each in outside:
            each.give_up()
        self._changed()

    def find(self, address: int) -> Slot | Outside | None:
        """The slot or outside memory whose weights contain `address`, or None if no weights do."""
        index = bisect_right(self._begins, address)
        slot = self._slots[index - 1] if index else None
        # Of all slots that begin before the address, `slot` begins last. Any other one that contains the address
        # overlaps it: a rival.
        if slot is not None and address < slot.reach:
            for each in (slot, *slot.rivals):
                if each.begin <= address < each.end and each.owner is not None:
                    return each
        for outside in self._outside:
            if outside.begin <= address < outside.end:
                return outside
        return None

    def _changed(self) -> None:
        self._begins = [slot.begin for slot in self._slots]
        memory: list[Slot | Outside] = [*self._slots, *self._outside]
        self.first = min([each.begin for each in memory], default=0)
        self.end = max([each.end for each in memory], default=0)
