"""The plan: which parameters are gathered and reduced together, in which order and when. Frozen data.

Bytes, arena offsets and predicted times are computed from the plan. They are not stored in it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from typing import Any

from .._policies import ONE_AHEAD, PoolPolicy, PrefetchPolicy
from ..errors import ShardConfigValueError
from .arena import Arena, Lifetime, Placed, as_placed, peak_bytes, solve
from .codec import read, written
from .costs import Costs, Sizes, Times, held
from .course import CourseStep, courses_of
from .group_plan import GroupPlan as GroupPlan
from .group_plan import ParamPlan as ParamPlan
from .record import Record
from .schedule import (
    MARKS,
    NO_GRAD,
    NO_SYNC,
    TRAIN,
    Action,
    Kind,
    Schedule,
    Step,
    backward_order,
    kept_by_setting,
    one_ahead,
    timed_step,
    training_step,
)
from .search import scheduled
from .simulation import Prediction, Trace, lifetimes, live_bytes, predict, trace
from .text import around_changes, group_changes, mib, order_changes, other_model, plan_text, schedule_changes

JSON_VERSION = 11
UNBOUNDED = PoolPolicy()

Around = tuple[tuple[str, str], ...]  # FQNs of groups, each with its innermost enclosing group


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase that has run.

    Attributes:
        name: name of the phase ("train", "no_grad", "train, no sync", ...; see `phase_of`).
        order: FQNs of the groups in the order in which their forwards began.
        around: the enclosing groups in this phase; None if they are those of the plan.
    """

    name: str
    order: tuple[str, ...]
    around: Around | None = None


