"""Which group comes next: what the plan expects, and what users have listed in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ._actions import Actions
from ._errors import ShardConfigValueError
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
        self._told = -1, 0  # a backward pass, and how many of the backward's edges it was told
        self.follow(plan)

    def follow(self, plan: ShardPlan) -> None:
        """Take up a plan of the same groups; what is gathered or kept already stays as it is.

        Raises:
            ShardConfigValueError: it names a group that is not there; the plan before stays in force.
        """
        schedule, named, edges = plan.schedule, self._by_fqn, plan.edges()
        told = [*edges.forward, *edges.backward]
        names = [*plan.order, *edges.kept, *dict(edges.in_flight), *(fqn for at, ahead in told for fqn in (at, *ahead))]
        if strange := [fqn for fqn in names if fqn not in named]:
            raise ShardConfigValueError(f"plan: names {strange[0]!r}, which is no group of this model")
        backward, order = dict(edges.backward), [step.fqn for step in plan.backward_order()]
        self._expected = [named[fqn] for fqn in plan.order]
        self._forward: dict[ParamGroup, list[ParamGroup]] | None = None
        self._backward: list[tuple[ParamGroup, list[ParamGroup]]] | None = None
        if schedule is not None:
            self._forward = {named[at]: [named[fqn] for fqn in ahead] for at, ahead in edges.forward}
            self._backward = [(named[fqn], [named[each] for each in backward.get(fqn, ())]) for fqn in order]
        for fqn, group in named.items():
            group.stays = None if schedule is None else fqn in schedule.kept
        self._do.max_reductions = None if schedule is None else edges.max_reductions
        self._do.in_flight = {named[fqn]: number for fqn, number in edges.in_flight}
        self._do.reduces_first = edges.reduces_first
        self._do.budget = plan.pool.budget
        self.plan = plan

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
        following = self._follower(group) if self._forward is None else None
        if self.explicit and (False, group) in self.explicit:
            return self.explicit[False, group]
        if self._forward is not None:
            return self._forward.get(group, ())
        return () if following is None else (following,)

    def before(self, group: ParamGroup, expected: ParamGroup | None, number: int) -> Sequence[ParamGroup]:
        """What to gather ahead when the backward of `group` begins.

        Args:
            group: its group.
            expected: the group whose turn is next.
            number: of the backward pass.
        """
        listed: Sequence[ParamGroup] | None = self.explicit.get((True, group)) if self.explicit else None
        if listed is None and self._backward is not None:
            listed = self._due(group, number)
        if listed is None:
            listed = [] if expected is None else [expected]
        return [each for each in listed if each.options.unshard_in_backward]

    def _due(self, group: ParamGroup, number: int) -> list[ParamGroup]:
        """What the schedule gathers up to the backward of `group`, and this pass has not been told yet.

        Where the root returns what its last module does, autograd reaches that module first.
        """
        assert self._backward is not None
        begin = 0 if self._told[0] != number else self._told[1]
        at = next((at for at, (each, _) in enumerate(self._backward) if each is group), -1)
        self._told = number, max(begin, at + 1)
        return [ahead for _, edges in self._backward[begin : at + 1] for ahead in edges]

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
