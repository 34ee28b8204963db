"""Which group comes next: what the plan expects, and what users have listed in its place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from .._errors import ShardConfigValueError
from .._group.bucket import GatherBucket
from .._group.group import ParamGroup
from .._memory.pool import BufferPool
from .._memory.slots import Request
from .._plan.arena import ArenaSlot, Placed
from .._plan.graph_schedule import GraphSchedule
from .._plan.plan import GroupPlan, ShardPlan
from .._plan.schedule import ROOT_NAME, Action, Kind, Schedule
from .actions import Actions
from .backward import BackwardPass
from .node import Use


@dataclass(frozen=True)
class _Lists:
    """What is gathered when, in one phase, what stays, and how far reductions lag behind.

    Attributes:
        schedule: by which that is; None for the settings of the groups.
        order: FQNs of the groups in the order in which their forwards begin.
        expected: the same groups.
        forward: which groups to gather when one begins, by place in `order`.
        backward: the same with the group, in the order of backwards, if a schedule says so.
        in_flight: of the schedule, by group.
    """

    schedule: Schedule | None
    order: tuple[str, ...]
    expected: list[ParamGroup]
    forward: list[list[ParamGroup]]
    backward: list[tuple[ParamGroup, list[ParamGroup]]] | None = None
    in_flight: dict[ParamGroup, int] = field(default_factory=dict)


class Order:
    """The order in which the forwards of an engine's groups begin, and this forward's place in it.

    Attributes:
        plan: the plan that it follows.
        phases: those of which it knows the order.
        replans: how often it was made anew.
        told: gives whom to tell when the plan or a list has changed; None for nobody.
        explicit: by direction (backward or not) and group, which groups to gather ahead in the place of what the plan
            says.
    """

    def __init__(self, plan: ShardPlan, actions: Actions) -> None:
        self.explicit: dict[tuple[bool, ParamGroup], list[ParamGroup]] = {}
        self.replans = 0
        self.told: Callable[[], Callable[[Order], None] | None] = lambda: None
        self._do = actions
        self._by_fqn = {group.fqn: group for group in actions.groups}
        self._cursor = 0
        self._told = -1, 0  # a backward pass, and how many of the backward's edges it was told
        self.follow(plan)

    def follow(self, plan: ShardPlan) -> None:
        """Take up a plan of the same groups; what is gathered or kept already stays as it is.

        Raises:
            ShardConfigValueError: it names a group that is not there; the plan before stays in force.
            PoolBudgetError: in the order of some phase a group does not fit; likewise.
        """
        named, edges = self._by_fqn, plan.edges()
        told = [*edges.forward, *edges.backward]
        names = [*plan.order, *edges.kept, *dict(edges.in_flight), *(fqn for at, ahead in told for fqn in (at, *ahead))]
        names += [fqn for order in plan.own_orders.values() for fqn in order]
        if strange := [fqn for fqn in names if fqn not in named]:
            raise ShardConfigValueError(f"plan: names {strange[0]!r}, which is no group of this model")
        usual = self._lists(plan)
        of_phase = {phase: self._lists(plan.in_phase(phase)) for phase in plan.own_orders}
        self._do.pool.use_mem_pool(plan.pool.mem_pool)  # the last that can fail
        self._usual, self._of_phase = usual, of_phase
        self._take_up(usual, trains=True)
        for fqn, group in named.items():
            stays = not group.resharding if plan.schedule is None else fqn in edges.kept
            group.settings.stays = stays if stays == group.resharding else None  # a guard of what is compiled
        self._do.budget.most = plan.pool.budget
        self.plan = plan
        self.phases = {phase for phase, _ in plan.orders}
        if (listener := self.told()) is not None:
            listener(self)

    def _take_up(self, lists: _Lists, trains: bool) -> None:
        """Go by these from now on, forward and, if one can follow, backward."""
        self._now, schedule = lists, lists.schedule
        for group in self._do.groups:
            group.stays = None if schedule is None else group.fqn in schedule.kept
        if trains:
            self._backward_of = lists
            self._do.max_reductions = None if schedule is None else schedule.max_reductions
            self._do.reduces_first = schedule is not None and schedule.reduces_first
            self._do.in_flight = lists.in_flight
            self._do.stays_for_next = schedule is None or schedule.stays_for_next

    def _lists(self, plan: ShardPlan) -> _Lists:
        named = self._by_fqn
        expected = [named[fqn] for fqn in plan.order]
        edges = {event: deque(uses) for event, uses in plan.edges().ahead().items()}

        def ahead(kind: Kind, fqn: str) -> list[ParamGroup]:
            uses = edges.get(Action(kind, fqn))
            return [named[each] for each in uses.popleft()] if uses else []

        forward = [ahead(Kind.FORWARD, fqn) for fqn in plan.order]
        if plan.schedule is None:
            return _Lists(None, plan.order, expected, forward)
        order = [step.fqn for step in plan.backward_order()]
        return _Lists(
            plan.schedule,
            plan.order,
            expected,
            forward,
            [(named[fqn], ahead(Kind.BACKWARD, fqn)) for fqn in order],
            {named[fqn]: number for fqn, number in plan.schedule.in_flight},
        )

    def described(self) -> ShardPlan:
        """The plan with the options and the parameters that groups have now; the same object if they are those."""
        groups = tuple(_described(each, self._by_fqn[each.fqn]) for each in self.plan.groups)
        return self.plan if groups == self.plan.groups else replace(self.plan, groups=groups).with_policies()

    def placed(self) -> ShardPlan:
        """The plan, which knows now where the pool has what it leases."""
        places = tuple(each for group in self._do.groups for each in _placed(group, self._do.pool))
        if places != self.plan.places:
            self.plan = replace(self.plan, places=places)
        return self.plan

    def for_graphs(self, follows: bool) -> GraphSchedule:
        """What graphs are told: the lists of users and, if they follow the plan, all that its schedule says."""
        plan, edges = self.plan, self.plan.edges()
        ahead: tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]] = ({}, {})
        in_flight: dict[str, int] = {}
        first: list[str] = []
        if follows:
            for of, pairs in zip(ahead, (edges.forward, edges.backward), strict=True):
                of |= {_module_of(fqn): () for fqn in self._by_fqn}
                for at, group_names in pairs:  # groups on several meshes are one module of a graph
                    its = map(_module_of, group_names)
                    before = of[_module_of(at)]
                    others = [each for each in its if each != _module_of(at) and each not in before]
                    of[_module_of(at)] = (*before, *dict.fromkeys(others))
            numbers = dict(edges.in_flight)
            for fqn in self._by_fqn:
                most = numbers.get(fqn, edges.max_reductions)
                in_flight[_module_of(fqn)] = min(most, in_flight.get(_module_of(fqn), most))
            first = [_module_of(g.fqn) for g in plan.groups if edges.reduces_first or g.reduces_first]
        for (backward, group), those in self.explicit.items():
            ahead[backward][_module_of(group.fqn)] = tuple(_module_of(each.fqn) for each in those)
        kept: dict[str, int] = {}
        for fqn in edges.kept if follows or plan.pool.budget is not None else ():
            kept[_module_of(fqn)] = kept.get(_module_of(fqn), 0) + plan.group(fqn).unsharded_bytes
        return GraphSchedule(*ahead, kept, in_flight, tuple(dict.fromkeys(first)))

    def begin(self, phase: str, trains: bool) -> None:
        """A forward of the root begins.

        Args:
            phase: which kind of forward it is.
            trains: whether a backward can follow.
        """
        self._cursor = 0
        lists = self._of_phase.get(phase, self._usual) if self._of_phase else self._usual
        if lists is not self._now or (trains and lists is not self._backward_of):
            self._take_up(lists, trains)

    def begin_backward(self, repeated: frozenset[ParamGroup]) -> None:
        """A backward begins: what it recomputes follows the phase that it belongs to, whatever has run since."""
        self._do.repeated, self._do.pool.backward = repeated, True
        if self._now is not self._backward_of:
            self._take_up(self._backward_of, trains=True)

    def expected(self, phase: str) -> tuple[str, ...]:
        """FQNs of the groups in the order in which a forward of this phase should see them."""
        return self._of_phase.get(phase, self._usual).order

    def note(self, phase: str, order: tuple[str, ...]) -> None:
        """A phase was seen in which the order is as expected."""
        self.plan = self.plan.noting(phase, order)
        self.phases.add(phase)

    def after(self, group: ParamGroup) -> Sequence[ParamGroup]:
        """What to gather ahead when the forward of `group` begins."""
        place, now = self._place(group), self._now
        if self.explicit and (False, group) in self.explicit:
            return self.explicit[False, group]
        if place is None:
            return ()
        return now.forward[place]

    def before(self, use: Use, now: BackwardPass) -> tuple[Sequence[ParamGroup], Sequence[ParamGroup]]:
        """What to gather ahead when the backward of a use begins; nothing if that was told before.

        Returns:
            what should have been gathered before its own weights, and what comes behind them.
        """
        if now.told and use in now.told:
            return (), ()
        group = use.group
        missed: list[ParamGroup] = []
        listed: Sequence[ParamGroup] | None = self.explicit.get((True, group)) if self.explicit else None
        if listed is None and self._backward_of.backward is not None:
            before, planned = self._due(group, now.number, self._backward_of.backward)
            missed = [each for each in before if each is group or now.expects(each)]
            listed = [each for each in planned if now.expects(each)]  # a loss may leave the last modules out
        if listed is None:
            return (), _wanted(now.next_groups(group))
        return _wanted(missed), _wanted(listed)

    def _due(
        self, group: ParamGroup, number: int, edges: Sequence[tuple[ParamGroup, list[ParamGroup]]]
    ) -> tuple[list[ParamGroup], list[ParamGroup]]:
        """What the schedule gathers before the backward of `group` that this pass has not been told yet, and with it.

        Where the root returns what its last module does, autograd reaches that module first.
        """
        begin = 0 if self._told[0] != number else self._told[1]
        at = next((at for at in range(begin, len(edges)) if edges[at][0] is group), -1)
        self._told = number, max(begin, at + 1)
        return [each for _, ahead in edges[begin : max(begin, at)] for each in ahead], edges[at][1] if at >= 0 else []

    def _place(self, group: ParamGroup) -> int | None:
        """Which of the forwards that the plan expects it is; None if that is none."""
        order, place = self._now.expected, self._cursor
        if place >= len(order) or order[place] is not group:
            if group not in order:
                return None
            later = [at for at, each in enumerate(order) if each is group and at >= place]
            place = later[0] if later else order.index(group)
        self._cursor = place + 1
        return place


def _wanted(groups: Sequence[ParamGroup]) -> Sequence[ParamGroup]:
    """Those that backward gathers before it asks for them."""
    return [group for group in groups if group.settings.current.unshard_in_backward] if groups else groups


def _module_of(fqn: str) -> str:
    """The module of a group, as a graph names it: the first of a list, on whatever mesh."""
    return fqn.partition(" on ")[0].partition(", ")[0] or ROOT_NAME


def _placed(group: ParamGroup, pool: BufferPool) -> Iterator[Placed]:
    """Where the pool has what it leases for a group, by the names that plans give it."""
    gathers = [bucket for bucket in group.buckets if isinstance(bucket, GatherBucket)]
    wanted: list[tuple[str, bool, list[Request]]] = [
        ("small", False, [resident.for_pieces for resident in group.residents]),
        ("landing", False, [resident.for_landing for resident in group.residents]),
    ]
    for buckets in group.reduces.values():
        wanted.append(("reduction", False, [request for bucket in buckets for request in bucket.requests]))
    for backward in (False, True):
        wanted.append(("weights", backward, [bucket.for_weights[backward] for bucket in gathers]))
        landings = [bucket.for_landing[backward] for bucket in gathers if bucket.for_landing is not None]
        wanted.append(("landing", backward, landings))
    for what, backward, requests in wanted:
        found = [pool.place_of(request) for request in requests]
        slots = tuple(ArenaSlot("", *place) for place in found if place is not None)
        if found and len(slots) == len(found):
            yield Placed(f"{what} {group.fqn}", backward, slots)


def _described(plan: GroupPlan, group: ParamGroup) -> GroupPlan:
    """A group's part of a plan, with the dtypes and the options of now."""
    options = group.options
    params = tuple(
        replace(
            each,
            stored=param.dtype,
            gathered=param.compute_dtype(options),
            reduced=options.reduce_dtype(param.dtype),
            trains=param.sharded.requires_grad,
        )
        for each, param in zip(plan.params, group.params, strict=True)
    )
    return replace(
        plan,
        params=params,
        reshard_after_forward=group.resharding,
        reduces_first=group.reduces_first,
        reduces_last=options.reduce_unused,
    )
