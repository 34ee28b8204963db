"""Which weights lie at an address: autograd shows us tensors to save, and only their address tells whose they are."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Sequence

from .slots import Outside, Slot


class Addresses:
    """All memory in which weights may lie: the slots of a pool, and memory of parameters outside of it.

    Attributes:
        first, end: addresses of the first byte of all this memory, and of the first behind it: no weights lie before
            or beyond.
    """

    def __init__(self) -> None:
        self.first = self.end = 0
        self._slots: list[Slot] = []  # by their begin
        self._begins: list[int] = []
        self._outside: list[Outside] = []

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def add(self, slot: Slot) -> None:
        """A slot has memory now."""
        insort(self._slots, slot)
        self._changed()

    def remove(self, slot: Slot) -> None:
        """A slot has no memory any more; to be called before its address changes."""
        self._slots.remove(slot)
        self._changed()

    def replace(self, slots: Iterable[Slot]) -> None:
        """From now on these are all slots."""
        self._slots = sorted(slots)
        self._changed()

    def claim(self, outside: Sequence[Outside]) -> None:
        """Weights lie in this memory outside of the slots."""
        self._outside += outside
        self._changed()

    def unclaim(self, outside: Collection[Outside]) -> None:
        """No weights lie in this memory outside of the slots any more."""
        self._outside = [each for each in self._outside if each not in outside]
        for each in outside:
            each.give_up()
        self._changed()

    def find(self, address: int) -> Slot | Outside | None:
        """The slot, or memory outside of slots, whose weights lie at `address`; None if no weights lie there."""
        index = bisect_right(self._begins, address)
        slot = self._slots[index - 1] if index else None
        if slot is not None and address < slot.reach:
            for each in (slot, *slot.rivals):  # any other slot with this address overlaps the one that begins last
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
