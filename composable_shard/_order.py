"""Which group comes next: what the plan expects, and what users have listed in its place."""

from __future__ import annotations

from collections.abc import Sequence

from ._group import ParamGroup
from ._plan import ShardPlan, replan
from ._record import Record


class Order:
    """The order in which the forwards of an engine's groups begin, and this forward's place in it.

    Attributes:
        plan: the plan that it follows; re-made when a forward goes another way.
        explicit: by direction (backward or not) and group, which groups to gather ahead in the place of the next one.
    """

    def __init__(self, plan: ShardPlan, groups: Sequence[ParamGroup]) -> None:
        self.plan = plan
        self.explicit: dict[tuple[bool, ParamGroup], list[ParamGroup]] = {}
        by_fqn = {group.fqn: group for group in groups}
        self._expected = [by_fqn[fqn] for fqn in plan.order]
        self._cursor = 0

    def begin(self) -> None:
        """A forward of the root begins."""
        self._cursor = 0

    def after(self, group: ParamGroup) -> Sequence[ParamGroup]:
        """What to gather ahead when the forward of `group` begins."""
        following = self._follower(group)
        if self.explicit and (False, group) in self.explicit:
            return self.explicit[False, group]
        return () if following is None else (following,)

    def before(self, group: ParamGroup, expected: ParamGroup | None) -> Sequence[ParamGroup]:
        """What to gather ahead when the backward of `group` begins, `expected` being the group whose turn is next."""
        listed = self.explicit.get((True, group)) if self.explicit else None
        if listed is None:
            listed = [] if expected is None else [expected]
        return [each for each in listed if each.options.unshard_in_backward]

    def learn(self, seen: Sequence[ParamGroup]) -> None:
        """A whole forward of the root has seen its groups in this order."""
        order = tuple([group.fqn for group in seen])
        if order != self.plan.order:
            self.plan = replan(self.plan, Record((), (), order))
            self._expected = list(seen)

    def _follower(self, group: ParamGroup) -> ParamGroup | None:
        """The group that the plan expects after this one."""
        order = self._expected
        if self._cursor >= len(order) or order[self._cursor] is not group:
            if group not in order:
                return None
            later = [at for at, each in enumerate(order) if each is group and at >= self._cursor]
            self._cursor = later[0] if later else order.index(group)
        self._cursor += 1
        return order[self._cursor] if self._cursor < len(order) else None
