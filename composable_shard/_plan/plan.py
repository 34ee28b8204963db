"""The plan: what is gathered and reduced together, in which order, and what that takes. Frozen data.

Bytes, places in an arena and predicted times are functions of the plan, not part of it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any

from .._errors import ShardConfigValueError
from .._policies import ONE_AHEAD, PoolPolicy, PrefetchPolicy
from .arena import Arena, Lifetime, Placed, as_placed, peak_bytes, solve
from .codec import decode, encode
from .group_plan import GroupPlan as GroupPlan
from .group_plan import ParamPlan as ParamPlan
from .prefetch import scheduled
from .record import Record
from .schedule import (
    MARKS,
    NO_GRAD,
    NO_SYNC,
    TRAIN,
    Action,
    Edges,
    Kind,
    Schedule,
    Step,
    backward_order,
    kept_by_setting,
    one_ahead,
    timed_step,
    training_step,
)
from .simulation import Costs, Prediction, Sizes, Times, Trace, lifetimes, live_bytes, predict, trace
from .text import around_changes, group_changes, mib, order_changes, other_model, plan_text, schedule_changes

JSON_VERSION = 4
UNBOUNDED = PoolPolicy()

Around = tuple[tuple[str, str], ...]  # groups, each with the one in whose forward it runs


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The plan of one root.

    Attributes:
        groups: all groups, in the order of their modules.
        order: FQNs of the groups in the order in which their forwards begin, one entry a use. Declared at first (the
            order of the modules), learned from the first step.
        orders: the same for each phase that was seen ("train", "no_grad", "train, no sync", ...; see `phase_of`).
        around: FQNs of groups that run in the forward of another one than the root's, each with that of the innermost.
            Declared at first (the modules that hold them), learned from the first step. A use of such a group right
            behind one that runs in the forward of another is taken to run there, too.
        arounds: the same for each phase in which it is otherwise.
        prefetch, pool, costs: what the schedule was made from; see `with_policies`.
        schedule: what is gathered ahead, kept and waited for; None for one group ahead and what settings keep.
        places: where the pool of the engine that follows it has what it leases, once that is known. They are what
            happened, no part of what was planned: plans that differ in them alone are equal.
        phase: of which kind of forward, and what follows it, it is the plan; see `in_phase`.
    """

    groups: tuple[GroupPlan, ...]
    order: tuple[str, ...]
    orders: tuple[tuple[str, tuple[str, ...]], ...] = ()
    prefetch: PrefetchPolicy = ONE_AHEAD
    pool: PoolPolicy = UNBOUNDED
    costs: Costs | None = None
    schedule: Schedule | None = None
    places: tuple[Placed, ...] = field(default=(), compare=False)
    phase: str = TRAIN
    around: Around = ()
    arounds: tuple[tuple[str, Around], ...] = ()

    def group(self, fqn: str) -> GroupPlan:
        """The group of the module `fqn`."""
        return next(g for g in self.groups if g.fqn == fqn)

    @property
    def is_default(self) -> bool:
        """Whether nothing but the settings of the groups makes the schedule."""
        return self.prefetch == ONE_AHEAD and self.pool == UNBOUNDED

    # ---- phases

    def order_in(self, phase: str) -> tuple[str, ...]:
        """The order of forwards in a phase; that of the plan, if nothing else was seen."""
        return dict(self.orders).get(phase, self.order)

    def around_in(self, phase: str) -> Around:
        """What runs inside of what in a phase; as in the plan, if nothing else was seen."""
        return dict(self.arounds).get(phase, self.around)

    def noting(self, phase: str, order: tuple[str, ...], around: Around | None = None) -> ShardPlan:
        """The same plan, which knows the order of a phase and, where that is news, what runs inside of what."""
        orders, arounds = {**dict(self.orders), phase: order}, dict(self.arounds)
        if around is not None and not set(around) <= set(self.around_in(phase)):
            arounds[phase] = around
        return replace(self, orders=tuple(sorted(orders.items())), arounds=tuple(sorted(arounds.items())))

    def _anew(self, **changes: Any) -> ShardPlan:
        """With these changes, and a schedule that is made for them."""
        other = replace(self, schedule=None, **changes)
        return other if other.is_default else other._scheduled()

    def in_phase(self, phase: str) -> ShardPlan:
        """The plan of a phase: actions, bytes and times are those of such a forward and what follows it.

        Its schedule is this one, if the order is, and else one that is made for its order under the same policies.
        What is gathered, kept and reduced in that phase is by this schedule. What an earlier forward has left, where
        the phase says "again", is not thought of.

        Raises:
            PoolBudgetError: in this order a group does not fit into the budget.
        """
        order, around = self.order_in(phase), self.around_in(phase)
        if (order, around) == (self.order, self.around):
            return self if phase == self.phase else replace(self, phase=phase)
        return self._anew(order=order, around=around, costs=self._costs_of(order), phase=phase)

    def _costs_of(self, order: tuple[str, ...]) -> Costs | None:
        """The costs, if they tell of all groups of an order, by its uses: times of others are measured anew."""
        if self.costs is None or not {fqn for fqn, _ in self.costs.forward}.issuperset(order):
            return None
        before, now = Counter(self.order), Counter(order)
        uses = {fqn: now[fqn] / before[fqn] for fqn in now if 0 < before[fqn] != now[fqn]}
        return self.costs.scaled(uses) if uses else self.costs

    @property
    def own_orders(self) -> dict[str, tuple[str, ...]]:
        """The orders of the phases that have another one than the plan, or run something inside of something else."""
        other = dict(self.arounds)
        return {phase: order for phase, order in self.orders if order != self.order or phase in other}

    # ---- the step

    def actions(self) -> tuple[Action, ...]:
        """A step as this plan expects it."""
        return training_step(self._steps(), self.schedule, self.phase)

    def _timed(self) -> tuple[Action, ...]:
        """The same, with forwards and backwards."""
        return timed_step(self._steps(), self.edges(), self.phase)

    def edges(self) -> Schedule:
        """The schedule, also where it is the default one."""
        return self.schedule or one_ahead(self._steps())

    def live_bytes(self) -> tuple[int, ...]:
        """Bytes leased after each of `actions`; of a `SHRINK`, which cuts pieces from the weights, with these."""
        return tuple(live_bytes(self.lifetimes(), len(self.actions())))

    def lifetimes(self) -> list[Lifetime]:
        """The buffers that `actions` lease, by place among them; named ``weights layers.3``, ``landing layers.3``..."""
        return lifetimes(self.actions(), self._sizes())

    @property
    def peak_bytes(self) -> int:
        """Predicted most bytes of unsharded parameters and communication buffers in a training step.

        Gradients that autograd has made and not yet handed over, `.grad` and activations are not among them.
        """
        return peak_bytes(self.lifetimes())

    def arena(self) -> Arena:
        """Places for all that `actions` lease: those of the pool if they are known and good for them, else solved.

        It has one lane, for the events of the pool order what shares memory.
        """
        lives, timed = self.lifetimes(), self._timed()
        forward = itertools.takewhile(lambda action: action.kind is not Kind.BACKWARD, timed)
        turn = sum(action.kind not in MARKS for action in forward)
        return (as_placed(lives, turn, self.places) if self.places else None) or solve(lives)

    def _streamed(self) -> Arena | None:
        """The arena, if its places matter for time: if it is streams that wait."""
        return self.arena() if self.costs is not None and self.costs.streams else None

    def trace(self) -> Trace | None:
        """When what happens in a step; None without costs."""
        times = self.times()
        return None if times is None else trace(self._timed(), times, self._streamed())

    def predicted(self) -> Prediction:
        """The peak by kind of memory and, where costs are known, the time of each group and what of it is exposed."""
        return predict(self._timed(), self._sizes(), self.times(), self._streamed())

    def with_policies(
        self,
        prefetch: PrefetchPolicy | None = None,
        pool: PoolPolicy | None = None,
        costs: Costs | None = None,
    ) -> ShardPlan:
        """The plan with a schedule made anew.

        Args:
            prefetch, pool, costs: what takes the place of this plan's; None leaves it.

        Raises:
            PoolBudgetError: a group does not fit into the budget.
            ShardConfigValueError: `costs` lacks a group.
        """
        plan = replace(
            self, prefetch=prefetch or self.prefetch, pool=pool or self.pool, costs=costs or self.costs, schedule=None
        )
        return plan._scheduled()

    def _scheduled(self) -> ShardPlan:
        steps, budget = self._steps(), self.pool.budget
        if self.phase.startswith((NO_GRAD, NO_SYNC)):
            steps = [replace(step, trains=False) for step in steps]  # nothing is reduced
        made = scheduled(steps, self._sizes(), self.prefetch, budget, self.times())
        if self.phase.startswith(NO_GRAD):
            stays = kept_by_setting(steps)
            made = replace(made, backward=(), kept=tuple(fqn for fqn in made.kept if fqn in stays))
        return replace(self, schedule=None if made == one_ahead(steps) else made)

    def _steps(self) -> list[Step]:
        around: dict[str, tuple[str, ...]] = {}
        for fqn, outer in self.around:
            around[fqn] = (*around.get(fqn, ()), outer)
        used = set(self.order)
        steps = {group.fqn: group.step for group in self.groups if group.fqn in used}
        last = {group.fqn: turn for turn, group in enumerate(self.groups) if group.reduces_last}
        for fqn in steps.keys() & (around.keys() | last.keys()):
            steps[fqn] = replace(steps[fqn], around=around.get(fqn, ()), turn=last.get(fqn))
        return [steps[fqn] for fqn in self.order]

    def _sizes(self) -> dict[str, Sizes]:
        return {fqn: self.group(fqn).sizes for fqn in dict.fromkeys(self.order)}

    def parts(self) -> tuple[list[Step], dict[str, Sizes], dict[str, Times] | None]:
        """What a schedule is made of: uses of groups in order, their bytes, and their seconds where costs are known."""
        return self._steps(), self._sizes(), self.times()

    def times(self) -> dict[str, Times] | None:
        """Seconds of a use of each group, by FQN; None without costs."""
        if self.costs is None:
            return None
        uses = Counter(self.order)
        found = self.costs.times({fqn: self.group(fqn).moved for fqn in uses})
        for fqn in [fqn for fqn, count in uses.items() if count > 1]:
            its = found[fqn]
            found[fqn] = replace(its, forward=its.forward / uses[fqn], backward=its.backward / uses[fqn])
        return found

    def backward_order(self) -> list[Step]:
        """The uses in the order in which their backwards are expected to begin."""
        return backward_order(self._steps())

    def part(self, fqns: Set[str]) -> ShardPlan:
        """The plan of some of its groups alone."""
        edges = self.edges()

        def those(of: Edges) -> Edges:
            cut = [(at, tuple(fqn for fqn in ahead if fqn in fqns)) for at, ahead in of if at in fqns]
            tell = {at for at, ahead in cut if ahead}  # of the others it makes no difference whether they are listed
            return tuple(each for each in cut if each[0] in tell)

        schedule = replace(
            edges,
            forward=those(edges.forward),
            backward=those(edges.backward),
            kept=tuple(fqn for fqn in edges.kept if fqn in fqns),
            in_flight=tuple(each for each in edges.in_flight if each[0] in fqns),
        )
        groups = tuple(group for group in self.groups if group.fqn in fqns)
        orders = tuple((phase, tuple(f for f in order if f in fqns)) for phase, order in self.orders)
        order = tuple(f for f in self.order if f in fqns)
        plan = replace(self, groups=groups, order=order, orders=orders, schedule=schedule)

        def inside(of: Around) -> Around:
            return tuple(pair for pair in of if set(pair) <= fqns)

        arounds = tuple((phase, inside(each)) for phase, each in self.arounds)
        return replace(plan, around=inside(self.around), arounds=arounds)

    # ---- as data

    def to_json(self) -> str:
        """The whole plan as JSON, for `from_json`."""
        return json.dumps({"version": JSON_VERSION, "plan": encode(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ShardPlan:
        """The plan that `to_json` wrote: equal to it, and with the same digest.

        Raises:
            ShardConfigValueError: the text is no plan, one of another version, or has other fields.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ShardConfigValueError(f"plan: is no JSON ({error})") from None
        if not isinstance(data, dict) or "version" not in data:
            raise ShardConfigValueError("plan: has no version; is it a file that to_json() wrote?")
        if data["version"] != JSON_VERSION:
            raise ShardConfigValueError(
                f"plan: is of version {data['version']!r}, and this library reads {JSON_VERSION}; make the plan anew"
            )
        if unknown := sorted(set(data) - {"version", "plan"}):
            raise ShardConfigValueError(f"plan: has fields that are not known: {', '.join(unknown)}")
        plan = decode(cls, data.get("plan"), "plan")
        known = [group.fqn for group in plan.groups]
        edges = plan.edges() if set(plan.order) <= set(known) else None
        named = {"order": plan.order} | {f"orders[{phase!r}]": order for phase, order in plan.orders}
        named["around"] = tuple(itertools.chain.from_iterable(plan.around))
        named |= {f"arounds[{phase!r}]": tuple(itertools.chain.from_iterable(each)) for phase, each in plan.arounds}
        if edges is not None:
            named["schedule.kept"] = edges.kept
            named["schedule.in_flight"] = tuple(fqn for fqn, _ in edges.in_flight)
            for name, pairs in (("forward", edges.forward), ("backward", edges.backward)):
                named[f"schedule.{name}"] = tuple(fqn for at, ahead in pairs for fqn in (at, *ahead))
        for name, listed in named.items():
            if strange := [fqn for fqn in listed if fqn not in known]:
                raise ShardConfigValueError(f"plan.{name}: names {strange[0]!r}, which is none of its groups")
        return plan

    @property
    def digest(self) -> str:
        """SHA-256 of what all ranks must agree on: groups, orders and schedule.

        Some things are left out: costs are a cause, not a part, of the schedule, and places what came of it. Nothing
        else in a plan depends on the rank: sizes of shards are those of a full rank.
        """
        groups = [encode(group) for group in self.groups]
        agreed = {"version": JSON_VERSION, "groups": groups, "order": self.order, "schedule": encode(self.edges())}
        agreed |= {"orders": self.own_orders, "around": self.around, "arounds": self.arounds}
        return hashlib.sha256(json.dumps(agreed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    # ---- compared

    def check(self, other: ShardPlan) -> None:
        """Refuse a plan that was made for another model, or for other ranks; its order and schedule may differ.

        Raises:
            ShardConfigValueError: naming the first group or parameter that differs.
        """
        if difference := other_model(self.groups, other.groups):
            raise ShardConfigValueError(
                f"plan of another model: {difference}. Make the plan anew with make_plan(model)"
            )

    def diff(self, other: ShardPlan) -> str:
        """What is otherwise in `other`, a line each; empty if the plans are equal."""
        lines = group_changes(self.groups, other.groups)
        lines += order_changes(self.order, other.order) + around_changes(self.around, other.around)
        for phase in dict.fromkeys([*self.own_orders, *other.own_orders]):
            lines += [f"{phase}: {line}" for line in order_changes(self.order_in(phase), other.order_in(phase))]
            lines += [f"{phase}: {line}" for line in around_changes(self.around_in(phase), other.around_in(phase))]
        lines += schedule_changes(self.edges(), other.edges())
        for name, old, new in (("prefetch policy", self.prefetch, other.prefetch), ("pool", self.pool, other.pool)):
            lines += [f"{name}: {old} -> {new}"] if old != new else []
        lines += ["costs: differ"] if self.costs != other.costs else []
        if lines and self.peak_bytes != other.peak_bytes:
            lines.append(f"peak: {self.peak_bytes} -> {other.peak_bytes} bytes")
        return "\n".join(lines)

    def __str__(self) -> str:
        shown = [self.group(fqn) for fqn in dict.fromkeys([*self.order, *(g.fqn for g in self.groups)])]
        budget = "" if self.pool.budget is None else f", budget {mib(self.pool.budget)}"
        why = f"prefetch: {self.prefetch}{budget}"
        phases = [(phase, order if order != self.order else ()) for phase, order in self.orders]
        return plan_text(shown, self.schedule, why, self.predicted(), phases)


def replan(plan: ShardPlan, record: Record) -> ShardPlan:
    """The plan for the next step: the order that was seen, and what ran inside of what, take the place of the expected.

    Orders that only other phases have stay.

    Raises:
        PoolBudgetError: in this order a group does not fit into the budget.
    """
    around = {pair for pair in plan.around if pair[0] not in record.order} | set(record.around)
    if record.order == plan.order and around == set(plan.around):
        return plan
    orders = tuple((phase, order) for phase, order in plan.own_orders.items() if order != record.order)
    costs = plan._costs_of(record.order)
    return plan._anew(order=record.order, orders=orders, costs=costs, around=tuple(sorted(around)))
