"""Keeping to a budget in a step that is not the planned one: which weights yield.

What is leased follows from what was issued, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from .._group.group import ParamGroup
from .._group.phases import GATHERING, RESIDENT, UNSHARDED
from .._memory.pool import BufferPool
from .order import Order


class Budget:
    """How much the groups of one engine may lease.

    Args:
        groups: all of them.
        pool: the memory that it bounds.
        order: what says how much of it.

    Attributes:
        unread: groups whose weights forward has kept, and which the backward that runs now has not reached.
    """

    def __init__(self, groups: Sequence[ParamGroup], pool: BufferPool, order: Order) -> None:
        self._order = order
        self._groups = groups
        self._pool = pool
        self.unread: set[ParamGroup] = set()

    def exceeded_by(self, nbytes: int) -> bool:
        """Whether so many bytes more do not fit."""
        most = self._order.forward.budget
        return most is not None and self._pool.issued_bytes + nbytes > most

    def begin_backward(self) -> None:
        """A backward begins: weights that forward has kept for it may yield to what checkpoints gather to recompute.

        They may until they are read, of which the first handle tells: its bucket counts reads down from here on.
        """
        if self._order.forward.budget is not None:
            self.unread = {group for group in self._groups if group.phase is UNSHARDED}
            self._count_reads(self.unread, 1)

    def puts_off(self, group: ParamGroup) -> bool:
        """Whether the backward of a use that may be recomputed begins only where its weights are needed.

        Not where a group is gathered when they are, or where ranks that do not use it gather it as others reach it.
        """
        options = group.options
        return self._order.forward.budget is not None and options.unshard_in_backward and not options.reduce_unused

    def reached(self, group: ParamGroup) -> None:
        """Backward has reached a use of a group, perhaps on other ranks only: its weights stay, if they are there."""
        if group in self.unread:
            self.unread.discard(group)
            self._count_reads((group,), 0)

    def end_backward(self) -> None:
        """Backward is over, or has failed."""
        if self.unread:
            self._count_reads(self.unread, 0)
            self.unread.clear()

    def _count_reads(self, groups: Iterable[ParamGroup], reads_left: int) -> None:
        for group in groups:
            for bucket in group.buckets:
                bucket.call_after(reads_left)

    def yielding(self, staying: Container[ParamGroup]) -> list[ParamGroup]:
        """The groups whose weights may be given up, the first one first.

        Those that were gathered ahead; in a forward, what an earlier one has kept for its backward, and in a backward,
        what it has not read of that; last what stays for another use (`staying`).
        """
        ahead = [group for group in self._groups if group.phase is GATHERING]
        kept = [group for group in self._groups if group.phase is UNSHARDED and self._may_go(group)]
        stays = [g for g in self._groups if g in staying and g.options.reshard_after_backward and g not in kept]
        return [group for group in (*ahead, *kept, *stays) if not (group.pinned or group.running)]

    def _may_go(self, group: ParamGroup) -> bool:
        if not self._pool.backward:
            return True
        return group in self.unread and all(bucket.reads_left for bucket in group.buckets)


def gathering(group: ParamGroup) -> int:
    """Bytes that a gather of this group leases now: among a few ranks, that of pieces lands beside the weights."""
    if group.phase is not RESIDENT:
        return group.gather_bytes
    return group.weight_bytes + sum(resident.for_landing.nbytes for resident in group.residents)