@dataclass(frozen=True)
class ShardPlan:
    """The plan of one root.

    Attributes:
        groups: all groups, in module order.
        order: FQNs of the groups in the order in which their forwards begin, one entry per use. This is the module
            order until the first step has run, then the order of that step.
        phases: the phases that have run, sorted by name.
        around: FQNs of the groups that run in the forward of another group (except the root), each with its innermost
            enclosing group. This is the nesting of the modules until the first step has run, then that of the step. A
            use in `order` is inside a group if it directly follows that group or another use inside it.
        prefetch, pool, costs: the inputs of the schedule; see `with_policies`.
        schedule: which groups are prefetched and kept, and when reductions are waited for. None for the default
            schedule: prefetch one module, and keep the groups that are not resharded after forward.
        places: the slots of the buffers in the pool of the engine that follows this plan, once they are known. They are
            observed, not planned. Plans that differ only in `places` are equal.
        phase: the phase of this plan; see `in_phase`.
    """

    groups: tuple[GroupPlan, ...]
    order: tuple[str, ...]
    phases: tuple[Phase, ...] = ()
    prefetch: PrefetchPolicy = ONE_AHEAD
    pool: PoolPolicy = UNBOUNDED
    costs: Costs | None = None
    schedule: Schedule | None = None
    places: tuple[Placed, ...] = field(default=(), compare=False)
    phase: str = TRAIN
    around: Around = ()

    def group(self, fqn: str) -> GroupPlan:
        """The group of the module `fqn`."""
        return self._by_fqn[fqn]

    @functools.cached_property
    def _by_fqn(self) -> dict[str, GroupPlan]:
        return {group.fqn: group for group in self.groups}

    @property
    def is_default(self) -> bool:
        """Whether the schedule depends only on the settings of the groups, and not on policies."""
        return self.prefetch == ONE_AHEAD and self.pool == UNBOUNDED

    # ---- phases

    def _phase_named(self, name: str) -> Phase:
        """The phase with this name. If it has not run, a phase with the plan's order."""
        return next((phase for phase in self.phases if phase.name == name), Phase(name, self.order))

    def order_in(self, phase: str) -> tuple[str, ...]:
        """The order of forwards in a phase. `order` if the phase has not run."""
        return self._phase_named(phase).order

    def around_in(self, phase: str) -> Around:
        """The enclosing groups in a phase. `around` if the phase has no others."""
        around = self._phase_named(phase).around
        return self.around if around is None else around

    def noting(self, phase: str, order: tuple[str, ...], around: Around | None = None) -> ShardPlan:
        """Copy this plan, and add the order of a phase and, if they are new, its enclosing groups."""
        if around is None or set(around) <= set(self.around_in(phase)):
            around = self._phase_named(phase).around
        others = (each for each in self.phases if each.name != phase)
        phases = sorted((*others, Phase(phase, order, around)), key=lambda each: each.name)
        return replace(self, phases=tuple(phases))

    def _anew(self, **changes: Any) -> ShardPlan:
        """Copy this plan with these changes and a new schedule."""
        other = replace(self, schedule=None, **changes)
        return other if other.is_default else other._scheduled()

    def in_phase(self, phase: str) -> ShardPlan:
        """The plan of a phase: its actions, bytes and times are those of a forward of this phase and its backward.

        If the phase has the same order, it has the same schedule. Otherwise a schedule is made for the phase's order,
        under the same policies. In an "again" phase, the memory that an earlier forward still holds is not counted.

        Raises:
            PoolBudgetError: a group does not fit into the budget in this order.
        """
        order, around = self.order_in(phase), self.around_in(phase)
        if (order, around) == (self.order, self.around):
            return self if phase == self.phase else replace(self, phase=phase)
        return self._anew(order=order, around=around, costs=self._costs_of(order), phase=phase)

    def _costs_of(self, order: tuple[str, ...]) -> Costs | None:
        """The costs for another order, scaled by the number of uses. None if a group has not been measured."""
        if self.costs is None or not {fqn for fqn, _ in self.costs.forward}.issuperset(order):
            return None
        before, now = Counter(self.order), Counter(order)
        uses = {fqn: now[fqn] / before[fqn] for fqn in now if 0 < before[fqn] != now[fqn]}
        return self.costs.scaled(uses) if uses else self.costs

    @property
    def own_orders(self) -> dict[str, tuple[str, ...]]:
        """The orders of the phases whose order or enclosing groups differ from those of the plan."""
        return {phase.name: phase.order for phase in self._own_phases()}

    def _own_phases(self) -> list[Phase]:
        return [phase for phase in self.phases if phase.order != self.order or phase.around is not None]

    # ---- the step

    def actions(self) -> tuple[Action, ...]:
        """The planned actions of a step."""
        return training_step(self._steps(), self.schedule, self.phase)

    def timed(self) -> tuple[Action, ...]:
        """`actions`, with the beginnings and ends of forwards and backwards."""
        return timed_step(self._steps(), self.effective_schedule(), self.phase)

    def effective_schedule(self) -> Schedule:
        """The schedule, including the default schedule."""
        return self.schedule or self._one_ahead

    @functools.cached_property
    def _one_ahead(self) -> Schedule:
        return one_ahead(self._steps())

    def live_bytes(self) -> tuple[int, ...]:
        """Leased bytes after each of `actions`. For `SHRINK`, the bytes during it: the weights and their new pieces."""
        return tuple(live_bytes(self.lifetimes(), len(self.actions())))

    def lifetimes(self) -> list[Lifetime]:
        """The buffers that `actions` lease, by action index. Names are ``weights layers.3``, ``landing layers.3``..."""
        return lifetimes(self.actions(), self._sizes())

    @property
    def peak_bytes(self) -> int:
        """Predicted peak bytes of unsharded parameters and communication buffers in a training step.

        Not included: activations, `.grad`, and gradients that autograd has not yet passed to the engine.
        """
        return peak_bytes(self.lifetimes())

    def arena(self) -> Arena:
        """Offsets for all buffers of `actions`: those of the pool if they are known and still valid, else solved.

        Buffers of different streams may share memory, because the pool orders them by events.
        """
        lives, timed = self.lifetimes(), self.timed()
        forward = itertools.takewhile(lambda action: action.kind is not Kind.BACKWARD, timed)
        turn = sum(action.kind not in MARKS for action in forward)
        return (as_placed(lives, turn, self.places) if self.places else None) or solve(lives)

    def courses(self) -> tuple[list[CourseStep], list[CourseStep]]:
        """The courses of forward and of backward: launches, waits and compute in order."""
        sizes = self._sizes()
        nbytes = {fqn: (self.group(fqn).unsharded_bytes, size.reduction - size.queued) for fqn, size in sizes.items()}
        return courses_of(self.timed(), nbytes)

    def _streamed(self) -> Arena | None:
        """The arena if streams wait for communication, else None. Shared memory only costs time with streams."""
        return self.arena() if self.costs is not None and self.costs.streams else None

    def trace(self) -> Trace | None:
        """The times of the actions of a step. None without costs."""
        times = self.times()
        return None if times is None else trace(self.timed(), times, self._streamed())

    def predicted(self) -> Prediction:
        """Predicted peak of each type of memory. With costs, also the times and exposed communication of each group."""
        return predict(self.timed(), self._sizes(), self.times(), self._streamed())

    def with_policies(
        self,
        prefetch: PrefetchPolicy | None = None,
        pool: PoolPolicy | None = None,
        costs: Costs | None = None,
    ) -> ShardPlan:
        """Copy this plan with a new schedule. An argument that is None keeps this plan's value.

        Args:
            prefetch: the new prefetch policy.
            pool: the new pool policy (budget in bytes).
            costs: the new costs (times in seconds).

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
        made = scheduled(steps, self._bare_sizes(), self.prefetch, budget, self.times())
        if self.phase.startswith(NO_GRAD):
            stays = kept_by_setting(steps)
            made = replace(made, backward=(), kept=tuple(fqn for fqn in made.kept if fqn in stays))
        return replace(self, schedule=None if made == one_ahead(steps) else made)

    def _steps(self) -> list[Step]:
        around: dict[str, tuple[str, ...]] = {}
        for fqn, outer in self.around:
            around[fqn] = (*around.get(fqn, ()), outer)
        steps = {fqn: self.group(fqn).step for fqn in dict.fromkeys(self.order)}
        last = {group.fqn: turn for turn, group in enumerate(self.groups) if group.reduces_last}
        for fqn in steps.keys() & (around.keys() | last.keys()):
            steps[fqn] = replace(steps[fqn], around=around.get(fqn, ()), turn=last.get(fqn))
        return [steps[fqn] for fqn in self.order]

    def _sizes(self) -> dict[str, Sizes]:
        return held(self._bare_sizes(), frozenset(self.effective_schedule().holds))

    def _bare_sizes(self) -> dict[str, Sizes]:
        return {fqn: self.group(fqn).sizes for fqn in dict.fromkeys(self.order)}

    def schedule_inputs(self) -> tuple[list[Step], dict[str, Sizes], dict[str, Times] | None]:
        """The inputs of a schedule: uses of groups in order, bytes of groups, and seconds if costs are known."""
        return self._steps(), self._bare_sizes(), self.times()

    def times(self) -> dict[str, Times] | None:
        """Seconds per use of each group, by FQN. None without costs."""
        if self.costs is None:
            return None
        uses = Counter(self.order)
        times = self.costs.times({fqn: self.group(fqn).moved for fqn in uses})
        for fqn in [fqn for fqn, count in uses.items() if count > 1]:
            total = times[fqn]
            times[fqn] = replace(total, forward=total.forward / uses[fqn], backward=total.backward / uses[fqn])
        return times

    def backward_order(self) -> list[Step]:
        """The uses of groups in the planned order of their backwards."""
        return backward_order(self._steps())

    def restricted_to(self, fqns: Set[str]) -> ShardPlan:
        """The plan restricted to these groups."""
        if self._by_fqn.keys() <= fqns:
            return self

        def inside(around: Around) -> Around:
            return tuple(pair for pair in around if set(pair) <= fqns)

        def only(order: Iterable[str]) -> tuple[str, ...]:
            return tuple(fqn for fqn in order if fqn in fqns)

        return replace(
            self,
            groups=tuple(group for group in self.groups if group.fqn in fqns),
            order=only(self.order),
            phases=tuple(Phase(p.name, only(p.order), p.around and inside(p.around)) for p in self.phases),
            schedule=self.effective_schedule().part(fqns),
            around=inside(self.around),
        )

    # ---- serialization

    def to_json(self) -> str:
        """The whole plan as JSON, for `from_json`."""
        return written(self, "plan", JSON_VERSION)

    @classmethod
    def from_json(cls, text: str) -> ShardPlan:
        """Read a plan that `to_json` wrote. It is equal to the original and has the same digest.

        Raises:
            ShardConfigValueError: the text is not a plan, has another version, or has missing or unknown fields.
        """
        plan = read(cls, text, "plan", JSON_VERSION)
        for where, listed in plan._names():
            if strange := [fqn for fqn in listed if fqn not in plan._by_fqn]:
                raise ShardConfigValueError(f"plan.{where}: names {strange[0]!r}, which is not a group of the plan")
        return plan

    def _names(self) -> Iterator[tuple[str, Iterable[str]]]:
        """All references to groups by FQN, with the name of the field that contains them."""
        yield "order", self.order
        yield "around", itertools.chain.from_iterable(self.around)
        for phase in self.phases:
            yield f"phases[{phase.name!r}].order", phase.order
            yield f"phases[{phase.name!r}].around", itertools.chain.from_iterable(phase.around or ())
        for name, fqns in () if self.schedule is None else self.schedule.names():
            yield f"schedule.{name}", fqns

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of all fields on which ranks must agree: groups, orders, enclosing groups and schedule.

        It does not include policies and costs, which are inputs of the schedule, and `places`, which are observed. No
        field of a plan depends on the rank: shard sizes are those of a rank without short pieces.
        """
        phases = [(phase.name, phase.order, phase.around) for phase in self._own_phases()]
        agreed = JSON_VERSION, self.groups, self.order, self.around, self.effective_schedule().telling(), phases
        return hashlib.sha256(repr(agreed).encode()).hexdigest()

    # ---- comparison

    def check(self, other: ShardPlan) -> None:
        """Check that this plan is for the same model and ranks as `other`, the plan of the model.

        Order and schedule may differ.

        Raises:
            ShardConfigValueError: a group or parameter differs. The message names the first difference.
        """
        if difference := other_model(self.groups, other.groups):
            raise ShardConfigValueError(
                f"plan of another model: {difference}. Re-create the plan with make_plan(model)"
            )

    def diff(self, other: ShardPlan) -> str:
        """Describe the differences from this plan to `other`, one per line. Empty if the plans are equal."""
        lines = group_changes(self.groups, other.groups)
        lines += order_changes(self.order, other.order) + around_changes(self.around, other.around)
        for phase in dict.fromkeys([*self.own_orders, *other.own_orders]):
            lines += [f"{phase}: {line}" for line in order_changes(self.order_in(phase), other.order_in(phase))]
            lines += [f"{phase}: {line}" for line in around_changes(self.around_in(phase), other.around_in(phase))]
        lines += schedule_changes(self.effective_schedule(), other.effective_schedule())
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
        phases = [(phase.name, phase.order if phase.order != self.order else ()) for phase in self.phases]
        return plan_text(shown, self.schedule, why, self.predicted(), phases)


def replan(plan: ShardPlan, record: Record) -> ShardPlan:
    """Make the plan for the next step: the recorded order and enclosing groups replace the planned ones.

    The orders of other phases are kept.

    Raises:
        PoolBudgetError: a group does not fit into the budget in this order.
    """
    around = {pair for pair in plan.around if pair[0] not in record.order} | set(record.around)
    if record.order == plan.order and around == set(plan.around):
        return plan
    phases = tuple(p for p in plan._own_phases() if p.order != record.order or p.around is not None)
    costs = plan._costs_of(record.order)
    return plan._anew(order=record.order, phases=phases, costs=costs, around=tuple(sorted(around)))
