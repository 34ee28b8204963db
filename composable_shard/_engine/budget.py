"""The memory budget in a step that does not run as planned: which weights are given up to make room.

Decisions rest on how many bytes the issued actions lease, which is the same on all ranks, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from .._group.group import ParamGroup
from .._group.phases import GATHERING, RESIDENT, UNSHARDED
from .._memory.pool import BufferPool
from .order import Order


class Budget:
    """Bounds the bytes that the groups of one engine lease.

    Args:
        groups: all groups.
        pool: the memory whose leases are bounded.
        order: its forward schedule says how many bytes may be leased.

    Attributes:
        unread: groups whose weights forward has kept and that the backward that runs now has not reached.
    """

    def __init__(self, groups: Sequence[ParamGroup], pool: BufferPool, order: Order) -> None:
        self._order = order
        self._groups = groups
        self._pool = pool
        self.unread: set[ParamGroup] = set()

    def exceeded_by(self, nbytes: int) -> bool:
        """Whether `nbytes` more would exceed the budget; never without one."""
        most = self._order.forward.budget
        return most is not None and self._pool.issued_bytes + nbytes > most

    def begin_backward(self) -> None:
        """A backward begins: weights that forward has kept for it may be given up for gathers of recomputations.

        They may until backward reads one of them: the first read of a handle takes `reads_left` of its bucket to 0.
        """
        if self._order.forward.budget is not None:
            self.unread = {group for group in self._groups if group.phase is UNSHARDED}
            self._count_reads(self.unread, 1)

    def puts_off(self, group: ParamGroup) -> bool:
        """Whether the uses of a group are deferred in checkpoints.

        Not those of a group that is gathered only on demand anyway (`unshard_in_backward` is off). Nor with
        `reduce_unused`: ranks that do not use the group gather it at the moment when others reach it.
        """
        options = group.options
        return self._order.forward.budget is not None and options.unshard_in_backward and not options.reduce_unused

    def reached(self, group: ParamGroup) -> None:
        """Backward has reached a use of a group, perhaps on other ranks only: its weights may not be given up now."""
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
        """The groups whose weights may be given up, in the order in which to do so.

        First come groups that were gathered ahead. Then come weights that an earlier forward has kept for its backward,
        in a backward only those that it has not read. Last come weights that stay for another use (`staying`).
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
    """Bytes that a gather of this group leases now.

    A gather among a few ranks, from the pieces that these have kept, needs memory to land in beside the weights.
    """
    if group.phase is not RESIDENT:
        return group.layout.gather_bytes
    return group.layout.weight_bytes + sum(resident.for_landing.nbytes for resident in group.residents)
