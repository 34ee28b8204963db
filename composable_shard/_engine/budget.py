"""The memory budget in a step that deviates from the plan: decides which groups to reshard to free memory.

All ranks must decide alike, because a decision changes which gathers follow. So decisions depend only on what is the
same on all ranks: the bytes leased by issued actions, the phases of groups, the schedule, and how far backward is.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from .._group.group import ParamGroup
from .._group.phases import GATHERING, RESIDENT, UNSHARDED
from .._memory.pool import BufferPool
from .node import Outputs, Use
from .order import Order


class Budget:
    """Limits the bytes that the groups of one engine lease.

    Args:
        groups: all groups.
        pool: the memory whose leases are limited.
        order: its forward schedule specifies how many bytes may be leased.

    Attributes:
        unread: while a backward runs, the groups that may be resharded because backward has read none of their weights
            yet. There are two kinds:

            - Groups that stayed unsharded after forward and that backward has not reached. Their value is None.
            - Groups of which backward has reached a use in a checkpoint. Their value is that use and the outputs of its
              node. The checkpoint recomputes the forward before backward reads anything, and that forward gathers the
              weights again.
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
        """Begin a backward: groups that stayed unsharded for it may be resharded so that recomputations can gather."""
        self.unread = dict.fromkeys(group for group in self._groups if group.phase is UNSHARDED)

    def reached(self, use: Use, outputs: Outputs) -> None:
        """Note that backward has reached a use; `outputs` are the outputs of its node.

        In a checkpoint, its group may still be resharded, because the recomputation gathers it again. There are three
        exceptions:

        - Groups that backward does not gather (`unshard_in_backward`).
        - The root's group: checkpoints of its blocks are recomputed within its backward, and may read its weights.
        - Groups with `reduce_unused`. Ranks that do not run the use gather for those that do. But only a rank that
          reads the weights can tell whether they were read, and all ranks must reshard alike.
        """
        group, options = use.group, use.group.settings.current
        if use.under_hooks and options.unshard_in_backward and not (options.reduce_unused or group.is_root):
            self.unread[group] = use, outputs
            for bucket in group.buckets:
                bucket.writes.await_read()  # after the first read, the group may no longer be resharded (`_may_go`)
        else:
            self.unread.pop(group, None)

    def yielding(self, to: ParamGroup, staying: Container[ParamGroup]) -> list[ParamGroup]:
        """The groups that may be resharded to make room for the group `to`, in the order in which to reshard them.

        1. Prefetched groups.
        2. Groups that stayed unsharded after forward; in a backward, only those whose weights it has not read yet.
        3. Groups that stay unsharded for another use (`staying`).

        Args:
            to: the group that needs memory for a gather or a reduction. In backward, the groups that enclose it stay
                unsharded: their backward has begun, and continues around that of `to`.
            staying: the groups that stay unsharded for their next use.
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
        """FQNs of the groups in whose forwards this group runs, in any phase of the plan."""
        plan = self._order.plan
        pairs = [pair for around in (plan.around, *(phase.around or () for phase in plan.phases)) for pair in around]
        names = {group.fqn}
        while more := {outer for inner, outer in pairs if inner in names} - names:
            names |= more
        return names - {group.fqn}


def gathering(group: ParamGroup) -> int:
    """Bytes that a gather of this group would lease now.

    A gather among the few ranks that keep pieces of the weights needs landing memory in addition to the weights.
    """
    if group.phase is not RESIDENT:
        return group.layout.gather_bytes
    return group.layout.weight_bytes + sum(resident.for_landing.nbytes for resident in group.residents)
