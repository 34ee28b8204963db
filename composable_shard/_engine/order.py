"""The current schedules, and which groups to prefetch: those of the plan, or those of users' prefetch lists instead."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from operator import attrgetter

from .._group.group import ParamGroup
from .._group.param import reduced_as
from .._memory.pool import BufferPool
from .._plan.arena import ArenaSlot, Placed
from .._plan.course import module_of
from .._plan.graph_schedule import GraphSchedule
from .._plan.plan import GroupPlan, ShardPlan
from .._plan.schedule import AGAIN, NO_GRAD, NO_SYNC, TRAIN, Action, Kind, Schedule
from ..errors import ShardConfigValueError
from .backward import BackwardPass
from .node import Use

Ahead = Sequence[tuple[ParamGroup, Sequence[ParamGroup]]]
_in_backward = attrgetter("gathers_in_backward")  # whether backward prefetches a group


@cache
def phase_of(grad: bool, sync: bool, waiting: bool) -> str:
    """The name of a forward's phase. Forwards of different phases may run the groups in different orders.

    Args:
        grad: whether the forward runs in grad mode.
        sync: whether its gradients are to be reduced.
        waiting: whether an earlier forward still waits for its backward.
    """
    kind = NO_GRAD if not grad else TRAIN if sync else NO_SYNC
    return kind + AGAIN if waiting else kind  # a second forward before the backward, as of a pipeline or a GAN


@dataclass(frozen=True, eq=False)
class PhaseSchedule:
    """The schedule of one phase, with groups instead of their names (see `_plan.schedule.Schedule`).

    Attributes:
        order: FQNs of the groups in the order in which their forwards begin.
        around: pairs of FQNs, inner and outer: groups that run within the forward of another group. The root's own
            group is never the outer one.
        forward: the groups of `order`, each with the groups to prefetch when its forward begins.
        backward: the groups in the order in which their backwards begin, each with the groups to prefetch then. None
            to prefetch the group that each backward pass expects next.
        kept: groups that stay unsharded after forward; None if their settings decide.
        max_reductions: the maximum number of reductions in flight, unless the settings allow fewer; None if the
            settings decide.
        in_flight: groups with a maximum other than `max_reductions` for their reduction, and that maximum.
        reduces_first: whether reductions are waited for before gathers in backward, regardless of the groups' settings.
        stays_for_next: whether a group stays unsharded if its own next backward follows immediately.
        holds: groups whose reductions keep their memory until they are waited for, even if other reductions release it
            as soon as they are queued (`frees_queued` in `_group/setup.py`). The plan has enough memory for that. A
            later gather then does not wait for their memory.
        budget: the maximum number of leased bytes; None for no limit.
    """

    order: tuple[str, ...]
    around: frozenset[tuple[str, str]]
    forward: Ahead
    backward: Ahead | None = None
    kept: frozenset[ParamGroup] | None = None
    max_reductions: int | None = None
    in_flight: Mapping[ParamGroup, int] = field(default_factory=dict)
    reduces_first: bool = False
    stays_for_next: bool = True
    holds: frozenset[ParamGroup] = frozenset()
    budget: int | None = None

    def reshards(self, group: ParamGroup) -> bool:
        """Whether a group is resharded after forward."""
        return group.settings.gives_up[group.is_root] if self.kept is None else group not in self.kept


class Order:
    """The only place that stores the current schedules, and how far the current forward has come in its schedule.

    Args:
        plan: the first plan to follow.
        groups: all groups of the engine.
        pool: their memory.
        listener: returns the function to call when the plan or a user's prefetch list has changed, or None.

    Attributes:
        plan: the current plan.
        forward: the schedule in effect now. In and after a forward, that of its phase. In a backward, the same as
            `backward`: forwards that it recomputes belong to that phase.
        backward: the schedule of the last forward in grad mode, which its backward follows.
        usual: the plan's schedule for phases whose order it does not know.
        phases: by phase, the schedules of the phases whose order the plan knows.
        explicit: the users' prefetch lists, by (whether for backward, group): the groups to prefetch instead of those
            in the schedule.
    """

    def __init__(
        self,
        plan: ShardPlan,
        groups: Sequence[ParamGroup],
        pool: BufferPool,
        listener: Callable[[], Callable[[Order], None] | None],
    ) -> None:
        self.explicit: dict[tuple[bool, ParamGroup], list[ParamGroup]] = {}
        self._listener = listener
        self._by_fqn = {group.fqn: group for group in groups}
        self._pool = pool
        self._next = 0  # index in the order of the forward that should begin next
        self.plan = plan
        self.forward = self.backward = self.usual = PhaseSchedule((), frozenset(), ())
        self.phases: dict[str, PhaseSchedule] = {}
        self.follow(plan)

    def follow(self, plan: ShardPlan) -> None:
        """Follow a plan of the same groups from now on. Groups that are unsharded stay unsharded.

        Raises:
            ShardConfigValueError: the plan names a group that does not exist. The old plan stays in effect.
            PoolBudgetError: a group does not fit in the order of some phase. The old plan stays in effect.
        """
        self._check_names(plan)
        usual, own = self._schedule(plan), plan.own_orders
        names = [phase.name for phase in plan.phases]
        phases = {name: self._schedule(plan.in_phase(name)) if name in own else usual for name in names}
        # Nothing above adopts a part of the plan, and nothing below fails, so after an error the old plan is in effect.
        self._pool.keep_idle(plan.pool.keep_idle)
        self.plan, self.phases = plan, phases
        self.forward = self.backward = self.usual = usual
        for group in self._by_fqn.values():
            group.settings.follow_plan(group.is_root, None if usual.kept is None else group in usual.kept)
        self.lists_changed()

    def _check_names(self, plan: ShardPlan) -> None:
        scheduled = (fqns for _, fqns in plan.effective_schedule().names())
        names = chain(plan.order, *scheduled, *plan.own_orders.values())
        for fqn in names:
            if fqn not in self._by_fqn:
                raise ShardConfigValueError(f"plan: names {fqn!r}, but the model has no parameter group of this name")

    def set_prefetches(self, group: ParamGroup, backward: bool, following: list[ParamGroup]) -> None:
        """Set a user's list of groups to prefetch when the forward, or the backward, of a group begins."""
        self.explicit[backward, group] = following

    def lists_changed(self) -> None:
        """Notify the listener that the plan, or a user's prefetch list, has changed."""
        if (listener := self._listener()) is not None:
            listener(self)

    def _schedule(self, plan: ShardPlan) -> PhaseSchedule:
        named, schedule = self._by_fqn, plan.schedule
        edges = {event: deque(uses) for event, uses in plan.effective_schedule().ahead().items()}

        def entries(kind: Kind, order: Iterable[str]) -> Iterator[tuple[ParamGroup, Sequence[ParamGroup]]]:
            for fqn in order:
                uses = edges.get(Action(kind, fqn))
                yield named[fqn], [named[each] for each in uses.popleft()] if uses else ()

        usual = PhaseSchedule(
            plan.order, frozenset(plan.around), [*entries(Kind.FORWARD, plan.order)], budget=plan.pool.budget
        )
        if schedule is None:
            return usual
        return replace(
            usual,
            backward=[*entries(Kind.BACKWARD, [step.fqn for step in plan.backward_order()])],
            kept=frozenset(named[fqn] for fqn in schedule.kept),
            max_reductions=schedule.max_reductions,
            in_flight={named[fqn]: number for fqn, number in schedule.in_flight},
            reduces_first=schedule.reduces_first,
            stays_for_next=schedule.stays_for_next,
            holds=frozenset(named[fqn] for fqn in schedule.holds),
        )

    def described(self) -> ShardPlan:
        """The plan with the current options and parameters of the groups; the same object if nothing differs."""
        groups = tuple(_described(each, self._by_fqn[each.fqn]) for each in self.plan.groups)
        return self.plan if groups == self.plan.groups else replace(self.plan, groups=groups).with_policies()

    def placed(self) -> ShardPlan:
        """The plan with the offsets at which the pool places its slots.

        The plan as it is if the arena does not keep idle memory (the default on accelerators): then it consists of
        separate allocations, without common offsets.
        """
        if not self._pool.arena.keeps_idle:
            return self.plan
        places = tuple(each for group in self._by_fqn.values() for each in _placed(group, self._pool))
        if places != self.plan.places:
            self.plan = replace(self.plan, places=places)
        return self.plan

    def for_graphs(self, reductions: bool) -> GraphSchedule:
        """The schedule that compiled graphs follow, with the users' prefetch lists.

        Args:
            reductions: whether graphs follow the plan's limits of reductions in flight. If there is a memory budget,
                they do in any case. If this is False and the plan is the default one, graphs also choose themselves
                what to prefetch: one module ahead.
        """
        plan, edges = self.plan, self.plan.effective_schedule()
        ahead: tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]] = ({}, {})  # in forward, in backward
        if reductions or not plan.is_default:  # by default, graphs prefetch one module ahead, in their own order
            ahead = self._by_module(edges.forward), self._by_module(edges.backward)
        for (backward, group), listed in self.explicit.items():
            ahead[backward][module_of(group.fqn)] = tuple(module_of(each.fqn) for each in listed)
        budget = plan.pool.budget
        all_first = [module_of(each.fqn) for each in plan.groups if edges.reduces_first or each.reduces_first]
        first = tuple(dict.fromkeys(all_first))
        if not reductions and budget is None:
            # Only modules whose gathers wait for reductions have a limit: one reduction in flight.
            return GraphSchedule(*ahead, dict.fromkeys(first, 1), first)
        kept: Counter[str] = Counter()
        for fqn in edges.kept if budget is not None else ():
            kept[module_of(fqn)] += plan.group(fqn).unsharded_bytes
        queued = budget is not None and any(group.frees_queued for group in plan.groups)
        return GraphSchedule(*ahead, self._in_flight(edges), first, budget, dict(kept), queued)

    def _in_flight(self, edges: Schedule) -> dict[str, int]:
        """By module, the maximum number of reductions in flight."""
        numbers, by_module = dict(edges.in_flight), dict[str, int]()
        for fqn in self._by_fqn:
            module, most = module_of(fqn), numbers.get(fqn, edges.max_reductions)
            by_module[module] = min(most, by_module.get(module, most))
        return by_module

    def _by_module(self, edges: Iterable[tuple[str, Sequence[str]]]) -> dict[str, tuple[str, ...]]:
        """For each module, the modules to prefetch with it. A graph treats all groups of a module as one group."""
        ahead: dict[str, tuple[str, ...]] = {module_of(fqn): () for fqn in self._by_fqn}
        for fqn, following in edges:
            module, others = module_of(fqn), map(module_of, following)
            ahead[module] = tuple(dict.fromkeys([*ahead[module], *(each for each in others if each != module)]))
        return ahead

    def begin(self, phase: str, grad: bool) -> None:
        """Begin a forward of the root.

        Args:
            phase: the phase of the forward, as returned by `phase_of`.
            grad: whether it runs in grad mode, so that a backward can follow.
        """
        self._next = 0
        self.forward = self.phases.get(phase, self.usual)
        if grad:
            self.backward = self.forward

    def begin_backward(self) -> None:
        """Begin a backward. What it recomputes follows the schedule of its phase, and not of a forward without grad
        mode that has run since.
        """
        self.forward = self.backward

    def note(self, phase: str, order: tuple[str, ...]) -> None:
        """Note the order of a new phase, whose forward ran in the usual order."""
        self.plan = self.plan.noting(phase, order)
        self.phases[phase] = self.usual

    def after(self, group: ParamGroup) -> Sequence[ParamGroup]:
        """The groups to prefetch when the forward of `group` begins."""
        forwards, index = self.forward.forward, self._next
        if index >= len(forwards) or forwards[index][0] is not group:
            index = _index_of(group, forwards, index)
        listed: Sequence[ParamGroup] = ()
        if index >= 0:
            self._next, listed = index + 1, forwards[index][1]
        return self.explicit.get((False, group), listed) if self.explicit else listed

    def encloses(self, outer: ParamGroup, inner: ParamGroup) -> bool:
        """Whether forwards of `inner` run within forwards of `outer`, by the plan. All run in those of the root."""
        around, fqn = dict(self.plan.around), inner.fqn
        while fqn in around and fqn != outer.fqn:
            fqn = around[fqn]
        return outer.is_root or fqn == outer.fqn

    def all_have_begun(self) -> bool:
        """Whether the forward of the last group of the schedule has begun."""
        return self._next >= len(self.forward.forward)

    def before(self, use: Use, now: BackwardPass) -> tuple[Sequence[ParamGroup], Sequence[ParamGroup]]:
        """The groups to gather when the backward of a use begins; none if backward skipped the use earlier.

        Returns:
            the groups to gather before the use's own group, because skipped entries of the schedule list them, and the
            groups to prefetch after it.
        """
        if now.skipped and use in now.skipped:
            return (), ()
        group, backwards = use.group, self.backward.backward
        missed: Sequence[ParamGroup] = ()
        if self.explicit and (True, group) in self.explicit:
            listed: Sequence[ParamGroup] = self.explicit[True, group]
        elif backwards is None:
            listed = now.next_groups(group)
        else:
            skipped, planned = now.due(group, backwards)
            missed = [other for other in skipped if other is group or now.expects(other)]
            listed = list(filter(now.expects, planned))  # without modules on which the loss does not depend
        return list(filter(_in_backward, missed)), list(filter(_in_backward, listed))


