"""Which group comes next: what the plan expects, and what users have listed in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ._actions import Actions
from ._group import ParamGroup
from ._plan import ShardPlan, replan
from ._record import Record


class Order:
    """The order in which the forwards of an engine's groups begin, and this forward's place in it.

    Attributes:
        plan: the plan that it follows; re-made when a forward goes another way.
        replans: how often it was re-made.
        explicit: by direction (backward or not) and group, which groups to gather ahead in the place of what the plan
            says.
    """

    def __init__(self, plan: ShardPlan, actions: Actions) -> None:
        self.explicit: dict[tuple[bool, ParamGroup], list[ParamGroup]] = {}
        self.replans = 0
        self._do = actions
        self._by_fqn = {group.fqn: group for group in actions.groups}
        self._cursor = 0
        self.follow(plan)

    def follow(self, plan: ShardPlan) -> None:
        """Take up a plan of the same groups; what is gathered or kept already stays as it is."""
        self.plan = plan
        edges = plan.edges()
        self._do.max_reductions, self._do.reduces_first = edges.max_reductions, edges.reduces_first
        self._expected = [self._by_fqn[fqn] for fqn in plan.order]
        self._ahead: dict[tuple[bool, ParamGroup], list[ParamGroup]] | None = None
        schedule, named = plan.schedule, self._by_fqn
        if schedule is not None:
            pairs = [(False, *edge) for edge in schedule.forward] + [(True, *edge) for edge in schedule.backward]
            self._ahead = {(backward, named[at]): [named[fqn] for fqn in ahead] for backward, at, ahead in pairs}
        for fqn, group in named.items():
            group.stays = None if schedule is None else fqn in schedule.kept

    def settings_changed(self) -> None:
        """Make the plan anew, with the options that groups have now."""
        described = [(each, self._by_fqn[each.fqn]) for each in self.plan.groups]
        groups = tuple(
            replace(each, reshard_after_forward=group.resharding, reduces_first=group.reduces_first)
            for each, group in described
        )
        if groups != self.plan.groups:
            self.follow(replace(self.plan, groups=groups).with_policies())

    def begin(self) -> None:
        """A forward of the root begins."""
        self._cursor = 0

    def after(self, group: ParamGroup) -> Sequence[ParamGroup]:
        """What to gather ahead when the forward of `group` begins."""
        following = self._follower(group) if self._ahead is None else None
        if self.explicit and (False, group) in self.explicit:
            return self.explicit[False, group]
        if self._ahead is not None:
            return self._ahead.get((False, group), ())
        return () if following is None else (following,)

    def before(self, group: ParamGroup, expected: ParamGroup | None) -> Sequence[ParamGroup]:
        """What to gather ahead when the backward of `group` begins, `expected` being the group whose turn is next."""
        listed: Sequence[ParamGroup] | None = self.explicit.get((True, group)) if self.explicit else None
        if listed is None and self._ahead is not None:
            listed = self._ahead.get((True, group), ())
        if listed is None:
            listed = [] if expected is None else [expected]
        return [each for each in listed if each.options.unshard_in_backward]

    def learn(self, seen: Sequence[ParamGroup]) -> None:
        """A whole forward of the root has seen its groups in this order."""
        order = tuple([group.fqn for group in seen])
        if order != self.plan.order:
            self.replans += 1
            self.follow(replan(self.plan, Record((), (), order)))

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
