"""The memory budget in a step that does not run as planned: which weights are given up to make room.

Decisions rest on how many bytes the issued actions lease, which is the same on all ranks, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from .._group.group import ParamGroup
from .._group.phases import GATHERING, RESIDENT, UNSHARDED
from .._memory.pool import BufferPool
from .node import Outputs, Use
from .order import Order


class Budget:
    """Bounds the bytes that the groups of one engine lease.

    Args:
        groups: all groups.
        pool: the memory whose leases are bounded.
        order: its forward schedule says how many bytes may be leased.

    Attributes:
        unread: while a backward runs, the groups whose weights may be given up because backward has read none of them
            yet. The value is None if forward has kept the weights and backward has not reached the group. If backward
            has reached a use of the group in a checkpoint, the value is that use and the outputs of its node: the
            checkpoint recomputes the forward before anything is read, and that gathers the weights again.
    """

    def __init__(self, groups: Sequence[ParamGroup], pool: BufferPool, order: Order) -> None:
        self._order = order
        self._groups = groups
        self._pool = pool
        self.unread: dict[ParamGroup, tuple[Use, Outputs] | None] = {}

    def exceeded_by(self, nbytes: int) -> bool:
        """Whether `nbytes` more would exceed the budget; False if there is no budget."""
        most = self._order.forward.budget
        return most is not None and self._pool.issued_bytes + nbytes > most

    def begin_backward(self) -> None:
        """A backward begins: weights that forward has kept for it may be given up for gathers of recomputations."""
        self.unread = dict.fromkeys(group for group in self._groups if group.phase is UNSHARDED)

    def reached(self, use: Use, outputs: Outputs) -> None:
        """Backward has reached a use; `outputs` are those of its node.

        In a checkpoint its weights may still be given up, as the recomputation gathers them again. Not those of the
        root: checkpoints within it read them at any time. Nor with `reduce_unused`: ranks that do not run the use
        gather for those that do, and read nothing, so they could not tell when the weights may be given up.
        """
        group, options = use.group, use.group.settings.current
        if use.under_hooks and options.unshard_in_backward and not (options.reduce_unused or group.is_root):
            self.unread[group] = use, outputs
            for bucket in group.buckets:
                bucket.writes.await_read()
        else:
            self.unread.pop(group, None)

    def yielding(self, to: ParamGroup, staying: Container[ParamGroup]) -> list[ParamGroup]:
        """The groups whose weights may be given up for those of a group, in the order in which to do so.

        First come groups that were gathered ahead, then weights that forward has kept for its backward (in a backward
        only those of which it has read none), and last weights that stay for another use (`staying`).

        Args:
            to: the group that needs room. In backward, groups that enclose it keep their weights, because a part of
                their backward may be running.
            staying: the groups whose weights stay for their next use.
        """
        around = self._enclosing(to) if self._pool.backward else ()
        groups = [group for group in self._groups if not (group.stay.pinned or group.running or group.fqn in around)]
        ahead = [group for group in groups if group.phase is GATHERING]
        kept = [group for group in groups if group.phase is UNSHARDED and self._may_go(group)]
        stays = [group for group in groups if group in staying and group.settings.current.reshard_after_backward]
        return list(dict.fromkeys((*ahead, *kept, *stays)))

    def _may_go(self, group: ParamGroup) -> bool:
        if not self._pool.backward:
            return True
        return group in self.unread and all(bucket.writes.looked_at is None for bucket in group.buckets)

    def _enclosing(self, group: ParamGroup) -> Container[str]:
        """FQNs of the groups in whose forwards this one runs, in any phase."""
        plan = self._order.plan
        pairs = [pair for around in (plan.around, *dict(plan.arounds).values()) for pair in around]
        names = {group.fqn}
        while more := {outer for inner, outer in pairs if inner in names} - names:
            names |= more
        return names - {group.fqn}


def gathering(group: ParamGroup) -> int:
    """Bytes that a gather of this group leases now.

    A gather among a few ranks, from the pieces that these have kept, needs memory to land in beside the weights.
    """
    if group.phase is not RESIDENT:
        return group.layout.gather_bytes
    return group.layout.weight_bytes + sum(resident.for_landing.nbytes for resident in group.residents)