def _index_of(group: ParamGroup, forwards: Ahead, begin: int) -> int:
    """The index of the next forward of a group from `begin` on; -1 if it has none.

    If it has one only before `begin`, the forward has left the plan's order: continue from there.
    """
    indices = [index for index, (planned, _) in enumerate(forwards) if planned is group]
    return next((index for index in indices if index >= begin), indices[0] if indices else -1)


def _placed(group: ParamGroup, pool: BufferPool) -> Iterator[Placed]:
    """The placement of the slots that the pool leases for a group, with the names that plans use."""
    for purpose, backward, requests in group.requests():
        slots = [ArenaSlot(*span) for span in map(pool.span_of, requests) if span is not None]
        # A purpose of which some requests have no slot was not leased in the recorded steps, so its place is unknown.
        if requests and len(slots) == len(requests):
            yield Placed(f"{purpose} {group.fqn}", backward, tuple(slots))


def _described(plan: GroupPlan, group: ParamGroup) -> GroupPlan:
    """A group's part of a plan, with its current dtypes and options."""
    options = group.options
    reduced = reduced_as(group.params, options)
    params = tuple(
        replace(
            each,
            stored=param.dtype,
            gathered=param.compute_dtype(options),
            reduced=dtype,
            trains=param.sharded.requires_grad,
        )
        for each, param, dtype in zip(plan.params, group.params, reduced, strict=True)
    )
    return replace(
        plan,
        params=params,
        reshard_after_forward=group.settings.gives_up[group.is_root],
        reduces_first=group.reduces_first,
        frees_queued=group.frees_queued,
        reduces_last=options.reduce_unused,
    )
